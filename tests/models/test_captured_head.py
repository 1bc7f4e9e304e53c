"""Networks whose forward cannot be recorded, cut before their head: equal to the network alone, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyfed as pf
from polyfed.errors import ConfigError


class Loops(nn.Module):
    """As many steps as the batch has rows, another branch by a value, dropout and BatchNorm; a head deep inside."""

    def __init__(self, width: int = 6, branches: bool = True, norm: bool = True, drop: float = 0.3) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.drop = nn.Dropout(drop)
        self.top = nn.ModuleDict({"wide": nn.Linear(width, 5), "fc": nn.Linear(5, 3)})
        self.unused = nn.Parameter(torch.ones(2))
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.stem(x))
        for _ in range(1 + len(x) % 3):
            h = h + torch.tanh(h)
        if self.branches and h.mean() > 0:
            h = -h
        return self.top["fc"](self.drop(self.top["wide"](h).relu()))


class Draws(nn.Module):
    """Noise that does not depend on the input: a record would repeat it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x + 0.1 * torch.randn(4)))


class Logits(nn.Module):
    """Returns what a network of Hugging Face does, and calls its head by a keyword."""

    class Said(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            return self[name]

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        z = self.body(x) if len(x) > 2 else -self.body(x)
        return Logits.Said(loss=None, logits=self.fc(input=z))


CASES: list[tuple[Callable[[], nn.Module], str]] = [(Loops, "top.fc"), (Draws, "fc"), (Logits, "fc")]


def inputs(rows: int, seed: int = 7) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def logits(module: nn.Module, x: Tensor) -> Tensor:
    returned = module(x)
    found: Tensor = returned if isinstance(returned, Tensor) else returned["logits"]
    return found


def fed_to_head(module: nn.Module, head: str, x: Tensor) -> Tensor:
    """What the head is called with, by a hook of PyTorch's."""
    seen: list[Tensor] = []
    layer = module.get_submodule(head)
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append([*args, *kwargs.values()][0]), with_kwargs=True
    )
    module(x)
    hook.remove()
    (z,) = seen
    return z


@pytest.mark.parametrize("rows", [2, 3, 4, 7])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("make", "head"), CASES)
def test_equal_to_the_uncut_network(make: Callable[[], nn.Module], head: str, training: bool, rows: int) -> None:
    module = make().train(training)
    twin, other = copy.deepcopy(module), copy.deepcopy(module)
    model, x = pf.split(module, head, extractor=None), inputs(rows)
    for seed in (3, 4):  # the second call starts from what the first has left
        torch.manual_seed(seed)
        expected = logits(twin, x)
        torch.manual_seed(seed)
        z = model.represent(x)
        torch.manual_seed(seed)
        assert torch.equal(z, fed_to_head(other, head, x))
        assert torch.equal(model.head(z), expected)
        for key, tensor in twin.state_dict().items():  # BatchNorm has counted once
            assert torch.equal(module.state_dict()[key], tensor), key
    expected.square().sum().backward()
    model.head(z).square().sum().backward()
    for (name, ours), (_, theirs) in zip(module.named_parameters(), twin.named_parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
    torch.manual_seed(5)
    expected = logits(twin, x)
    torch.manual_seed(5)
    assert torch.equal(model(x), expected)


def test_the_heads_own_hooks_run_once() -> None:
    module, calls = Loops().eval(), list[str]()
    module.top["fc"].register_forward_pre_hook(lambda *_: calls.append("before"))
    module.top["fc"].register_forward_hook(lambda *_: calls.append("after"))
    model = pf.split(module, "top.fc", None)
    model(inputs(3))
    assert calls == ["before", "after"]
    model.represent(inputs(3))
    assert calls == ["before", "after"]
    module(inputs(3))
    assert len(calls) == 4


def test_after_an_error_the_network_is_as_before() -> None:
    module = Loops().eval()
    model = pf.split(module, "top.fc", None)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(3, 9))
    assert "forward" not in vars(module.top["fc"])
    assert torch.equal(model(inputs(3)), module(inputs(3)))


# what is refused


class Net(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.fc, self.run = nn.Linear(4, 3), nn.Linear(3, 3), run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, self.body(x) if len(x) > 1 else x)


def divides(n: Any, h: Tensor) -> Tensor:
    y: Tensor = n.fc(h)
    y /= 2
    return y


REFUSED: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (lambda n, h: n.fc(h).relu(), "the forward goes on (AttributeError) after the head 'fc'"),
    (divides, "the forward goes on (TypeError) after the head 'fc'"),
    (lambda n, h: n.fc(h) + 1, "the forward goes on (TypeError) after the head 'fc'"),
    (lambda n, h: torch.relu(n.fc(h)), "the forward goes on (TypeError) after the head 'fc'"),
    (lambda n, h: (n.fc(h), h), "the forward returns a tuple after the head 'fc'"),
    (lambda n, h: [n.fc(h), h][1], "the forward returns another tensor after the head 'fc'"),
    (lambda n, h: [n.fc(h), n.fc(h)][0], "its head 'fc' is called more than once"),
    (lambda n, h: n.fc(n.fc(h)), "its head 'fc' must be called with one tensor"),
    (lambda n, h: nn.functional.linear(h, n.fc.weight), "its head 'fc' is never called"),
]


@pytest.mark.parametrize(("run", "line"), REFUSED)
def test_a_head_that_is_not_last_or_not_called_once_is_refused(run: Callable[[Any, Tensor], Any], line: str) -> None:
    with pytest.raises(ConfigError) as early:
        pf.split(Net(run), "fc", None, example=inputs(3))
    assert line in str(early.value)
    assert "\n" not in str(early.value)
    with pytest.raises(ConfigError) as late:
        pf.split(Net(run), "fc", None)(inputs(3))
    assert str(late.value) == str(early.value)


def test_an_extractor_needs_a_record_and_the_line_says_what_to_write() -> None:
    with pytest.raises(ConfigError) as said:
        pf.split(Loops(), "top.fc", "stem")
    assert "cannot be cut after 'stem'" in str(said.value)
    assert "write x.shape[0] for len(x); or pass extractor=None" in str(said.value)
    with pytest.raises(ConfigError, match=r"draws random numbers .* or pass extractor=None"):
        pf.split(Draws(), "fc", "body")


# in a federation
