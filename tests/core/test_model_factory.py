"""Auxiliary models: which network is chosen, its initial weights, and that clients' own weights do not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.client import Client
from polyfed.core.method import Method
from polyfed.core.model_factory import AuxiliaryModel
from polyfed.engine.federation import Federation
from polyfed.engine.task import Task
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.methods import Local
from polyfed.methods.building_blocks import auxiliary_model
from polyfed.models.split import SequentialSplit
from polyfed.testing.fixtures import draw, tiny_model
from tests.helpers.toys import same

Build = Callable[[], nn.Module]
NETS: dict[str, Build] = {
    "middle": lambda: tiny_model(1, 4, 6),
    "large": lambda: tiny_model(2, 5, 7),
    "small": lambda: tiny_model(0, 3, 5),
}


def plain(inputs: int, outputs: int) -> nn.Module:
    """A network without parts."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs))


class Both(auxiliary_model.AuxiliaryModelMethod):
    """Trains both networks."""


class Large(Method):
    """A server with a network of its own; clients know nothing of it."""

    def __init__(self, network: str = "largest", features: int | None = None) -> None:
        self.wanted = AuxiliaryModel(network, features)

    @property
    def auxiliary_model(self) -> AuxiliaryModel:
        return self.wanted


def federation(method: Method, models: Any = tuple(NETS), seed: int = 0, **builders: Build) -> Federation:
    """One client per architecture name or network."""
    members = [
        Client(model, draw(9, (0, 1, 2), place), draw(6, (0, 1), 20 + place)) for place, model in enumerate(models)
    ]
    return Federation(members, method, task=Task(classes=3), seed=seed, builders={**NETS, **builders})


def part(fed: Federation, number: int, prefix: str) -> dict[str, torch.Tensor]:
    """A client's initial weights under a prefix."""
    return {n.removeprefix(prefix): t for n, t in fed.server.client_weights(number).items() if n.startswith(prefix)}


@pytest.mark.parametrize(("shared", "name"), [("smallest", "small"), ("largest", "large"), ("middle", "middle")])
def test_which_network_it_is(shared: str, name: str) -> None:
    assert federation(Both(shared=shared)).server.auxiliary_model == name
    assert federation(Large(shared)).server.auxiliary_model == name


@pytest.mark.parametrize("shared", ["smallest", "large"])
def test_everybody_starts_with_the_same_one_and_with_its_own_as_it_is_alone(shared: str) -> None:
    names = ["middle", "large", "small", "large"]
    fed, alone, other = (federation(m, names, s) for m, s in ((Both(shared=shared), 0), (Local(), 0), (Both(), 1)))
    initial = fed.server.initial_state(fed.server.auxiliary_model)
    for number in range(len(names)):
        assert same(part(fed, number, "auxiliary_model."), initial)
        assert same(part(fed, number, "own."), alone.server.client_weights(number))
    assert not same(part(fed, 1, "own."), part(fed, 3, "own."))
    assert not same(part(other, 0, "own."), part(fed, 0, "own."))
    assert not same(part(federation(Both(shared=shared), names, 1), 0, "auxiliary_model."), initial)


def test_who_leaves_beside_alone_trains_what_it_trains_without() -> None:
    fed, alone = federation(Large()), federation(Local())
    fed.run()
    alone.run()
    assert all(same(a.weights, b.weights) for a, b in zip(fed.clients, alone.clients, strict=True))
    assert fed.model_factory.module("large") is fed.server.model("large", {}), "one template is enough"


def test_networks_handed_over_in_python() -> None:
    given = [tiny_model(1, 4, 6), tiny_model(0, 3, 5), tiny_model(2, 5, 7), tiny_model(0, 3, 5)]
    fed = federation(Both(), given)
    assert fed.server.auxiliary_model == fed.clients[1].architecture
    for number, module in enumerate(given):
        assert same(part(fed, number, "own."), module.state_dict())
        assert same(part(fed, number, "auxiliary_model."), given[1].state_dict())
    before = {name: t.clone() for name, t in given[1].state_dict().items()}
    fed.run()
    assert same(given[1].state_dict(), before), "what was handed over stays as it was"


def test_its_representation_can_be_projected() -> None:
    fed = federation(Large("large", 4))
    model: Any = fed.server.model(fed.server.auxiliary_model, fed.server.initial_state(fed.server.auxiliary_model))
    assert model.feature_dim == model.head.in_features == 4
    assert fed.model_factory.module("large").feature_dim == 7  # type: ignore[comparison-overlap]
    assert fed.model_factory.chosen == AuxiliaryModel("large", 4)


@pytest.mark.parametrize(
    ("shared", "made", "message"),
    [
        ("smalest", None, r"expected 'smallest', 'largest' or a network .* got 'smalest'; did you mean 'smallest'\?"),
        ("other", lambda: [][0], r"the auxiliary model 'other' cannot be built: IndexError: list"),
        ("other", lambda: plain(9, 3), r"auxiliary model 'other' cannot take inputs of shape \(1, 6, 6\): "),
        (
            "other",
            lambda: plain(36, 2),
            r"scores for 3 classes per sample from the auxiliary model 'other', got shape \(2,\)",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(shared: str, made: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        federation(Both(shared=shared), **({} if made is None else {"other": made}))
    assert "\n" not in str(refused.value)


def recipe(**method: Any) -> pf.Recipe:
    """Three clients on digits."""
    settings = {
        "data": {"dataset": "digits", "num_clients": 3, "max_train_per_client": 30, "max_test_per_client": 20},
        "models": {"architectures": ["digits-cnn2", "digits-cnn1"]},
        "method": {"name": "fml", **method},
        "training": {"rounds": 1, "batch_size": 10},
    }
    return pf.Recipe.from_dict(settings)


def mine(in_shape: tuple[int, ...], classes: int) -> SequentialSplit:
    """A network of one's own, imported by name."""
    features = in_shape[0] * in_shape[1] * in_shape[2]
    return SequentialSplit(nn.Flatten(), nn.Linear(features, 5), nn.Linear(5, classes))


@pytest.mark.parametrize(
    ("shared", "name"), [("largest", None), ("digits-cnn5", "digits-cnn5"), (f"{__name__}:mine", f"{__name__}:mine")]
)
def test_a_recipe_names_any_registered_network(shared: str, name: str | None) -> None:
    fed = build_federation(recipe(shared=shared))
    sizes = {
        a: sum(p.numel() for p in fed.model_factory.module(a, alone=True).parameters())
        for a in fed.server.architectures
    }
    assert fed.server.auxiliary_model == (name or max(sizes, key=lambda a: sizes[a]))
