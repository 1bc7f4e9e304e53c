"""InCoAvg against NumPy by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed import methods, testing
from polyfed.core.client import Client
from polyfed.methods import InCoAvg, incoavg
from polyfed.methods.incoavg import correct_updates, shallow_references
from polyfed.testing.fixtures import draw, tiny_model
from tests.helpers import oracles
from tests.helpers.toys import moved, numpy_mean, rounds, shared, zoo_weights

NETS = {f"blocks{n}": lambda n=n: tiny_model(n, 4, 6) for n in range(4)}
CONV = "intermediate.block{}.conv.weight"


def played(method, architectures=("blocks1", "blocks2", "blocks3"), sizes=(12, 12, 12), **options):
    data = [draw(n, (0, 1, 2), i) for i, n in enumerate(sizes)]
    return rounds(method, [Client(a, one) for a, one in zip(architectures, data, strict=True)], NETS, **options)


def corrected(g_k, g_0):
    """The update of a deep layer, kernel by kernel, as in the authors' code."""
    found = np.empty_like(g_k)
    for place in np.ndindex(*g_k.shape[:2]):
        a, b = g_0[place], g_k[place]
        theta = min(abs((a * b).sum()) / ((a * a).sum() + 1e-7), incoavg.THETA_MAX)
        deep, shallow = np.linalg.norm(b), np.linalg.norm(a)
        turned = (b / deep + theta * a / shallow) * (deep + shallow) / 2 if deep and shallow else b
        found[place] = np.clip(turned, -incoavg.UPDATE_MAX, incoavg.UPDATE_MAX)
    return found


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_rounds_by_hand(weighting, monkeypatch):
    sizes = [8, 12, 16]
    monkeypatch.setattr(incoavg, "THETA_MAX", 1.5)
    monkeypatch.setattr(incoavg, "UPDATE_MAX", 0.02)
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


def test_a_kernel_without_an_update_is_left_alone():
    g_k, g_0 = 0.01 * torch.randn(2, 2, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    g_k[0, 0], g_0[1, 1] = 0.0, 0.0
    found = correct_updates(g_k, g_0)
    assert torch.isfinite(found).all()
    assert torch.equal(found[0, 0], g_k[0, 0])
    assert torch.equal(found[1, 1], g_k[1, 1])
    assert torch.equal(correct_updates(g_k, 0 * g_0), g_k)
    assert found.dtype == g_k.dtype


def test_references_of_a_resnet_are_the_first_blocks_second_convolution():
    weights = zoo_weights("resnet22")
    found = shallow_references(weights)
    assert len(found) == 2 * (1 + 1 + 2 + 2)
    for name, reference in found.items():
        stage, block = name.split(".")[1:3]
        assert block != "0"
        assert reference == f"intermediate.{stage}.0.conv2.weight"
        assert weights[name].shape == weights[reference].shape
    assert shallow_references(zoo_weights("resnet10")) == {}
    assert shallow_references(zoo_weights("fedgh-cnn1")) == {}


@pytest.mark.parametrize("kernel", [(1, 3), (3, 1), (2, 2)])
def test_kernels_of_any_form_are_corrected_and_single_weights_are_not(kernel):
    weights = {f"s.{block}.conv.weight": torch.zeros(4, 4, *kernel) for block in range(3)}
    weights |= {f"s.{block}.point.weight": torch.zeros(4, 4, 1, 1) for block in range(3)}
    weights |= {f"s.{block}.fc.weight": torch.zeros(4, 4) for block in range(3)}
    assert shallow_references(weights) == {f"s.{block}.conv.weight": "s.0.conv.weight" for block in (1, 2)}


test_conformance = testing.conformance(
    methods.InCoAvg(),
    reference_loss=oracles.cross_entropy,
    expected_bytes=oracles.averaging_bytes,
    reductions=[
        # one block: nothing to correct
        oracles.is_fedavg({}, "uniform"),
        oracles.is_fedavg({"weighting": "samples"}),
    ],
)
