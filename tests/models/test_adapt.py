"""Modules of other people as split models: equal to the unsplit module, bit for bit, or refused in one line."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyfed as pf
from polyfed.errors import ConfigError
from polyfed.models import SplitModel, with_projection
from polyfed.models.adapt import split
from tests.helpers.refusals import refusal


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.3),
        nn.Conv2d(4, 6, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(24, 10), nn.Dropout(0.5), nn.Linear(10, 3),
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 1e9:  # cannot be recorded, and need not be: the block is called whole
            return x
        return F.relu(self.bn(self.conv(x)) + x)


class Skip(nn.Module):
    """Skip connections in blocks and at the top, functional calls, a parameter, buffers and constants of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Block(4), Block(4))
        self.layer2 = Block(4)
        self.shift = nn.Parameter(torch.randn(4, 1, 1))
        self.register_buffer("scale", torch.rand(4, 1, 1))
        self.drop, self.norm = nn.Dropout(0.4), nn.LayerNorm(16)
        self.fc = nn.Linear(16, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, gain: float | None = None) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 2)
        x = self.layer1(x)
        y = self.layer2(x) * self.scale + self.shift + torch.arange(4.0).view(4, 1, 1)
        x = self.drop(torch.cat([x, y])[: x.shape[0]] + y)
        x = F.adaptive_avg_pool2d(x, 2)
        x = x.relu_().view(x.size(0), -1)
        return self.fc(self.norm(x) if gain is None else x * gain)


class Nested(nn.Module):
    """The cut and the head lie deeper down."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict(
            {"stem": nn.Conv2d(1, 2, 3), "body": nn.Sequential(nn.ReLU(inplace=True), Down())}
        )
        self.top = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.backbone["body"](self.backbone["stem"](x)))


class Down(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_max_pool2d(x, 2)


class Loops(nn.Module):
    """As many steps as the batch has rows, another branch by a value, dropout and BatchNorm; a head deep inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.drop = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.top = nn.ModuleDict({"wide": nn.Linear(6, 5), "fc": nn.Linear(5, 3)})
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.stem(x))
        for _ in range(1 + len(x) % 3):
            h = h + torch.tanh(h)
        if h.mean() > 0:
            h = -h
        return self.top["fc"](self.drop(self.top["wide"](h).relu()))


class Mode(nn.Module):
    """Asks for its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.dropout(self.body(x), 0.4, self.training))


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


CASES = [
    (plain, "10", "3"),
    (plain, "10", "0"),
    (plain, "10", None),
    (Skip, "fc", "layer1"),
    (Skip, "fc", "bn1"),
    (Skip, "fc", None),
    (Nested, "top.4", "backbone.stem"),
    (Nested, "top.4", "top.1"),
]
UNRECORDED = [(Loops, "top.fc", None), (Mode, "fc", None), (Draws, "fc", None), (Logits, "fc", None)]
Make = Callable[[], nn.Module]


def inputs(n: int = 5) -> Tensor:
    return torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(7))


def series(rows: int, seed: int = 7) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def seeded(run: Callable[[], Any], seed: int) -> Tensor:
    """What a module gives with these draws, or the logits in it."""
    torch.manual_seed(seed)
    returned = run()
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


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("make", "head", "extractor", "x"),
    [*((*case, inputs()) for case in CASES), *((*case, series(rows)) for case in UNRECORDED for rows in (2, 3, 4))],
)
def test_equal_to_the_unsplit_module(make: Make, head: str, extractor: str | None, x: Tensor, training: bool) -> None:
    torch.manual_seed(1)
    module = make().train(training)
    twin, other = copy.deepcopy(module), copy.deepcopy(module)
    model = split(module, head, extractor, architecture="mine")
    assert model.original is module
    assert module.state_dict().keys() == twin.state_dict().keys()
    for seed in (3, 4):  # the second call starts from what the first has left
        expected = seeded(lambda: twin(x), seed)
        z = seeded(lambda: model.transform(model.extract(x)), seed)
        assert torch.equal(z, seeded(lambda: fed_to_head(other, head, x), seed))
        logits = model.head(z)
        assert torch.equal(logits, expected)
        for key, tensor in twin.state_dict().items():  # BatchNorm has counted once
            assert torch.equal(module.state_dict()[key], tensor), key
    expected.square().sum().backward()
    logits.square().sum().backward()
    for (name, ours), (_, theirs) in zip(module.named_parameters(), twin.named_parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
    assert torch.equal(seeded(lambda: model(x), 5), seeded(lambda: twin(x), 5))


@pytest.mark.parametrize(("make", "head", "extractor"), CASES)
def test_names_and_parts(make: Make, head: str, extractor: str | None) -> None:
    module = make()
    keys = list(module.state_dict())
    model = split(module, head, extractor)
    assert list(model.state_dict()) == [f"original.{key}" for key in keys]
    assert list(model.export()) == keys
    assert all(model.export()[key].data_ptr() == t.data_ptr() for key, t in module.state_dict().items())
    parts = {part: model.names(part) for part in ("extractor", "intermediate", "head")}
    assert sorted(sum(parts.values(), ())) == sorted(model.state_dict())
    assert parts["head"] == (f"original.{head}.weight", f"original.{head}.bias")
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        model.part_of(name)
    # the gradient of the logits with respect to s_in's side reaches exactly the extractor, and the other way round
    model.eval()
    s_in = model.extract(inputs())
    kept = s_in.detach().clone()
    model.zero_grad()
    model.head(model.transform(s_in.detach())).square().sum().backward()
    assert torch.equal(s_in, kept), "also where a ReLU(inplace=True) follows"
    late = {name for name, p in model.named_parameters() if p.grad is not None}
    assert late <= set(parts["intermediate"]) | set(parts["head"])
    model.zero_grad()
    s_in.square().sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} <= set(parts["extractor"])


def test_what_no_part_uses_is_in_the_intermediate_one() -> None:
    model = split(Skip(), "fc", "layer1")
    for name in ("shift", "scale", "unused.weight"):
        assert model.part_of(f"original.{name}") == "intermediate"
    with pytest.raises(ConfigError, match=r"Skip has no tensor 'fc.weight'; did you mean 'original.fc.weight'"):
        model.part_of("fc.weight")
    assert split(Skip(), "fc", None).part_of("original.unused.bias") == "extractor"


class Writes(nn.Module):
    """Assigns a buffer, an attribute and an entry of a list in training mode; holds a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)
        self.register_buffer("ema", torch.zeros(4))
        self.kept: list[Tensor] = []
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(x)
        if self.training:
            self.ema = self.ema * 0.9 + x.mean(0).detach() * 0.1
        scores: Tensor = self.fc(self.body(x - self.ema))
        return scores


