"""The registered networks: the counts, cuts and names of the papers, and images of other sizes; split models."""

from __future__ import annotations

import copy
import itertools
import statistics
import sys
from collections import OrderedDict

import pytest
import torch
from torch import nn

from polyfed.errors import ConfigError
from polyfed.models import SequentialSplit, SplitModel, build, cut_shapes, describe, with_projection
from polyfed.models.zoo import without_memory
from polyfed.registry import MODELS
from tests.helpers.quick import others_slow

RGB32, DIGIT = (3, 32, 32), (1, 8, 8)
RESNETS = [f"resnet{depth}" for depth in (10, 14, 18, 22, 26)]
FEDGH = [f"fedgh-cnn{i}" for i in range(1, 6)]
DIGITS = [f"digits-cnn{i}" for i in range(1, 6)]


def on_meta(name: str, in_shape: tuple[int, int, int], classes: int, feature_dim: int | None = None) -> SplitModel:
    """The network without its memory, for counting."""
    with torch.device("meta"):
        return build(name, in_shape, classes, feature_dim)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "ten", "hundred"),
    [
        ("fedgh-cnn1", 2_621_558, 2_666_648),
        ("fedgh-cnn2", 1_815_142, 1_860_232),
        ("fedgh-cnn3", 1_320_558, 1_365_648),
        ("fedgh-cnn4", 1_060_358, 1_105_448),
        ("fedgh-cnn5", 670_058, 715_148),
        ("fedhenn-cifar10", 307_842, 313_692),
        ("fedhenn-cifar100", 1_063_434, 1_075_044),
        ("fedhenn-h1", 65_162, 629_732),
        ("fedhenn-h2", 404_554, 410_404),
        ("fedhenn-h3", 300_658, 1_054_948),
        ("fedhenn-h4", 307_842, 1_075_044),
        ("fedhenn-h5", 781_962, 793_572),
    ],
)
def test_cnn_counts(name: str, ten: int, hundred: int) -> None:
    assert count(on_meta(name, RGB32, 10)) == ten
    assert count(on_meta(name, RGB32, 100)) == hundred


@pytest.mark.parametrize(
    ("channels", "counts", "mean"),
    [
        (3, [4_910_922, 10_812_234, 11_181_642, 17_082_954, 17_452_362], 12_288_023),
        (1, [4_904_650, 10_805_962, 11_175_370, 17_076_682, 17_446_090], 12_281_751),
    ],
)
def test_resnet_counts(channels: int, counts: list[int], mean: int) -> None:
    found = [count(on_meta(name, (channels, 32, 32), 10)) for name in RESNETS]
    assert found == counts
    assert round(statistics.mean(found)) == mean


@pytest.mark.parametrize("suffix", ["", "-cifar"])
def test_resnets_are_nested_by_name_and_shape(suffix: str) -> None:
    shapes = [
        {key: tensor.shape for key, tensor in on_meta(name + suffix, RGB32, 10).state_dict().items()}
        for name in RESNETS
    ]
    for smaller, larger in itertools.pairwise(shapes):
        assert len(smaller) < len(larger)
        assert smaller.items() <= larger.items()
    assert "intermediate.stage1.0.conv1.weight" in shapes[0]
    assert set().union(*shapes) == set(shapes[-1])


@pytest.mark.parametrize(
    ("names", "s_in", "s_out"),
    [
        (RESNETS[:1] + RESNETS[-1:], (64, 8, 8), (512,)),
        (["resnet10-cifar"], (64, 32, 32), (512,)),
        (FEDGH, (16, 14, 14), (500,)),
        (["fedhenn-h1"], (32, 14, 14), (6272,)),
        (["fedhenn-h5"], (64, 16, 16), (128,)),
    ],
)
def test_cut_shapes_on_rgb(names: list[str], s_in: tuple[int, ...], s_out: tuple[int, ...]) -> None:
    for name in names:
        model = build(name, RGB32, 10)
        assert cut_shapes(model, torch.rand(1, *RGB32)) == (s_in, s_out)
        assert model.feature_dim == s_out[0]


