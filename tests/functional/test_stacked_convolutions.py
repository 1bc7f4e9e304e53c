"""Convolutions of several clients are those of one after the other, in every form."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.functional import stacked_convolutions
from polyfed.functional.stacked_convolutions import FORMS, conv2d, milliseconds
from polyfed.functional.vmapped import FewerKernels

DRAWS = torch.Generator().manual_seed(0)
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {  # rows; filters; how these move
    "one client, plain": ((1, 2, 3, 6, 7), (1, 4, 3, 3, 2), {}),
    "1x1": ((3, 2, 4, 5, 5), (3, 2, 4, 1, 1), {"stride": 2}),
    "one channel, steps": ((3, 2, 1, 9, 8), (3, 6, 1, 3, 3), {"stride": (2, 3), "padding": (1, 2)}),
    "groups, dilation": ((3, 1, 4, 9, 9), (3, 6, 2, 3, 3), {"groups": 2, "dilation": (1, 2), "padding": [2]}),
    "depthwise": ((2, 2, 4, 6, 6), (2, 4, 1, 3, 3), {"groups": 4, "padding": 1}),
    "same": ((2, 2, 3, 6, 7), (2, 4, 3, 2, 4), {"padding": "same", "dilation": (1, 3)}),
    "valid": ((2, 2, 3, 6, 7), (2, 4, 3, 3, 3), {"padding": "valid"}),
}
AXES = [(0, 0), (0, 0, 0), (1, 3, 1), (None, 0, 0), (0, None, 0), (0, 0, None)]  # None: the first one's for all


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """All convolutions have it, and nothing else computes them."""
    monkeypatch.setattr(stacked_convolutions, "FORM", request.param)
    for other in set(FORMS) - {request.param}:
        monkeypatch.delattr(stacked_convolutions._Convolution, other)
    return request.param


def tensors(case: str) -> list[Tensor]:
    x, weight, _ = CASES[case]
    shapes = (x, weight, weight[:2])
    return [torch.randn(shape, dtype=torch.float64, generator=DRAWS) for shape in shapes]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_it_is_that_of_one_after_the_other(form: str, case: str, axes: tuple[int | None, ...]) -> None:
    """Forward and backward; of images, filters and, where there are any, biases of each client's own or of all."""
    options = CASES[case][2]
    pairs = list(zip(tensors(case), axes, strict=False))
    given = [t[0] if axis is None else t.movedim(0, axis).contiguous() for t, axis in pairs]
    leaves = [t.requires_grad_() for t in given]
    found = torch.func.vmap(lambda *own: conv2d(*own, **options), in_dims=axes)(*leaves)
    whole = [
        t.expand(len(found), *t.shape) if axis is None else t.movedim(axis, 0)
        for t, (_, axis) in zip(leaves, pairs, strict=True)
    ]
    expected = torch.stack([F.conv2d(*one, **options) for one in zip(*whole, strict=True)])
    torch.testing.assert_close(found, expected)
    back = torch.randn_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad(y, leaves, back) for y in (found, expected)))


def test_gradients_may_be_taken_within(form: str) -> None:
    """A loss of which a gradient is part."""
    x, weight, _ = tensors("depthwise")

    def bent(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.grad(lambda w: conv2d(x, w, groups=4).pow(3).sum())(weight).square().sum()

    found, expected = [], []
    for values, every in ((found, torch.func.vmap), (expected, lambda f: lambda *own: torch.stack([*map(f, *own)]))):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        values.append(every(bent)(*leaves))
        values += torch.autograd.grad(values[0].sum(), leaves)
    torch.testing.assert_close(found, expected)


def test_in_bfloat16_weights_and_gradients_are_float32(form: str) -> None:
    """And what lies between is rounded, as it is for one after the other."""
    leaves = [t.float().requires_grad_() for t in tensors("depthwise")]
    exact = torch.func.vmap(lambda *own: conv2d(*own, groups=4))(*leaves)

    def one(*own: Tensor) -> Tensor:
        with FewerKernels():
            return F.conv2d(*own, groups=4)

    with torch.autocast("cpu", torch.bfloat16):
        found = torch.func.vmap(one)(*leaves)
        expected = torch.stack([F.conv2d(*own, groups=4) for own in zip(*leaves, strict=True)])
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)
    assert not torch.allclose(found.float(), exact, rtol=1e-3)
    gradients, alone = (torch.autograd.grad(y.float().square().sum(), leaves) for y in (found, expected))
    assert [t.dtype for t in gradients] == [torch.float32] * 3
    torch.testing.assert_close(gradients, alone, rtol=0.02, atol=1.0)


