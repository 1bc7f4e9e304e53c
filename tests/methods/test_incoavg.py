"""InCoAvg against NumPy by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed import methods, testing
from polyfed.core.client import Client
from polyfed.functional import cross_layer
from polyfed.methods import InCoAvg
from polyfed.testing import Reduction
from polyfed.testing.fixtures import draw, tiny_model
from tests.helpers import oracles
from tests.helpers.toys import moved, numpy_mean, rounds, shared

NETS = {f"blocks{n}": lambda n=n: tiny_model(n, 4, 6) for n in range(4)} | {
    "bn": lambda: tiny_model(3, 4, 6, norm=True)
}
CONV = "intermediate.block{}.conv.weight"


def played(method, architectures=("blocks1", "blocks2", "blocks3"), sizes=(12, 12, 12), **options):
    data = [draw(n, (0, 1, 2), i) for i, n in enumerate(sizes)]
    return rounds(method, [Client(a, one) for a, one in zip(architectures, data, strict=True)], NETS, **options)


def corrected(g_k, g_0):
    """The update of a deep layer; against NumPy in tests/functional/test_cross_layer.py."""
    return cross_layer.correct_updates(torch.from_numpy(g_k), torch.from_numpy(g_0)).numpy()


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_rounds_by_hand(weighting, monkeypatch):
    sizes = [8, 12, 16]
    monkeypatch.setattr(cross_layer, "THETA_MAX", 1.5)
    monkeypatch.setattr(cross_layer, "UPDATE_MAX", 0.02)
    method = InCoAvg(weighting=weighting)
    signs = set()
    for round in played(method, sizes=sizes):
        before, after = shared(round.before), shared(round.after)
        shares = sizes if weighting == "samples" else [1, 1, 1]
        models = [m["model"] for m in round.up.values()]
        mean = {name: numpy_mean(models, shares, name) for name in before}
        g = {name: mean[name] - before[name].double().numpy() for name in before}
        expected = dict(mean)
        for deep in (CONV.format(1), CONV.format(2)):
            step = corrected(g[deep], g[CONV.format(0)])
            expected[deep] = before[deep].double().numpy() + step
            signs |= set(np.sign((g[deep] * g[CONV.format(0)]).sum((2, 3))).ravel())
            assert np.abs(step).max() <= 0.02 + 1e-9
            assert np.abs(expected[deep] - mean[deep]).max() > 1e-4
        for name, value in after.items():
            np.testing.assert_allclose(value.numpy(), expected[name], atol=2e-6, err_msg=name)
    assert signs >= {-1.0, 1.0}


def test_a_layer_that_nobody_sent_stays_and_is_no_reference():
    def lose(round, client):
        return client != 0

    (round,) = played(InCoAvg(), ["blocks1", "blocks3", "blocks3"], rounds=1, lose=lose)
    for block in (1, 2):
        assert torch.equal(shared(round.after)[CONV.format(block)], shared(round.before)[CONV.format(block)])
    assert torch.equal(shared(round.after)[CONV.format(0)], round.up[0]["model"][CONV.format(0)])
    (round,) = played(InCoAvg(), lr=0.0, rounds=1)  # nothing moves: no division by a zero norm
    assert moved(shared(round.before), shared(round.after)) < 1e-7


def test_same_shape_corrects_within_each_architecture():
    method = InCoAvg(aggregation="same-shape")
    (round,) = played(method, ["blocks2", "blocks3", "blocks2"], rounds=1)
    for architecture, who in (("blocks2", [0, 2]), ("blocks3", [1])):
        before, after = (state[f"model {architecture}"] for state in (round.before, round.after))
        models = [round.up[i]["model"] for i in who]
        g = {n: numpy_mean(models, [1] * len(who), n) - before[n].double().numpy() for n in before}
        deep, first = CONV.format(1), CONV.format(0)
        step = corrected(g[deep], g[first])
        np.testing.assert_allclose(after[deep].numpy(), before[deep].double().numpy() + step, atol=2e-6)


# the conformance kit --------------------------------------------------------------------------------------------------

test_conformance = testing.conformance(
    methods.InCoAvg(),
    reference_loss=oracles.cross_entropy,
    expected_bytes=oracles.averaging_bytes,
    reductions=[
        # one block: nothing to correct
        Reduction({}, methods.FedAvg(weighting="uniform"), "received", same_architecture=True),
        Reduction({"weighting": "samples"}, methods.FedAvg(), "received", same_architecture=True),
    ],
)
