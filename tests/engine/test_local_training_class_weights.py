"""Weights of classes in the losses of local training: against NumPy by hand, on every executor, and where they act."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.method import Method, Phase
from polyfed.core.settings import Privacy, Training
from polyfed.engine.federation import Federation
from polyfed.engine.local_training import class_weights
from polyfed.errors import ConfigError
from polyfed.methods import FedAvg, FedProto, Local
from tests.helpers import regression
from tests.helpers.toys import NETS, Two, clients, moved, rounds, same, two_parameter_clients

UNLIKE = [0.25, 1.0, 4.0]
SETTINGS: dict[str, Any] = {"rounds": 2, "batch_size": 5, "lr": 0.1, "momentum": 0.5}


def stepped(w: np.ndarray, client: Client, weights: Sequence[float], lr: float) -> np.ndarray:
    """One step of `Two` on all rows of a client."""
    x, y = client.data.train.x.double().numpy(), client.data.train.y.numpy()
    p = np.exp(x * w)
    p /= p.sum(1, keepdims=True)
    of_rows = np.asarray(weights)[y]
    slope = (of_rows[:, None] * (p - np.eye(2)[y]) * x).sum(0) / of_rows.sum()
    return w - lr * slope


def trained(executor: str, method: Method, members: Sequence[Client], **settings: Any) -> list[dict[str, Tensor]]:
    """Every client's weights after the run."""
    fed = Federation(members, method, Training(**{**SETTINGS, **settings}), executor=executor, builders=NETS)
    fed.run()
    return [{name: t.clone() for name, t in (client.weights or {}).items()} for client in fed.clients]


@pytest.mark.parametrize(
    ("asked", "weights"),
    [
        ([3.0, 0.5], [(3.0, 0.5)] * 2),
        ("balanced", [(1.0, 9.9), (3 / 2, 3 / 4)]),  # the first client has one class, the second 1 and 2 rows
    ],
)
def test_a_step_against_numpy_by_hand(asked: Any, weights: list[tuple[float, float]]) -> None:
    members = two_parameter_clients()
    (round,) = rounds(Local(), members, {"two": Two}, classes=2, rounds=1, batch_size=8, lr=0.5, class_weights=asked)
    for i, client in enumerate(members):
        expected = stepped(np.array([0.3, -0.2]), client, weights[i], 0.5)
        np.testing.assert_allclose(round.trained[i]["w"].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("method", [FedAvg(), FedProto()])
def test_executors_agree(method: Method) -> None:
    kinds = ["deep", "deep", "deep"]
    serial, stacked = (
        trained(executor, method, clients(kinds, [13, 8, 11]), class_weights=UNLIKE)
        for executor in ("serial", "vectorized")
    )
    plain = trained("vectorized", method, clients(kinds, [13, 8, 11]))
    assert all(moved(serial[i], stacked[i]) < 1e-5 for i in range(3))
    assert all(moved(plain[i], stacked[i]) > 1e-3 for i in range(3))


@pytest.mark.parametrize("executor", ["serial", "vectorized"])
def test_equal_weights_change_no_bit(executor: str) -> None:
    plain, equal = (trained(executor, FedAvg(), clients(["deep"] * 2), class_weights=w) for w in (None, [1.0] * 3))
    assert all(same(plain[i], equal[i]) for i in range(2))


def test_balanced_classes_count_alike() -> None:
    """Rows of a class, copied, count as the class did before."""
    x, y = torch.tensor([[2.0], [-1.0]]), torch.tensor([0, 1])
    copied = torch.tensor([0, 1, 1, 1])
    ends = [
        rounds(Local(), [Client("two", data)], {"two": Two}, classes=2, batch_size=8, class_weights="balanced")[-1]
        for data in ((x, y), (x[copied], y[copied]))
    ]
    assert moved(ends[0].trained[0], ends[1].trained[0]) < 1e-6


def test_public_rows_count_alike() -> None:
    (client,) = clients(["deep"])
    client.training = Training(class_weights=UNLIKE)
    assert class_weights(client, Phase(1, data="public")) is None
    assert torch.equal(torch.tensor(UNLIKE), class_weights(client, Phase(1)))


def test_where_they_do_not_act_is_an_error() -> None:
    own = [Client("shallow", (torch.randn(6, 6), torch.arange(6) % 3), class_names=("a", "b", "c")) for _ in range(2)]
    for members, given, says in (
        (clients(["deep"]), [1.0, 2.0], "a number for each of 3 classes, got 2"),
        (regression.clients(), "balanced", "expected classes as labels, got numbers to predict"),
        (own, [1.0, 2.0, 3.0], "one label space .* set it to 'balanced'"),
    ):
        with pytest.raises(ConfigError, match=rf"training\.class_weights: .*{says}"):
            Federation(members, Local(), Training(class_weights=given), builders=NETS)
    with pytest.raises(ConfigError, match=r"expected no training\.class_weights, by which"):
        Federation(
            clients(["deep"]),
            FedAvg(),
            Training(class_weights="balanced"),
            plugins=[Privacy(max_grad_norm=1.0, noise_multiplier=1.0)],
            builders=NETS,
        )
    with pytest.raises(ConfigError, match="class_weights"):
        Training(class_weights=[1.0, 0.0])
