"""FedORGP: the server's loss in NumPy, what it trains, and predictions by the largest cosine."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch

from polyfed import methods, testing
from polyfed.core.randomness import generator
from polyfed.methods.building_blocks.prototype_network import train_network
from polyfed.methods.fedorgp import FedORGP, orthogonality
from polyfed.testing import ChangedValue, Reduction
from tests.helpers import oracles
from tests.helpers.few_classes import members
from tests.helpers.toys import normal, rounds

METHOD = FedORGP(prototype_weight=0.5, gamma=2.0, server_epochs=3, server_lr=0.1)


def test_the_server_fits_the_network_to_what_it_was_sent() -> None:
    for number, round in enumerate(rounds(METHOD, members(), rounds=2), 1):
        rows, labels = (torch.cat([round.up[i][name] for i in sorted(round.up)]) for name in ("prototypes", "labels"))
        loss = functools.partial(orthogonality, gamma=2.0)
        draws = generator(0, "server means", number)
        expected, value = train_network(round.before["network"], rows, labels, loss, 3, 4, 0.1, draws)
        assert all(torch.allclose(round.after["network"][name], t, atol=1e-5) for name, t in expected.items())
        assert round.record["server"]["prototype_loss"] == pytest.approx(value, rel=1e-5)


def test_the_largest_cosine_predicts() -> None:
    """Also where another prototype is the nearest."""
    z, p = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.0], [9.0, 9.0]])
    assert METHOD.similarity(z, p).argmax(1).tolist() == [1]
    a, b = normal(6, 3), normal(4, 3, seed=1)
    expected = a @ b.T / a.norm(dim=1, keepdim=True) / b.norm(dim=1)
    torch.testing.assert_close(METHOD.similarity(a, b), expected)
    last = rounds(dataclasses.replace(METHOD, predictor="prototype"), members(test=4))[1]
    assert list(last.record["accuracy_by_predictor"]["received"]) == ["head"]


@pytest.mark.parametrize("gamma", [0.0, 2.0])
def test_orthogonality_against_numpy_with_cosines_of_both_signs(gamma: float) -> None:
    p, rows, labels = normal(3, 4), normal(5, 4, seed=1), torch.tensor([0, 2, 1, 1, 0])
    a, b = (t.double().numpy() for t in (rows, p))
    cosines = np.array([[x @ y / np.linalg.norm(x) / np.linalg.norm(y) for y in b] for x in a])
    own = np.eye(3)[labels]
    assert cosines[own == 0].min() < 0 < cosines[own == 0].max()
    expected = (1 - cosines)[own == 1].mean() + gamma * np.abs(cosines[own == 0]).mean()
    assert float(orthogonality(p, rows, labels, gamma)) == pytest.approx(expected, rel=1e-6)


def turned_to(model: Any, batch: Any, context: Any) -> float:
    """CE + 0.7 (1 - cos(z, P[y])) in float64, a mean over all rows of the batch."""
    z, p = (t.detach().double().numpy() for t in (model.represent(batch.x), context["prototypes"]))
    known, y = context["known"].numpy(), batch.y.numpy()
    rows = [(row, p[c]) for row, c in zip(z, y, strict=True) if known[c]]
    cosines = [(a @ b) / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-8) for a, b in rows]
    return oracles.cross_entropy(model, batch, context) + 0.7 * float(sum(1 - one for one in cosines)) / len(y)


test_conformance = testing.conformance(
    methods.FedORGP(prototype_weight=0.7, gamma=0.5, server_epochs=10, server_lr=0.1),
    reference_loss=turned_to,
    expected_bytes=oracles.CLASS_ROWS,
    skip=oracles.TRAINED_AT_THE_SERVER,
    changed_values={"candidates": ChangedValue("own", {"predictor": "prototype"})},
    reductions=[Reduction({"prototype_weight": 0.0}, methods.Local())],
)