def test_a_forward_that_assigns_is_not_recorded_and_leaves_the_network_as_it_was() -> None:
    module = Writes()
    ema = module.ema
    with pytest.raises(ConfigError, match=r"its forward assigns self.ema, .* write self.ema.copy_\(...\); or pass"):
        split(module, "fc", "body")
    assert module.ema is ema
    assert not module.kept
    x = torch.randn(6, 4)
    split(module, "fc", None)(x)
    assert torch.equal(module.ema, x.mean(0) * 0.1)


def test_width_from_an_example() -> None:
    def net(width: int) -> nn.Module:
        top = nn.Sequential(nn.Linear(width, 4), nn.ReLU(), nn.Linear(4, 3))
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), top)

    assert split(net(72), "2", "0", example=inputs()).feature_dim == 72
    with pytest.raises(ConfigError, match=r"head, a Sequential, has no in_features.*example"):
        split(net(72), "2", "0")
    with pytest.raises(ConfigError, match=r"input of head '1' should be N x D, got \(5, 2, 6, 6\)"):
        split(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), "1", "0", example=inputs())


def test_a_copy_has_weights_of_its_own() -> None:
    model, x = split(Skip().eval()), inputs()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(twin(x), torch.zeros(5, 3))
    assert not torch.equal(model(x), twin(x))


def test_projection_of_an_adapted_model() -> None:
    model, x = split(Skip().eval(), architecture="mine"), inputs()
    narrow = with_projection(model, 6).eval()
    assert (narrow.feature_dim, narrow.architecture) == (6, "mine")
    assert narrow.represent(x).shape == (5, 6)
    assert narrow.represent(x).min() >= 0
    assert torch.equal(narrow(x), narrow.original(x))  # type: ignore[operator]
    assert narrow.names("head") == ("original.fc.head.weight", "original.fc.head.bias")
    assert narrow.part_of("original.fc.projection.weight") == "intermediate"
    assert isinstance(model.head, nn.Linear)
    assert (model.feature_dim, model.head.in_features) == (16, 16)


# What is refused, in one line ---------------------------------------------------------------------------------------


