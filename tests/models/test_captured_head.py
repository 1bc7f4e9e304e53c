"""Networks whose forward cannot be recorded, cut before their head: equal to the network alone, bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyfed as pf
from polyfed.engine.federation import Run
from polyfed.errors import ConfigError
from polyfed.models import build, cut_shapes, with_projection
from polyfed.models.adapt import Adapted


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


@pytest.mark.parametrize(("make", "head"), CASES)
def test_names_parts_and_width(make: Callable[[], nn.Module], head: str) -> None:
    module = make()
    keys = list(module.state_dict())
    model = pf.split(module, head, extractor=None)
    assert list(model.export()) == keys
    assert list(model.state_dict()) == [f"original.{key}" for key in keys]
    assert model.names("head") == (f"original.{head}.weight", f"original.{head}.bias")
    assert model.names("intermediate") == ()
    assert sorted(model.names("extractor") + model.names("head")) == sorted(model.state_dict())
    assert model.feature_dim == 5
    assert cut_shapes(model.eval(), inputs(3)) == ((5,), (5,))
    with pytest.raises(ConfigError, match="has no tensor 'nothing'"):
        model.part_of("nothing")


def test_copies_other_weights_and_functional_calls() -> None:
    one, two = (pf.split(Loops().eval(), "top.fc", None) for _ in range(2))
    x = inputs(4)
    weights = {key: tensor.detach().clone() for key, tensor in two.state_dict().items()}
    assert torch.equal(torch.func.functional_call(one, weights, (x,)), two(x))
    assert not torch.equal(one(x), two(x))
    copied = copy.deepcopy(one)
    assert copied.original is not one.original
    with torch.no_grad():
        copied.original.stem.weight.zero_()
    assert not torch.equal(copied(x), one(x))
    two.load_state_dict(one.state_dict())
    assert torch.equal(two(x), one(x))
    stored = io.BytesIO()
    pickle.dump(one, stored)
    assert torch.equal(pickle.loads(stored.getvalue())(x), one(x))
    plain = Loops().eval()
    plain.load_state_dict(one.export())
    assert torch.equal(plain(x), one(x))


def test_gradients_of_stacked_weights() -> None:
    model, x = pf.split(Loops(branches=False, norm=False, drop=0.0), "top.fc", None), inputs(5)
    weights = {key: torch.stack([t.detach(), 2 * t.detach()]) for key, t in model.state_dict().items()}

    def loss(w: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, w, (x,)).square().sum()

    together = torch.func.vmap(torch.func.grad(loss))(weights)
    alone = torch.func.grad(loss)({key: t[1] for key, t in weights.items()})
    for key, gradient in alone.items():
        assert torch.allclose(together[key][1], gradient, rtol=1e-4, atol=1e-6)


def test_a_projection_takes_the_heads_place() -> None:
    model, x = pf.split(Loops().eval(), "top.fc", None), inputs(4)
    narrow = with_projection(model, 2).eval()
    assert narrow.represent(x).shape == (4, 2)
    assert narrow(x).shape == (4, 3)
    assert torch.equal(narrow(x), narrow.original(x))  # type: ignore[operator]
    assert narrow.part_of("original.top.fc.projection.weight") == "extractor"
    assert model.feature_dim == 5


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


def test_a_head_with_a_forward_of_its_own_keeps_it() -> None:
    module, x = Loops().eval(), inputs(3)
    fc = module.top["fc"]
    fc.forward = lambda z: torch.zeros(len(z), 3)  # type: ignore[method-assign]
    model = pf.split(module, "top.fc", None)
    assert torch.equal(model(x), torch.zeros(3, 3))
    assert torch.equal(module(x), torch.zeros(3, 3))


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


def test_before_round_1_too() -> None:
    x, y = inputs(6), torch.arange(6) % 3
    clients = [pf.Client(pf.split(Net(divides), "fc", None), (x, y)) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"client 0 .* the forward goes on \(TypeError\) after the head 'fc'"):
        pf.Federation(clients, pf.methods.FedGH())


def test_an_extractor_needs_a_record_and_the_line_says_what_to_write() -> None:
    with pytest.raises(ConfigError) as said:
        pf.split(Loops(), "top.fc", "stem")
    assert "cannot be cut after 'stem'" in str(said.value)
    assert "write x.shape[0] for len(x); or pass extractor=None" in str(said.value)
    with pytest.raises(ConfigError, match=r"draws random numbers .* or pass extractor=None"):
        pf.split(Draws(), "fc", "body")


def test_tied_weights_of_the_head() -> None:
    module = Net(lambda n, h: n.fc(h))
    module.body = nn.Linear(3, 3)
    module.body.weight = module.fc.weight
    with pytest.raises(ConfigError, match=r"'fc.weight' is used both in the .* give the head tensors of its own"):
        pf.split(module, "fc", None)


# in a federation


def federate(method: pf.Method, executor: str, workers: int | None = None, **network: Any) -> tuple[Run, list[str]]:
    """Four clients of two widths; the run, and what was said."""
    torch.manual_seed(1)
    x, y = inputs(80), torch.arange(80) % 3
    models = [pf.split(Loops(width, **network), "top.fc", None) for width in (6, 6, 9, 9)]
    parts = [(x[k::4], y[k::4]) for k in range(4)]
    clients = [
        pf.Client(model, (a[:12], b[:12]), (a[12:], b[12:])) for model, (a, b) in zip(models, parts, strict=True)
    ]
    said: list[str] = []
    told = type("Told", (), {"message": lambda self, text: said.append(text)})()
    training = pf.Training(rounds=2, lr=0.1, batch_size=6)
    made = pf.Federation(clients, method, training, executor=pf.Execution(executor, workers=workers), loggers=[told])
    return made.run(), said


@pytest.mark.parametrize("branches", [False, True])
def test_cohorts_stack_what_can_be_stacked(branches: bool) -> None:
    network = {"branches": branches, "norm": False, "drop": 0.0}
    (alone, _), (together, said) = (
        federate(pf.methods.FedGH(), *how, **network) for how in (("serial", None), ("vectorized", 2))
    )
    assert bool(said) == branches, "a branch by a value cannot be taken for several clients at once"
    for number, model in alone.models.items():
        for name, tensor in model.state_dict().items():
            assert torch.allclose(tensor, together.models[number].state_dict()[name], rtol=1e-4, atol=1e-6)


def test_what_a_method_cuts_itself_says_why_not() -> None:
    with pytest.raises(ConfigError, match="Loops cannot be cut to narrower networks: its forward cannot be recorded"):
        federate(pf.methods.HeteroFL(), "serial")


def loops(in_shape: tuple[int, ...], classes: int) -> nn.Module:
    return Loops()


def test_by_name_in_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_nets", sys.modules[__name__])
    model, x = build("own_nets:loops", (4,), 3).eval(), inputs(5)
    assert isinstance(model, Adapted)
    assert model.head_name == "top.fc"
    assert torch.equal(model(x), model.original(x))
    with pytest.raises(ConfigError, match=r"cannot be cut after 'stem': .* write x.shape\[0\] for len\(x\)"):
        build("own_nets:loops@stem", (4,), 3)
