"""Facts and tensors that cross as bytes arrive bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from polyfed.engine.executors.worker_requests import pack, unpack
from polyfed.errors import RunError

TYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "uint8", "int8", "bool", "complex64"]


def alike(a: Tensor, b: Tensor) -> bool:
    """Equal in all that a computation could tell."""
    same = a.shape == b.shape and a.dtype == b.dtype and (a.stride() == b.stride() or not a.numel())
    return same and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))


@settings(max_examples=40, deadline=None)
@given(some.sampled_from(TYPES), some.lists(some.integers(0, 4), max_size=4), some.booleans())
def test_all_types_and_shapes_arrive(kind: str, shape: list[int], reversed_: bool) -> None:
    tensor = (100 * torch.randn(shape)).to(getattr(torch, kind))
    tensor = tensor.permute(*reversed(range(len(shape)))) if reversed_ and shape else tensor
    sent = {"first": torch.tensor([float("nan"), -0.0, 1e-45]), "group": {"t": tensor}, "none": None, "empty": {}}
    facts, found = unpack(pack({"round": 3, "loss": float("inf")}, sent))
    assert facts == {"round": 3, "loss": float("inf")}
    assert alike(found["group"]["t"], tensor)
    assert alike(found["first"], sent["first"])  # type: ignore[arg-type]
    assert (found["none"], found["empty"], list(found)) == (None, {}, list(sent))


def test_strides_are_those_of_a_clone() -> None:
    base = torch.randn(4, 3, 5, 5)
    for tensor in (base.to(memory_format=torch.channels_last), base[:, :, ::2], base[1], torch.ones(1).expand(3, 2)):
        assert alike(unpack(pack({}, {"t": tensor}))[1]["t"], tensor.clone())


def test_what_several_are_sent_travels_once() -> None:
    sent, other = torch.randn(1000), torch.randn(1000)
    once, twice = pack({}, {"0": sent, "1": other}), pack({}, {"0": sent, "1": other, "2": sent.view(1000)})
    assert len(twice) < len(once) + 1000
    found = unpack(twice)[1]
    assert torch.equal(found["2"], sent)
    assert torch.equal(found["1"], other)
    assert len(pack({}, {"0": sent, "1": sent.clone()})) > 8000
    assert unpack(pack({}, {"0": sent, "1": sent.view(2, 500)}))[1]["1"].shape == (2, 500)


def test_only_tensors_travel() -> None:
    with pytest.raises(RunError, match="expected tensors in messages and states, got float"):
        pack({}, {"state": {"a": 0.5}})
