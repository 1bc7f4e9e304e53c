"""FedOpt against NumPy by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from polyfed import methods, testing
from polyfed.methods import FedAvg, FedOpt
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.toys import Two, clients, rounds, same, shared, two_gradient, two_parameter_clients

SHARES = (0.25, 0.75)  # 1 and 3 rows


def by_hand(method: FedOpt, turns: int) -> list[np.ndarray]:
    """The server's weights after each round, in float64; D has both signs."""
    w = np.array([0.3, -0.2])
    m, v = np.zeros(2), np.full(2, method.tau**2)
    beta1, beta2 = (0.0 if method.server_optimizer == "adagrad" else 0.9), 0.99
    found = []
    for _ in range(turns):
        ends = [w - 0.5 * two_gradient(w, client.data.train) for client in two_parameter_clients()]
        d = sum(share * (end - w) for share, end in zip(SHARES, ends, strict=True))
        m = beta1 * m + (1 - beta1) * d
        if method.server_optimizer == "adagrad":
            v = v + d**2
        elif method.server_optimizer == "adam":
            v = beta2 * v + (1 - beta2) * d**2
        else:
            v = v - (1 - beta2) * d**2 * np.sign(v - d**2)
        w = w + method.server_lr * m / (np.sqrt(v) + method.tau)
        found.append(w)
    return found


@pytest.mark.parametrize("aggregation", ["layer-wise", "same-shape"])
@pytest.mark.parametrize(
    "method",
    [
        FedOpt(),
        FedOpt(server_optimizer="yogi", server_lr=0.1, tau=0.01),
        FedOpt(server_optimizer="adagrad", server_lr=0.1),
    ],
)
def test_rounds_against_numpy_by_hand(method: FedOpt, aggregation: Any) -> None:
    expected = by_hand(method, 4)
    method = dataclasses.replace(method, aggregation=aggregation)
    history = rounds(method, two_parameter_clients(), {"two": Two}, classes=2, rounds=4, batch_size=8, lr=0.5)
    np.testing.assert_allclose([shared(round.after)["w"] for round in history], expected, atol=2e-6)
    assert {-1.0, 1.0} <= set(np.sign(np.diff(expected, axis=0)).flatten()), "it should move both ways"


def test_buffers_are_averaged_and_only_averaged() -> None:
    adaptive, plain = (rounds(method, clients(["bn"] * 2, [8, 24]), rounds=1)[0] for method in (FedOpt(), FedAvg()))
    statistics = [name for name in shared(plain.after) if "running" in name]
    assert statistics
    assert all(torch.equal(shared(adaptive.after)[name], shared(plain.after)[name]) for name in statistics)
    assert not torch.equal(shared(adaptive.after)["head.weight"], shared(plain.after)["head.weight"])


def test_what_nobody_sent_keeps_its_value_and_moments() -> None:
    groups = ("model union", "mean union", "square union")
    members = clients(["shallow", "deep"])
    first, second, silent = rounds(FedOpt(), members, rounds=3, lose=lambda r, i: (r, i) == (2, 1) or r == 3)
    for name in shared(first.after):
        kept = name not in second.up[0]["model"]  # the other client has it alone
        assert all(torch.equal(first.after[what][name], second.after[what][name]) == kept for what in groups)
    assert all(same(second.after[what], silent.after[what]) for what in groups)


test_conformance = testing.conformance(
    methods.FedOpt(),
    reference_loss=oracles.cross_entropy,
    expected_bytes=oracles.averaging_bytes,
    counted="updates",
    reductions=[Reduction({"server_optimizer": "none"}, methods.FedAvg(), "received")],
)
