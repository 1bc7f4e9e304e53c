"""FedHeNN's controls: targets that should not help, a client's own kernel and a mean kernel in another order."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from polyfed.core.model_factory import ModelFactory
from polyfed.functional.quantization import dequantize_columns
from polyfed.methods import FedHeNN, Local
from tests.helpers.nested import nested
from tests.helpers.toys import NETS, batch, clients, federation, model_with, moved, public, rounds, same, worker

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


def test_own_starts_without_a_pull_and_keeps_what_the_client_was():
    """At the weights that the client received the term and its gradient are zero; away from them it is not."""
    method = hetero(control="own")
    fed, _ = federation(method, clients(MIXED), held=public())
    method.init_server(fed.server)
    fed.server.round = 2
    method.start_round(fed.server, [0, 1, 2, 3])
    at = worker(fed, 3, 2)
    at.context = method.receive(at, method.broadcast(fed.server, 3))
    context = {**at.context, **method.step_inputs(at, 0, torch.Generator().manual_seed(0))}
    data = batch(at.data.train)
    nothing = data._replace(w=torch.zeros_like(data.w))
    found = method.gradients(at.model, nothing, context)
    assert abs(float(found.loss)) < 1e-6
    assert max(float(g.abs().max()) for g in found.grads.values() if g is not None) < 1e-5
    with torch.no_grad():
        for i, p in enumerate(at.model.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), alpha=0.3)
    assert float(method.gradients(at.model, nothing, context).loss) > 1e-3


def test_of_one_client_the_mean_kernel_is_its_own():
    members = clients(["broad"])
    ours = rounds(hetero(control="own"), members, held=public(), rounds=3)
    plain = rounds(hetero(), members, held=public(), rounds=3)
    assert all(same(a.weights[0], b.weights[0]) for a, b in zip(ours, plain, strict=True))


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


def test_each_control_trains_other_weights():
    members = clients(MIXED)
    found = {c: rounds(hetero(control=c), members, held=public())[-1] for c in ("none", "own", "permuted")}
    for one, other in (("none", "own"), ("none", "permuted"), ("own", "permuted")):
        assert all(moved(found[one].weights[i], found[other].weights[i]) > 1e-6 for i in range(4))
    sent = {name: round.record["bytes_by_client"] for name, round in found.items()}
    assert sent["permuted"] == sent["none"]
    assert sent["own"]["3"]["down"] < sent["none"]["3"]["down"]  # as many columns as its own representation has


@pytest.mark.parametrize(
    ("hyperparameters", "said"),
    [
        (
            {"control": "own", "setting": "homogeneous"},
            "control: expected setting 'heterogeneous', as the other has no",
        ),
        ({"control": "permuted", "setting": "homogeneous"}, "control: expected setting 'heterogeneous'"),
    ],
)
def test_controls_that_cannot_be_are_refused(hyperparameters, said):
    with pytest.raises(ValueError, match=said):
        hetero(**hyperparameters)
