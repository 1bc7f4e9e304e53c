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


def test_categories_have_vectors_of_their_own() -> None:
    """A row's category decides by its vector alone: another vector, other logits; another code, its own vector."""
    torch.manual_seed(0)
    model = build("mlp-64-32", (3,), 2, categories=(0, 4, 0))
    x = torch.tensor([[0.5, 1.0, -1.0], [0.5, 2.0, -1.0]])
    before = model(x)
    assert not torch.equal(before[0], before[1])
    (vectors,) = [tensor for name, tensor in model.named_parameters() if "vectors" in name]
    assert vectors.shape == (4, 2)
    with torch.no_grad():
        vectors[2] += 1
    after = model(x)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_without_categories_nothing_changes() -> None:
    """The same weights bit for bit."""
    models = []
    for categories in ((), (0, 0, 0)):
        torch.manual_seed(3)
        models.append(build("mlp-64-32", (3,), 2, categories=categories).state_dict())
    assert list(models[0]) == list(models[1])
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())


def test_a_narrow_network_shares_no_name_of_another_shape() -> None:
    """Layers are averaged by name."""
    narrow, wide = (build(name, (5,), 3).state_dict() for name in ("mlp-16-32", "mlp-64-64-32"))
    assert {name for name in narrow if name in wide} == {"head.weight", "head.bias"}


def test_a_network_without_vectors_refuses_categories() -> None:
    """Numbers of categories mean nothing by themselves."""
    with pytest.raises(ConfigError, match="'digits-cnn1' cannot embed the categories of a table; expected a network"):
        build("digits-cnn1", (3,), 2, categories=(0, 4, 0))
