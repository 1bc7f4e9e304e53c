"""The networks for tables: sizes, cuts, and names that mean one shape."""

from __future__ import annotations

import pytest
import torch

from polyfed.errors import ConfigError
from polyfed.models.zoo import build

NAMES = ("mlp-64-32", "mlp-64-64-32")


def test_sizes_by_hand() -> None:
    small, large = (sum(p.numel() for p in build(name, (30,), 2).parameters()) for name in NAMES)
    assert small == (30 + 1) * 64 + (64 + 1) * 32 + (32 + 1) * 2 == 4130
    assert large - small == (64 + 1) * 64
    assert large == 8290


def test_cuts_and_names_are_common() -> None:
    models = [build(name, (5,), 3) for name in NAMES]
    x = torch.rand(4, 5)
    assert {(tuple(m.extract(x).shape), tuple(m.represent(x).shape)) for m in models} == {((4, 64), (4, 32))}
    shapes = [{key: tensor.shape for key, tensor in model.state_dict().items()} for model in models]
    assert shapes[0].items() < shapes[1].items()


@pytest.mark.parametrize("shape", [(1,), (3, 4), (1, 8, 8)])
def test_any_inputs_are_flattened(shape: tuple[int, ...]) -> None:
    assert build("mlp-64-32", shape, 4)(torch.rand(2, *shape)).shape == (2, 4)


@pytest.mark.parametrize(("shape", "classes"), [((), 2), ((0,), 2), ((3,), 0)])
def test_refused(shape: tuple[int, ...], classes: int) -> None:
    with pytest.raises(ConfigError, match="mlp-64-32 needs"):
        build("mlp-64-32", shape, classes)
