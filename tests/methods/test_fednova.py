"""FedNova against NumPy by hand: normalized updates, whatever the local solver."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed import methods, testing
from polyfed.errors import ConfigError
from polyfed.methods import FedAvg, FedNova
from tests.helpers import oracles
from tests.helpers.toys import Client, Two, clients, moved, rounds, shared, two_gradient


def walked(w, data, lr, steps, rho, mu):
    """The client's end, and a as the sum of its gradients' coefficients."""
    now, m, coefficients, mixed = w, 0.0, np.zeros(steps), np.zeros(steps)
    for step in range(steps):
        m = rho * m + two_gradient(now, data) + mu * (now - w)
        now = now - lr * m
        mixed = rho * mixed + np.eye(steps)[step] - lr * mu * coefficients
        coefficients = coefficients + mixed
    return now, coefficients.sum()


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("aggregation", ["layer-wise", "same-shape"])
@pytest.mark.parametrize(("rho", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.8), (0.6, 0.8)])
def test_rounds_by_hand(weighting, aggregation, rho, mu):
    """Clients of one row repeated, so that batches of 1 make tau_k = n_k and the order does not matter."""
    rows = [(2.0, 0, 1), (-3.0, 0, 4), (0.8, 1, 3)]
    members = [Client("two", (torch.full((n, 1), x), torch.full((n,), y))) for x, y, n in rows]
    method = FedNova(weighting=weighting, aggregation=aggregation, mu=mu)
    settings = {"rounds": 4, "batch_size": 1, "lr": 0.3, "momentum": rho, "client_fraction": 0.7}
    history = rounds(method, members, {"two": Two}, classes=2, lr_schedule="cosine", **settings)
    w, signs = np.array([0.3, -0.2]), set()
    for number, round in enumerate(history):
        lr, asked = 0.15 * (1 + np.cos(np.pi * number / 4)), round.record["clients"]
        n = np.array([rows[i][2] for i in asked])
        p = n / n.sum() if weighting == "samples" else np.full(len(n), 1 / len(n))
        ends, a = zip(*(walked(w, members[i].data.train, lr, rows[i][2], rho, mu) for i in asked), strict=True)
        for i, one in zip(asked, a, strict=True):
            assert float(round.up[i]["a"]) == pytest.approx(one, rel=1e-6)
        tau = (p * np.array(a)).sum()
        signs |= {int(s) for end in ends for s in np.sign(end - w)}
        w = w - tau * sum(q * (w - end) / one for q, end, one in zip(p, ends, a, strict=True))
        np.testing.assert_allclose(shared(round.after)["w"].numpy(), w, atol=2e-6)
    assert signs == {-1, 1}


def test_equal_steps_are_fedavg():
    """Of equal a_k nothing is left, here and with weights by samples: clients of 10 to 12 samples take 3 steps each."""
    for training in ({}, {"momentum": 0.9}, {"optimizer": "adam", "lr": 0.01}):
        sizes = [10, 11, 12]
        runs = [rounds(m, clients(["deep-bn", "bn", "bn"], sizes), **training) for m in (FedNova(), FedAvg())]
        assert moved(*(shared(run[-1].after) for run in runs)) < 2e-6


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_the_normalizer_of_adam_is_its_number_of_steps(optimizer):
    (round,) = rounds(FedNova(), clients(["deep"]), rounds=1, optimizer=optimizer)
    assert float(round.up[0]["a"]) == 3.0


def test_a_pull_that_overshoots_is_refused():
    with pytest.raises(ConfigError, match=r"expected mu times training\.lr below 1, got 20 times 0.1"):
        rounds(FedNova(mu=20.0), clients(["deep"]))
    assert rounds(FedNova(mu=20.0), clients(["deep"]), lr=0.01)


test_conformance = testing.conformance(
    methods.FedNova(),
    reference_loss=oracles.cross_entropy,
    expected_bytes=oracles.of_weights(up=8 + 4),  # FedAvg's, and a_k as float32
    counted="updates",
)
