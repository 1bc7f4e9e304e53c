"""kNN-Per against scikit-learn's neighbors; how the weight is chosen, and what is FedAvg's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from polyfed import methods, testing
from polyfed.core.client import Client
from polyfed.methods import KNNPer
from polyfed.methods.knn_per import neighbor_shares
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.toys import federation, normal, samples, softmax, worker


@pytest.mark.parametrize(("k", "scale"), [(1, 1.0), (4, 0.3), (50, 2.0)])
def test_shares_are_those_of_weighted_neighbors(k: int, scale: float) -> None:
    rows, labels, z = normal(20, 3).double(), torch.arange(20) % 3, normal(7, 3, seed=1).double()
    by = KNeighborsClassifier(min(k, 20), weights=lambda d: np.exp(-(d**2) / (3 * scale))).fit(rows, labels)
    np.testing.assert_allclose(neighbor_shares(z, rows, labels, 3, k, scale), by.predict_proba(z), atol=1e-12)
    far = neighbor_shares(z + 1e4, rows, labels, 3, k, scale)
    assert torch.allclose(far.sum(1), torch.ones(7, dtype=torch.float64)), "far rows do not underflow"


@pytest.mark.parametrize("validation", [0, 40])
def test_scores_mix_network_and_neighbors_by_the_best_weight(validation: int) -> None:
    held = samples(validation, 7) if validation else None
    members = [Client("deep", samples(30, 0), validation=held), Client("deep", samples(12, 1))]
    method = KNNPer(k=3)
    fed, _ = federation(method, members, rounds=2)
    fed.run()
    at = worker(fed, 0)
    method.receive(at, method.broadcast(fed.server, 0))

    def both(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        z = at.model.eval().represent(x)
        own = at.model.represent(at.data.train.x).detach().double()
        shares = neighbor_shares(z.detach().double(), own, at.data.train.y, 3, 3, 1.0)
        return softmax(at.model.head(z).detach().double().numpy()), shares.numpy()

    weight = 0.5
    if held is not None:
        network, neighbors = both(held.x)
        mixed = [(1 - v / 10) * network + v / 10 * neighbors for v in range(11)]
        right = [int((scores.argmax(1) == held.y.numpy()).sum()) for scores in mixed]
        weight = right.index(max(right)) / 10
    x = samples(9, 5).x
    network, neighbors = both(x)
    with torch.no_grad():
        found = method.predict(at.model, x, at.state).exp()
    np.testing.assert_allclose(found, (1 - weight) * network + weight * neighbors, atol=1e-9)


test_conformance = testing.conformance(
    methods.KNNPer(k=3, weight=0.4),
    expected_bytes=oracles.averaging_bytes,
    counted="updates",
    reductions=[Reduction({"weight": 0.0}, methods.FedAvg(), "received")],
)


def test_without_neighbors_scores_are_the_networks() -> None:
    fed, _ = federation(KNNPer(weight=0.0), [Client("deep", samples(12, 1))], rounds=1)
    fed.run()
    at = worker(fed, 0)
    fed.method.receive(at, fed.method.broadcast(fed.server, 0))
    x = samples(9, 5).x
    assert not at.state
    assert torch.equal(fed.method.predict(at.model, x, at.state), at.model(x))