def test_digits_networks_differ_but_share_their_cuts() -> None:
    models = [build(name, DIGIT, 10) for name in DIGITS]
    assert {cut_shapes(model, torch.rand(2, *DIGIT)) for model in models} == {((16, 4, 4), (64,))}
    counts = [count(model) for model in models]
    assert counts == [17_258, 41_962, 13_706, 22_954, 40_394]
    assert len({tuple(t.shape for t in m.intermediate.state_dict().values()) for m in models}) == 5


@pytest.mark.parametrize("name", others_slow(["digits-cnn1", "resnet10-cifar", "vit-s8-half"], quick=["vit-s8-half"]))
def test_without_memory_there_are_shapes_and_no_values(name: str) -> None:
    shape = (1, 8, 8) if name == "digits-cnn1" else (3, 32, 32) if name == "resnet10-cifar" else (3, 224, 224)
    with without_memory():
        weightless = build(name, shape, 10).state_dict()
    weighty = build(name, shape, 10).state_dict()
    assert {key: tensor.shape for key, tensor in weightless.items()} == {k: t.shape for k, t in weighty.items()}
    assert {tensor.device.type for tensor in weightless.values()} == {"meta"}
    drawn = [tensor for key, tensor in weighty.items() if key.endswith("weight") and tensor.dim() > 1]
    assert all(len(tensor.unique()) > 1 for tensor in drawn), "afterwards weights are drawn again"


def test_home_data_are_described_truthfully() -> None:
    rows = {row["name"]: row for row in describe()}
    assert set(rows) == set(MODELS)
    for name, row in rows.items():
        model = on_meta(name, row["in_shape"], row["classes"])
        assert (row["parameters"], row["feature_dim"]) == (count(model), model.feature_dim)
        assert model.architecture == name
        assert row["paper"]
    assert rows["fedhenn-cifar100"]["classes"] == 100
    assert rows["digits-cnn1"]["in_shape"] == DIGIT


def small(name: str) -> tuple[int, int, int]:
    return DIGIT if name.startswith(("digits", "resnet")) else (1, 28, 28)


SERIES = ("cnn1d", "gru", "tcn", "series")  # tests/models/test_series.py
TEXTS = ("fedhenn-lstm", "text-transformer")
LIGHT = [name for name in MODELS if not name.startswith(("resnet", "vit", *TEXTS, *SERIES))]


@pytest.mark.parametrize("name", [*LIGHT, "resnet10", "resnet18", "resnet10-cifar"])
def test_parts_make_the_whole(name: str) -> None:
    model, x = build(name, small(name), 7).eval(), torch.rand(3, *small(name))
    with torch.no_grad():
        logits = model(x)
        assert torch.equal(logits, model.head(model.transform(model.extract(x))))
        assert torch.equal(logits, model.head(model.represent(x)))
    assert logits.shape == (3, 7)
    assert isinstance(model.head, nn.Linear)
    assert model.head.in_features == model.feature_dim
    parts = [model.names("extractor"), model.names("intermediate"), model.names("head")]
    assert sum(parts, ()) == tuple(model.state_dict())
    assert parts[2] == ("head.weight", "head.bias")
    assert all(model.part_of(key) == "extractor" for key in parts[0])
    assert model.export().keys() == model.state_dict().keys()


# build: names, builders of one's own, errors ------------------------------------------------------------------------


