"""FedHeNN's controls: targets that should not help, a client's own kernel and a mean kernel in another order."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from polyfed.core.model_factory import ModelFactory
from polyfed.functional.compression import dequantize_columns
from polyfed.methods import FedHeNN, Local
from tests.helpers.nested import nested
from tests.helpers.toys import NETS, clients, federation, model_with, public, rounds

MIXED = ["shallow", "deep", "wide", "broad"]  # widths of their representations: 5, 5, 5, 8


def hetero(**hyperparameters):
    return FedHeNN(**nested(**{"eta0": 0.5, "size": 20, "batch": 20, **hyperparameters}))


def kernel(members, number, weights, x):
    """H K_k H in float64, from the definition."""
    model = model_with(NETS[members[number].architecture], weights)
    a = copy.deepcopy(model).double().represent(x.double()).detach().numpy()
    h = np.eye(len(a)) - 1 / len(a)
    return h @ a @ a.T @ h


def received_kernel(message):
    f = dequantize_columns(message["factor"]).double().numpy()
    return f @ f.T


def up_to_scale(a, b):
    """Distance of two matrices once both are of norm 1."""
    return np.abs(a / np.linalg.norm(a) - b / np.linalg.norm(b)).max()


def latest(members, history, upto):
    """Everybody's latest weights before round `upto`: the last upload that arrived, else the seeded start."""
    start = ModelFactory(NETS, Local().build, 0, torch.device("cpu"))
    found = {i: start.initial_state(c.architecture, owner=i) for i, c in enumerate(members)}
    for round in history[: upto - 1]:
        refused = {entry["client"] for entry in round.record["refused"]}
        found |= {i: message["model"] for i, message in round.up.items() if i not in refused}
    return found


@pytest.mark.parametrize("norm", ["none", "fro"])
@pytest.mark.parametrize("pool", ["all", "seen"])
def test_own_is_the_clients_own_kernel_alone(pool, norm):
    members = clients([*MIXED, "deep"])
    method = hetero(control="own", pool=pool, norm=norm)
    history = rounds(method, members, held=public(), rounds=4, client_fraction=0.6, lose=lambda r, i: r == 2)
    checked, known = 0, set()
    for number, round in enumerate(history, 1):
        weights = latest(members, history, number)
        for i in round.record["clients"]:
            if number == 1 or (pool == "seen" and i not in known):
                assert not round.down[i]
                continue
            expected = kernel(members, i, weights[i], round.down[i]["rad"])
            assert up_to_scale(received_kernel(round.down[i]), expected) < 1e-6
            checked += 1
        known |= set(round.record["clients"]) if number != 2 else set()
        assert not any(name.startswith("factor") for name in round.after)
    assert checked >= 4


def test_permuted_is_the_mean_kernel_in_another_order():
    """Rows and columns alike; the inputs stay as they are, so that none has its own row."""
    members = clients(MIXED)
    method = hetero(control="permuted")
    fed, watch = federation(method, members, held=public(), rounds=3)
    fed.run()
    plain = rounds(hetero(), members, held=public(), rounds=2)
    assert torch.equal(plain[1].down[0]["rad"], watch.rounds[1].down[0]["rad"])
    orders = []
    for number in (2, 3):
        message, weights = watch.rounds[number - 1].down[0], latest(members, watch.rounds, number)
        k_bar = np.mean([kernel(members, j, weights[j], message["rad"]) for j in range(4)], axis=0)
        fed.server.round = number
        order = torch.randperm(20, generator=fed.server.generator("permuted")).numpy()
        assert up_to_scale(received_kernel(message), k_bar[np.ix_(order, order)]) < 1e-6
        assert up_to_scale(received_kernel(message), k_bar) > 1e-2
        orders.append(order.tolist())
    assert orders[0] != orders[1]