def test_on_a_cpu_it_is_vmaps_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(stacked_convolutions, "_OfAll")
    x, weight, bias = tensors("depthwise")
    found = torch.func.vmap(lambda *own: conv2d(*own, groups=4))(x, weight, bias)
    assert torch.equal(found, torch.func.vmap(lambda *own: F.conv2d(*own, groups=4))(x, weight, bias))


class Clock:
    """In place of a GPU's: each form takes as long as `takes` says, and `asked` has the forms that were timed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.takes = dict.fromkeys(FORMS, 1.0)
        self.asked: list[str] = []
        self.captures, self.memory = False, 2**30
        monkeypatch.setattr(stacked_convolutions, "_known", {})
        monkeypatch.setattr(stacked_convolutions, "is_timed", lambda device: True)
        monkeypatch.setattr(stacked_convolutions, "milliseconds", self._milliseconds)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, self.memory))
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def _milliseconds(self, conv: Any, form: str, given: Any) -> float:
        self.asked.append(form)
        return self.takes[form]

    def form_of(self, monkeypatch: pytest.MonkeyPatch, *given: Tensor, **options: Any) -> str:
        """In which form these are computed."""
        used: list[str] = []
        with monkeypatch.context() as changed:
            for name in FORMS:
                compute = getattr(stacked_convolutions._Convolution, name)
                spied = lambda *a, name=name, compute=compute: used.append(name) or compute(*a)  # noqa: E731
                changed.setattr(stacked_convolutions._Convolution, name, spied)
            torch.func.vmap(lambda *own: conv2d(*own, **options))(*given)
        (form,) = used
        return form


def test_the_fastest_is_found_out_once_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    x, weight, bias = tensors("one channel, steps")
    clock.captures = True
    assert clock.form_of(monkeypatch, x, weight, bias) == "grouped"  # a recorded step cannot be timed, nor can it wait
    assert clock.asked == []
    clock.captures = False
    clock.takes["in_turn"] = 0.5
    assert clock.form_of(monkeypatch, x, weight, bias) == "in_turn"
    assert clock.asked == list(FORMS)
    clock.captures, clock.takes["unfolded"] = True, 0.1
    assert clock.form_of(monkeypatch, x[:2], weight[:2], bias[:2]) == "in_turn"  # about as many
    clock.captures = False
    assert clock.form_of(monkeypatch, x, weight, bias, stride=2) == "unfolded"
    assert clock.form_of(monkeypatch, x, weight.clone().requires_grad_(), bias) == "unfolded"
    assert clock.form_of(monkeypatch, x.float(), weight.float(), bias.float()) == "unfolded"
    assert clock.asked == 4 * list(FORMS)


def test_what_takes_much_memory_is_not_unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.takes["unfolded"] = 0.1
    x, weight, _ = tensors("depthwise")
    unfolded = 2 * 2 * 4 * 9 * 36 * 8
    clock.memory = 64 * unfolded - 1
    assert clock.form_of(monkeypatch, x, weight, groups=4, padding=1) == "grouped"
    clock.memory = 64 * unfolded
    assert clock.form_of(monkeypatch, x.requires_grad_(), weight, groups=4, padding=1) == "unfolded"


def test_a_timing_takes_both_passes_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that counts the passes; what cannot be computed takes for ever."""
    passes: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.count = 0

        def record(self) -> None:
            self.count = len(passes)

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return other.count - self.count

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)
    x, weight, bias = (t.requires_grad_() for t in tensors("depthwise"))
    conv = stacked_convolutions._Convolution((1, 1), (1, 1), (1, 1), 4)
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda y, given, back: passes.append(grad(y, given, back)))
    assert milliseconds(conv, "unfolded", (x, weight, bias)) == 2
    assert len(passes) == 4
    assert all(t.grad is None for t in (x, weight, bias))
    assert milliseconds(conv, "unfolded", (x, weight.detach()[:, :, :, :0])) == math.inf
