"""FedProx against NumPy by hand: the squared norm, about what was received this round, of parameters alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.methods import FedProx
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.toys import Two, rounds, shared, two_gradient, two_parameter_clients


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("aggregation", ["layer-wise", "same-shape"])
def test_rounds_by_hand(weighting, aggregation):
    """Also the logged loss, which has the squared norm; who was not drawn starts from what it received last."""
    members, mu, lr = two_parameter_clients(3), 0.7, 0.5
    method = FedProx(mu=mu, weighting=weighting, aggregation=aggregation)
    history = rounds(
        method, members, {"two": Two}, classes=2, rounds=5, local_epochs=3, batch_size=8, lr=lr, client_fraction=0.7
    )
    w, signs, drawn = np.array([0.3, -0.2]), set(), set()
    for round in history:
        ends, losses = [], []
        for i in round.record["clients"]:
            data, now = members[i].data.train, w
            for _ in range(3):
                task = F.cross_entropy(data.x * torch.from_numpy(now), data.y).item()
                losses.append((task + mu / 2 * ((now - w) ** 2).sum(), len(data)))
                now = now - lr * (two_gradient(now, data) + mu * (now - w))
            ends.append((now, len(data) if weighting == "samples" else 1))
        signs |= {np.sign((end - w)[0]) for end, _ in ends}
        drawn.add(tuple(round.record["clients"]))
        w = sum(end * n for end, n in ends) / sum(n for _, n in ends)
        np.testing.assert_allclose(shared(round.after)["w"].numpy(), w, atol=1e-6)
        loss = sum(value * n for value, n in losses) / sum(n for _, n in losses)
        assert round.record["train_loss"] == pytest.approx(loss, abs=1e-6)
    assert signs == {-1.0, 1.0}, "the clients should pull both ways"
    assert len(drawn) > 1


test_conformance = testing.conformance(
    methods.FedProx(mu=0.35),
    reference_loss=oracles.proximal,
    expected_bytes=oracles.averaging_bytes,
    counted="updates",
    reductions=[
        Reduction({"mu": 0.0}, methods.FedAvg(), "received"),
        Reduction({"weighting": "uniform"}, methods.FedIN(exchange_features=False, mu=0.35), "received"),
    ],
)
