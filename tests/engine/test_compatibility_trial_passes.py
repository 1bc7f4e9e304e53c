"""What is tried of networks and data before round 1: all sides, training mode, copies."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.errors import ConfigError, MissingPackage
from polyfed.experiments.estimate import check, check_methods

X = torch.randn(21, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(21) % 3


def federation(make: Callable[[], nn.Module], batch_size: int = 10, **sides: Any) -> pf.Federation:
    clients = [pf.Client(make(), **{"train": (X, Y), **sides}) for _ in range(2)]
    return pf.Federation(clients, pf.methods.FedAvg(), pf.Training(rounds=1, batch_size=batch_size))


class Counts(nn.Module):
    """Counts rows in a buffer, and draws random numbers, in training mode."""

    def __init__(self, most: int = 100) -> None:
        super().__init__()
        self.most = most
        self.layer = nn.Linear(4, 3)
        self.features: Tensor | None = None
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.features = x + self.layer.weight.sum()
        if self.training:
            assert len(x) > 1, "one row"
            self.rows += len(x)
            x = x + torch.randn(4)
        scores: Tensor = self.layer(x)
        return scores


class Grows(nn.Linear):
    """Makes its last layer when it is first called."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "last"):
            self.last = nn.Linear(4, 3)
        scores: Tensor = self.last(super().forward(x))
        return scores


class Complex(nn.Module):
    """Multiplies by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).real


@pytest.mark.parametrize("side", ["test", "validation"])
def test_rows_of_every_side_are_tried(side: str) -> None:
    with pytest.raises(ConfigError, match=rf"client 0 \('Linear'\) cannot take {side} inputs of shape \(5,\)"):
        federation(lambda: nn.Linear(4, 3), **{side: (torch.ones(3, 5), Y[:3])})


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (lambda x: x - torch.zeros(4), r"prepare cannot take test inputs of shape \(5,\): The size of tensor"),
        (lambda x: x if x.shape[1] == 4 else None, "prepare should return a tensor, got none for test inputs"),
    ],
)
def test_the_users_preparation_is_tried(prepare: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^client 0 \('Linear'\): {told}"):
        federation(lambda: nn.Linear(4, 3), test=(torch.ones(3, 5), Y[:3]), prepare=prepare)


def test_the_largest_id_of_any_side_is_tried() -> None:
    ids = torch.tensor([[1, 2], [9, 2], [3, 3]])
    with pytest.raises(ConfigError, match=r"cannot take test inputs .*index out of range"):
        federation(
            lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3)),
            train=(ids.clamp(max=8), Y[:3]),
            test=(ids, Y[:3]),
        )


def test_the_smallest_batch_is_tried_in_training_mode() -> None:
    with pytest.raises(ConfigError, match=r"'Counts'\), in training mode, cannot take a batch of 1 input .*one row"):
        federation(Counts)
    assert federation(Counts, batch_size=9)  # 21 rows are 9, 9 and 3


def test_no_batch_of_one_row_with_batchnorm() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    with pytest.raises(ConfigError, match=r"BatchNorm, .* expected training.batch_size of at least 2, got 1"):
        federation(make, batch_size=1)
    assert federation(make)  # the last batch, of one row, is left out


def test_trying_changes_nothing() -> None:
    networks = [Counts(), Counts()]
    before = torch.get_rng_state()
    tried = federation(iter(networks).__next__, batch_size=9)
    assert torch.equal(torch.get_rng_state(), before)
    template = tried.model_factory.module("Counts")
    assert not any(float(network.get_buffer("rows")) for network in [*networks, template])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3)), r"client 0 \('Sequential'\): .* lazy layer .* call it once"),
        (nn.Identity, r"client 0 \('Identity'\): expected a network with parameters"),
        (Grows, r"client 0 \('Grows'\): .* forward adds 'last.bias'; make them in its __init__"),
        (Complex, r"client 0 \('Complex'\): expected parameters that are real, got 'weight'"),
    ],
)
def test_networks_that_cannot_be_trained(make: Callable[[], nn.Module], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        federation(make)


def test_a_network_that_cannot_be_copied_is_refused_by_what_cannot() -> None:
    def make() -> nn.Module:
        network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        network[1].lock = threading.Lock()  # type: ignore[assignment]
        return network

    with pytest.raises(ConfigError, match=r"client 0 \('Sequential'\): .* attribute '1.lock' .*keep that out"):
        federation(make)


@pytest.mark.parametrize(("end", "told"), [(nn.Softmax(1), 2), (nn.LogSoftmax(1), 0), (nn.ReLU(), 0)])
def test_probabilities_in_the_place_of_logits_are_told_once_for_each_architecture(end: nn.Module, told: int) -> None:
    networks = [nn.Sequential(nn.Linear(4, 3), end), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), end)]
    clients = [pf.Client(networks[k % 2], (X, Y)) for k in range(4)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pf.Federation(clients, pf.methods.Local(), pf.Training(rounds=1))
    said = [str(one.message).partition(" (they")[0] for one in caught]
    whose = ["client 0 ('Sequential')", "client 1 ('Sequential-2')"]
    assert said == [f"{who} gives probabilities" for who in whose][:told]


def test_a_missing_package_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # as if it were not installed
    recipe = Recipe.from_dict(
        {
            "data": {"dataset": "digits", "num_clients": 3},
            "models": {"architectures": ["timm:resnet10t", "timm:resnet18", "timm:resnet26"]},
            "method": {"name": "local"},
        }
    )
    with pytest.raises(MissingPackage, match=r"^timm cannot be imported .* pip install 'polyfed\[vision\]'"):
        check(recipe)
    with pytest.raises(MissingPackage, match=r"^timm cannot be imported"):
        list(check_methods(recipe, methods=["local", "fedgh"]))
