"""The split model itself: parts, cuts, projection."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from polyfed.errors import ConfigError
from polyfed.models import SequentialSplit, SplitModel, build, cut_shapes, with_projection

DIGIT = (1, 8, 8)


def test_parts_of_every_name() -> None:
    model = build("resnet10", DIGIT, 10)
    for part in ("extractor", "intermediate", "head"):
        assert all(name.startswith(f"{part}.") for name in model.names(part))
    assert all(model.part_of(name) == name.partition(".")[0] for name, _ in model.named_parameters())
    assert sum(len(model.names(part)) for part in ("extractor", "intermediate", "head")) == len(model.state_dict())


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


def test_projection_in_a_body_of_another_kind_and_without_bias() -> None:
    model = SequentialSplit(nn.Flatten(), nn.Linear(64, 6), nn.Linear(6, 3, bias=False), architecture="mine")
    wide = with_projection(model, 4)
    assert wide.names("intermediate")[0] == "intermediate.body.weight"
    assert wide.names("head") == ("head.weight",)
    assert wide(torch.rand(2, *DIGIT)).shape == (2, 3)


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


def test_a_kind_of_split_model_that_cannot_be_projected() -> None:
    class Mine(SplitModel):
        def __init__(self) -> None:
            super().__init__("mine", 4)
            self.head = nn.Linear(4, 2)

    with pytest.raises(ConfigError, match="Mine cannot take a projection"):
        with_projection(Mine(), 3)
    with pytest.raises(NotImplementedError):
        Mine()(torch.rand(2, 4))