class Net(nn.Module):
    """conv -> `middle` -> fc -> `last`, for the cases below."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.other, self.flat = nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3), nn.Flatten()
        self.fc, self.aux = nn.Linear(72, 3), nn.Linear(72, 3)
        self.lstm = nn.LSTM(8, 4)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def branches(n: Any, x: Tensor) -> Tensor:
    h = n.conv(x)
    return n.fc(n.flat(h) if h.mean() > 0 else n.flat(-h))


def runs_beside(n: Any, x: Tensor) -> Tensor:
    side = n.other(x)
    return n.fc(n.flat(n.conv(x) + side))


def uses_input(n: Any, x: Tensor) -> Tensor:
    return n.fc(n.flat(n.conv(x) + x[:, :, 2:, 2:]))


def calls_twice(n: Any, x: Tensor) -> Tensor:
    return n.fc(n.flat(n.conv(x))) + n.fc(n.flat(n.conv(x)))


def shares(n: Any, x: Tensor) -> Tensor:
    h = n.conv(F.pad(n.other(x)[:, :1], (1, 1, 1, 1)))
    return n.fc(n.flat(n.other(F.pad(h[:, :1], (1, 1, 1, 1)))))


@pytest.mark.parametrize(
    ("run", "head", "extractor", "says"),
    [
        (lambda n, x: F.log_softmax(n.fc(n.flat(n.conv(x))), 1), "fc", "conv", "'log_softmax' is called after"),
        (branches, "fc", "conv", "cannot be recorded .*control flow"),
        (runs_beside, "fc", "conv", "'add', after the cut, also needs the output of 'other'"),
        (uses_input, "fc", "conv", "'getitem', after the cut, also needs the input x"),
        (calls_twice, "fc", "conv", "head 'fc' is called 2 times in the forward; expected exactly once"),
        (shares, "fc", "conv", "'other' is used both in the extractor and in the intermediate"),
        (lambda n, x: n.fc(n.flat(n.conv(x))), "fc", "other", "extractor 'other' is never called"),
        (lambda n, x: n.fc(n.flat(n.conv(x))), "fcc", "conv", "no submodule 'fcc' to be its head; did you mean 'fc'"),
        (lambda n, x: n.fc(n.flat(n.lstm(x[:, 0])[0])), "fc", "lstm", "'lstm' returns several values"),
        (lambda n, x: n.fc(n.flat(n.conv(x)) + torch.randn(72)), "fc", "conv", "draws random numbers"),
        (lambda n, x: n.fc(F.dropout(n.flat(n.conv(x)), 0.5, n.training)), "fc", "conv", "asks for its mode .*Dropout"),
    ],
)
def test_refused(run: Callable[[Any, Tensor], Any], head: str, extractor: str, says: str | None) -> None:
    line = refusal(lambda: split(Net(run), head, extractor))
    assert re.search(says, line)


def test_tied_weights_across_the_cut() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 3))
    module[2].weight = module[0].weight
    with pytest.raises(ConfigError, match=r"'2\.weight' is used both in the extractor and in the intermediate"):
        split(module, "3", "0")
    assert split(module, "3", None).feature_dim == 4


def test_a_part_by_something_else_than_its_name() -> None:
    net = Skip()
    with pytest.raises(ConfigError, match="head: expected the dotted name of a submodule, got a Linear"):
        split(net, net.fc)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no submodule 'layer1' to be its extractor; .*; or pass extractor=None"):
        split(plain(), "10")
    with pytest.raises(ConfigError, match=r"expects an nn.Module, got the class Skip"):
        split(Skip)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="example: expected a batch as a tensor, got 3"):
        split(net, example=3)  # type: ignore[arg-type]


def test_an_example_that_disagrees() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

    module = nn.Sequential(nn.Flatten(), Noisy(), nn.Linear(64, 3))
    with pytest.raises(ConfigError, match="do not repeat its own forward"):
        split(module, "2", "1", example=inputs())
    assert isinstance(split(module, "2", "1"), SplitModel)


class Branching(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.fc, self.run = nn.Linear(4, 3), nn.Linear(3, 3), run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, self.body(x) if len(x) > 1 else x)


REFUSED: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (lambda n, h: n.fc(h).relu(), "the forward goes on (AttributeError) after the head 'fc'"),
    (lambda n, h: (n.fc(h), h), "the forward returns a tuple after the head 'fc'"),
    (lambda n, h: [n.fc(h), n.fc(h)][0], "its head 'fc' is called more than once"),
    (lambda n, h: n.fc(n.fc(h)), "its head 'fc' must be called with one tensor"),
    (lambda n, h: nn.functional.linear(h, n.fc.weight), "its head 'fc' is never called"),
]


@pytest.mark.parametrize(("run", "line"), REFUSED)
def test_a_head_that_is_not_last_or_not_called_once_is_refused(run: Callable[[Any, Tensor], Any], line: str) -> None:
    early = refusal(lambda: pf.split(Branching(run), "fc", None, example=series(3)))
    assert line in early
    assert refusal(lambda: pf.split(Branching(run), "fc", None)(series(3))) == early
