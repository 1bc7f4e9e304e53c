"""HtFLlib's networks and groups (KDD 2025): their sizes as its code has them, what they read, one width by averages."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.config.recipe import Recipe
from polyfed.errors import ConfigError
from polyfed.model_groups import GROUPS
from polyfed.models import build
from polyfed.registry import MODELS

RECIPE = {"data": {"dataset": "digits", "num_clients": 4}, "models": {}, "method": {"name": "local"}}
TEXTS = sorted({name for group, names in GROUPS.items() if "txt" in group for name in names})


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def texts() -> Tensor:
    """(3, 12) ids below 40: a whole text, one of seven words, an empty one."""
    ids = torch.randint(1, 40, (3, 12), generator=torch.Generator().manual_seed(0))
    ids[1, 7:] = 0
    ids[2] = 0
    return ids


@pytest.mark.parametrize(
    ("name", "shape", "numbers"),
    [
        ("fedavg-cnn", (3, 32, 32), (75 + 1) * 32 + (800 + 1) * 64 + (1600 + 1) * 512),  # its dim = 1600
        ("fedavg-cnn", (3, 64, 64), (75 + 1) * 32 + (800 + 1) * 64 + (10816 + 1) * 512),  # and 10816
        *(("harcnn2-" + stride, (9, 128), (9 * 9 + 1) * 32 + (32 * 9 + 1) * 64) for stride in ("s1", "s2", "s3")),
        ("harcnn1-s3", (9, 1, 128), (9 * 9 + 1) * 32),
        *(
            ("harcnn3-" + stride, (9, 1, 300), (9 * 5 + 1) * 32 + (32 * 5 + 1) * 64 + (64 * 5 + 1) * 128)
            for stride in ("s1", "s2")
        ),
        ("resnet4", (3, 32, 32), 9408 + 128 + 2 * (9 * 64 * 64 + 128)),
    ],
)
def test_sizes_are_those_of_its_code(name: str, shape: tuple[int, ...], numbers: int) -> None:
    model = build(name, shape, 10)
    assert count(model) == numbers + 10 * (model.feature_dim + 1)
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("width", [512, 300])
def test_a_harcnns_features_are_its_convolutions_averaged(stride: int, width: int) -> None:
    """As HtFLlib runs them, ``-fd`` being the width: nothing stands between the convolutions and the average."""
    model = build(f"harcnn2-s{stride}", (9, 128), 6, width, feature_pool=True)
    first, second = (layer for layer in model.modules() if isinstance(layer, nn.Conv1d))
    x = torch.randn(2, 9, 128)
    with torch.no_grad():
        blocks = x
        for conv in (first, second):
            blocks = F.max_pool1d(F.relu(F.conv1d(blocks, conv.weight, conv.bias, stride=stride)), 2)
        expected = F.adaptive_avg_pool1d(blocks.flatten(1), width)
        assert torch.equal(model.represent(x), expected)
        assert torch.equal(model(x), model.head(expected))
    assert model.feature_dim == width


@pytest.mark.parametrize("name", [*TEXTS, "fedhenn-lstm1", "fedhenn-lstm2", "text-transformer"])
def test_padding_changes_nothing(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, (12,), 4, words=40).eval()
    with torch.no_grad():
        scores = model(texts())
        assert torch.isfinite(scores).all()
        torch.testing.assert_close(model(texts()[1:2, :7]), scores[1:2])
        assert not torch.allclose(model(texts().roll(3, 1))[:1], scores[:1]) or name in ("fasttext", "text-linear")
        other = texts()
        other[1, 6] = other[1, 6] % 39 + 1
        assert not torch.allclose(model(other)[1], scores[1]), "the last word counts"
    if name in TEXTS:
        assert model.feature_dim == 512
        with pytest.raises(ConfigError, match="learns its words' vectors"):
            build(name, (12,), 4, words=torch.zeros(40, 50))


def test_recurrent_networks_are_torchs_on_each_text_alone() -> None:
    model = build("text-bilstm", (12,), 4, words=40).eval()
    layer = model.get_submodule("extractor.recurrent")
    vectors = model.get_submodule("extractor.embedding")(texts()[1:2, :7])
    assert torch.allclose(model.extract(texts())[1], layer(vectors)[0][0, 6], atol=1e-6)


def test_a_group_by_name_is_its_list() -> None:
    for name, names in GROUPS.items():
        assert all(":" in one or one in MODELS for one in names), name
        assert Recipe.from_dict(RECIPE | {"models": {"architectures": name}}).models.architectures == names
    assert [len(GROUPS[name]) for name in ("htfe-2", "htfe-8", "htfe-9", "htm-10", "htfe-sen-8")] == [2, 8, 9, 10, 8]
    with pytest.raises(ConfigError, match=r"a group of them, got 'htfe-7'; did you mean"):
        Recipe.from_dict(RECIPE | {"models": {"architectures": "htfe-7"}})


@pytest.mark.parametrize(("hidden", "widths"), [("512", [512, 512, 10]), ("32-16", [512, 32, 16, 10])])
def test_heads_of_hidden_layers(hidden: str, widths: list[int]) -> None:
    model = build(f"fedavg-cnn#{hidden}", (3, 32, 32), 10)
    layers = [layer for layer in model.head if isinstance(layer, nn.Linear)]  # type: ignore[attr-defined]
    assert [layers[0].in_features, *(layer.out_features for layer in layers)] == widths
    assert model.architecture == f"fedavg-cnn#{hidden}"
    z = model.represent(torch.randn(2, 3, 32, 32))
    expected = z
    for layer in layers[:-1]:
        expected = F.relu(layer(expected))
    assert torch.equal(model.head(z), layers[-1](expected))
    assert all(name.startswith("head.") for name in model.names("head"))


def test_a_network_of_ones_own_takes_hidden_layers_in_its_head() -> None:
    model = build("tests.models.test_htfllib:own#8", (1, 4, 4), 3, 6, feature_pool=True)
    assert (model.feature_dim, model(torch.zeros(2, 1, 4, 4)).shape) == (6, (2, 3))
    assert len(model.names("head")) == 4


def own(in_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(in_shape), 5), nn.ReLU(), nn.Linear(5, classes))


@pytest.mark.parametrize("name", ["fedavg-cnn#", "fedavg-cnn#0", "fedavg-cnn#512-"])
def test_what_is_no_width_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="expected the widths of hidden layers behind '#'"):
        build(name, (3, 32, 32), 10)