def no_split(in_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(in_shape[0], classes)


def broken(in_shape: tuple[int, ...], classes: int) -> nn.Module:
    raise ValueError("out of paint\nsecond line")


three = 3


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> str:
    """The file at hand under a name that can be imported."""
    monkeypatch.setitem(sys.modules, "my_nets", sys.modules[__name__])
    return "my_nets"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.nets:net", "cannot import model 'nowhere.nets:net': ModuleNotFoundError"),
        ("my_nets:missing", "has no attribute 'missing'"),
        ("my_nets:", "cannot import model 'my_nets:'"),
        ("my_nets:three", "should be a function"),
        ("my_nets:no_split", "should return a SplitModel, or a module with an nn.Linear of 3 outputs"),
        ("my_nets:broken", "failed: ValueError: out of paint"),
        ("resnet11", "did you mean 'resnet1"),
        ("fedgh-cnn1", "needs images of at least 16 x 16, got 8 x 8"),
        ("fedhenn-h1", None),
    ],
)
def test_build_errors_are_one_line(here: str, name: str, says: str | None) -> None:
    if says is None:
        assert build(name, DIGIT, 3).feature_dim == 32 * 2 * 2
        return
    with pytest.raises(ConfigError) as caught:
        build(name, DIGIT, 3)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "in_shape", "classes", "says"),
    [
        ("fedgh-cnn1", (3, 15, 32), 10, "at least 16 x 16, got 15 x 32"),
        ("resnet18", (3, 7, 32), 10, "at least 8 x 8, got 7 x 32"),
        ("digits-cnn3", (1, 3, 3), 10, "at least 4 x 4"),
        ("digits-cnn1", (8, 8), 10, r"\(channels, height, width\), got the shape \(8, 8\)"),
        ("resnet10", (0, 8, 8), 10, "got"),
        ("resnet10", (1, 8, 8), 0, "at least one class, got 0"),
    ],
)
def test_data_that_do_not_fit(name: str, in_shape: tuple[int, ...], classes: int, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} needs.*{says}"):
        build(name, in_shape, classes)


def test_unknown_names_and_parts() -> None:
    model = build("digits-cnn1", DIGIT, 10)
    with pytest.raises(ConfigError, match=r"digits-cnn1 has no tensor 'body\.weight'"):
        model.part_of("body.weight")
    with pytest.raises(ConfigError, match="unknown part 'body'"):
        model.names("body")  # type: ignore[arg-type]


def test_cuts_change_nothing() -> None:
    model = build("resnet10", DIGIT, 10)
    model.get_submodule("extractor.bn1").eval()
    flags = [m.training for m in model.modules()]
    before = copy.deepcopy(model.state_dict())
    assert cut_shapes(model, torch.rand(2, *DIGIT)) == ((64, 2, 2), (512,))
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    with pytest.raises(RuntimeError):
        cut_shapes(model, torch.rand(2, 5, 8, 8))
    assert [m.training for m in model.modules()] == flags


@pytest.mark.parametrize("name", ["digits-cnn2", "fedhenn-h1", "resnet10"])
def test_projection(name: str) -> None:
    model, x = build(name, DIGIT, 7).eval(), torch.rand(3, *DIGIT)
    wide = with_projection(model, 33).eval()
    assert (wide.feature_dim, wide.architecture) == (33, name)
    assert wide(x).shape == (3, 7)
    z = wide.represent(x)
    assert z.shape == (3, 33)
    assert z.min() == 0  # after the ReLU
    added = set(wide.state_dict()) - set(model.state_dict())
    assert added == {"intermediate.projection.weight", "intermediate.projection.bias"}
    assert all(wide.part_of(key) == "intermediate" for key in added)
    assert torch.equal(wide.extract(x), model.extract(x))
    assert model(x).shape == (3, 7)  # left alone
    assert not {p.data_ptr() for p in wide.parameters()} & {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("width", [0, -1, True, 2.0, "64"])
def test_projection_to_no_width(width: object) -> None:
    with pytest.raises(ConfigError, match="feature_dim must be a whole number of at least 1"):
        with_projection(build("digits-cnn1", DIGIT, 10), width)  # type: ignore[arg-type]


def test_projection_needs_a_linear_head() -> None:
    head = nn.Sequential(OrderedDict(fc=nn.Linear(6, 3)))
    with pytest.raises(ConfigError, match="has no in_features"):
        SequentialSplit(nn.Flatten(), nn.Linear(64, 6), head)
    model = SequentialSplit(nn.Flatten(), nn.Linear(64, 6), head, feature_dim=6)
    with pytest.raises(ConfigError, match=r"needs a head that is an nn\.Linear; this one is a Sequential"):
        with_projection(model, 4)
