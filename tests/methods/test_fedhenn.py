"""FedHeNN's own properties; oracles use L x L kernels in float64."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from polyfed.core.client import Client
from polyfed.core.model_factory import ModelFactory
from polyfed.errors import ConfigError
from polyfed.functional.compression import dequantize_columns
from polyfed.methods import FedHeNN, HomogeneousFedHeNN, Local
from polyfed.methods.building_blocks import mean_kernel
from tests.helpers.nested import nested
from tests.helpers.quick import others_slow
from tests.helpers.toys import (
    INPUTS,
    NETS,
    batch,
    clients,
    federation,
    model_with,
    moved,
    public,
    rounds,
    same,
    samples,
    worker,
)

MIXED = ["shallow", "deep", "wide", "broad"]  # widths of their representations: 5, 5, 5, 8
FLOATS = {name: sum(t.numel() for t in net().state_dict().values()) for name, net in NETS.items() if "-" not in name}


def hetero(**hyperparameters):
    return FedHeNN(**nested(**{"eta0": 0.5, "size": 20, "batch": 20, **hyperparameters}))


def homo(**hyperparameters):
    return HomogeneousFedHeNN(**nested(**{"eta0": 0.5, "size": 20, "batch": 20, **hyperparameters}))


def kernel(model, x):
    """H K H in float64, from the definition."""
    a = copy.deepcopy(model).double().eval().represent(x.double()).detach().numpy()
    h = np.eye(len(a)) - 1 / len(a)
    return h @ a @ a.T @ h


def up_to_scale(a, b):
    """Distance of two matrices once both are of norm 1."""
    return np.abs(a / np.linalg.norm(a) - b / np.linalg.norm(b)).max()


def received_kernel(message):
    f = dequantize_columns(message["factor"]).double().numpy()
    return f @ f.T


# ---- eta (8.1)  ----


def test_eta_schedules():
    rounds_ = (1, 2, 5, 200)
    for schedule, factors in {
        "sqrt": (0, 1, 2, math.sqrt(199)),
        "linear": (0, 1, 4, 199),
        "constant": (1, 1, 1, 1),
    }.items():
        method = FedHeNN(eta0=0.01, eta_schedule=schedule)
        assert [method.eta(t) for t in rounds_] == pytest.approx([0.01 * f for f in factors])
    assert FedHeNN(eta0=0.001).eta(200) == pytest.approx(0.0141, abs=5e-5)


@pytest.mark.parametrize("schedule", ["sqrt", "linear"])
def test_the_first_round_is_pure_local_training_without_a_byte_down(schedule):
    members = clients(MIXED)
    history = rounds(hetero(eta_schedule=schedule), members, held=public())
    local = rounds(Local(), members)
    assert history[0].record["bytes_down"] == 0
    assert not any(history[0].down.values())
    assert not history[0].before
    assert all(same(history[0].weights[i], local[0].weights[i]) for i in range(4))
    assert all(moved(history[1].weights[i], local[1].weights[i]) > 1e-5 for i in range(4))
    assert history[0].record["sums"] == {}


def test_constant_eta_aligns_in_round_1_too():
    history = rounds(hetero(eta_schedule="constant"), clients(MIXED), held=public(), rounds=1)
    assert all(set(m) == {"rad", "factor"} for m in history[0].down.values())


# ---- the first step and its gradient (8.4, 8.6, 8.7)  ----


def at_step(method, members, *, round=2, number=0, step=0, double=False):
    """A client that has received its message in `round`; with it the context of one step."""
    fed, _ = federation(method, members, held=public())
    method.init_server(fed.server)
    fed.server.round = round
    method.start_round(fed.server, [client.id for client in fed.clients])
    message = method.broadcast(fed.server, number)
    at = worker(fed, number, round)
    if double:
        at.bound = copy.deepcopy(at.model).double()
        at.prepare = lambda x: x.double()
    at.context = method.receive(at, message)
    inputs = method.step_inputs(at, step, torch.Generator().manual_seed(step))
    return fed, at, message, {**at.context, **inputs}


def test_homogeneous_without_weight_sends_weights_alone():
    for round in rounds(homo(eta0=0.0), clients(["deep"] * 2), rounds=3):
        assert all(message.keys() == {"model"} for message in round.down.values())


def hand_gradient(model, data, x, k_bar, weight):
    """Autograd of CE + weight (1 - CKA) with the L x L definition, in float64."""
    model = copy.deepcopy(model).double().train()
    loss = F.cross_entropy(model(data.x.double()), data.y)
    if weight:
        a = model.eval().represent(x.double())
        h = torch.eye(len(a), dtype=torch.float64) - 1 / len(a)
        k, m = a @ a.T, torch.as_tensor(k_bar)

        def hsic(p, q):
            return torch.trace(p @ h @ q @ h) / (len(a) - 1) ** 2

        loss = loss + weight * (1 - hsic(k, m) / torch.sqrt(hsic(k, k) * hsic(m, m)))
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True)), float(loss.detach())


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("rows", others_slow([20, 7], quick=[7]))
@pytest.mark.parametrize("norm", ["none", "fro"])
def test_gradient_of_a_step(every, rows, norm):
    """Q eta on every q-th step, nothing between; K_bar of everybody's latest weights, cut to the rows of the step."""
    method = hetero(every=every, batch=rows, norm=norm)
    members = clients(MIXED)
    for step in range(4):
        fed, at, message, context = at_step(method, members, round=5, number=2, step=step)
        models = [model_with(NETS[c.architecture], fed.server.client_weights(c.id)) for c in fed.clients]
        kernels = [kernel(m, message["rad"]) for m in models]
        k_bar = np.mean([k / np.linalg.norm(k) if norm == "fro" else k for k in kernels], axis=0)
        on = step % every == 0
        assert ("rad_x" in context) == on
        x, chosen = message["rad"], torch.arange(20)
        if on and rows < 20:
            chosen = torch.randperm(20, generator=torch.Generator().manual_seed(step))[:rows]
            assert torch.equal(context["rad_x"], x[chosen])
        weight = every * 0.5 * math.sqrt(4) if on else 0.0
        data = batch(at.data.train)
        expected, loss = hand_gradient(at.model, data, x[chosen], k_bar[np.ix_(chosen, chosen)], weight)
        found = method.gradients(at.model, data, context)
        assert float(found.loss) == pytest.approx(loss, abs=1e-5)
        for name, gradient in found.grads.items():
            torch.testing.assert_close(gradient.double(), expected[name], atol=5e-6, rtol=0)


def test_homogeneous_gradient_of_a_step():
    """Away from the target: the model has moved since it was received."""
    method = homo()
    _, at, message, context = at_step(method, clients(["deep"] * 2))
    target = kernel(at.model, message["rad"])
    with torch.no_grad():
        for i, p in enumerate(at.model.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), alpha=0.3)
    data = batch(at.data.train)
    expected, loss = hand_gradient(at.model, data, message["rad"], target, 0.5)
    found = method.gradients(at.model, data, context)
    assert float(found.loss) == pytest.approx(loss, abs=1e-5)
    for name, gradient in found.grads.items():
        torch.testing.assert_close(gradient.double(), expected[name], atol=5e-6, rtol=0)


@pytest.mark.parametrize(("every", "share"), [(1, 1.0), (2, 0.6), (5, 0.2)])
def test_how_often_the_term_enters(every, share):
    """20 rows in batches of 4, one epoch: 5 steps, counted from 0."""
    history = rounds(hetero(every=every), clients(["deep", "shallow"], 20), held=public())
    assert history[1].record["sums"]["d_cka_steps"] == pytest.approx(share)


def test_the_pass_over_the_rad_is_in_eval_mode_and_leaves_statistics_alone():
    method = hetero()
    _, at, _, context = at_step(method, clients(["dropout"] * 2, 12), number=1)
    alone = copy.deepcopy(at.model)
    torch.manual_seed(0)
    method.gradients(at.model, batch(at.data.train), context)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    method.gradients(alone, batch(at.data.train), {})
    assert same(at.model.state_dict(), alone.state_dict())
    assert torch.equal(state, torch.get_rng_state()), "dropout is off in the pass over the RAD"
    assert all(m.training for m in at.model.modules())


# ---- K_bar (8.5)  ----


def k_bar(fed_clients, weights, x, members, norm="none"):
    kernels = [kernel(model_with(NETS[fed_clients[j].architecture], weights[j]), x) for j in members]
    return np.mean([k / np.linalg.norm(k) if norm == "fro" else k for k in kernels], axis=0)


def known_to_the_server(members, history, upto, seed=0):
    """Everybody's latest weights before round `upto`: the last upload that arrived, else the seeded start."""
    start = ModelFactory(NETS, Local().build, seed, torch.device("cpu"))
    latest = {i: start.initial_state(c.architecture, owner=i) for i, c in enumerate(members)}
    for round in history[: upto - 1]:
        refused = {entry["client"] for entry in round.record["refused"]}
        latest |= {i: m["model"] for i, m in round.up.items() if i not in refused}
    return latest


@pytest.mark.parametrize("norm", ["none", "fro"])
@pytest.mark.parametrize("pool", others_slow(["all", "selected", "seen"], quick=["selected"]))
def test_kernel_alignment_of_each_pool(pool, norm):
    members = clients([*MIXED, "deep"])
    method = hetero(pool=pool, norm=norm)
    history = rounds(method, members, held=public(), rounds=4, client_fraction=0.4, lose=lambda r, i: r == 1 and i == 3)
    seen, last = set(), set()
    checked = 0
    for number, round in enumerate(history, 1):
        latest = known_to_the_server(members, history, number)
        for i in round.record["clients"]:
            who = {"all": set(range(5)), "selected": set(last), "seen": set(seen)}[pool]
            if number == 1 or not who:
                assert not round.down[i]
                continue
            expected = k_bar(members, latest, round.down[i]["rad"], sorted(who), norm)
            assert up_to_scale(received_kernel(round.down[i]), expected) < 1e-6
            assert dequantize_columns(round.down[i]["factor"]).shape[1] == sum(
                8 if members[j].architecture == "broad" else 5 for j in who
            )
            checked += 1
        refused = {entry["client"] for entry in round.record["refused"]}
        last = set(round.record["clients"]) - refused
        seen |= last
    assert checked >= 4
    assert len(seen) < 5 or pool != "seen", "choose another seed: somebody should stay unseen for long"


# ---- controls: targets that should not help  ----


@pytest.mark.parametrize("norm", ["none", "fro"])
@pytest.mark.parametrize("pool", ["all", "seen"])
def test_own_is_the_clients_own_kernel_alone(pool, norm):
    members = clients([*MIXED, "deep"])
    method = hetero(control="own", pool=pool, norm=norm)
    history = rounds(method, members, held=public(), rounds=4, client_fraction=0.6, lose=lambda r, i: r == 2)
    checked, known = 0, set()
    for number, round in enumerate(history, 1):
        weights = known_to_the_server(members, history, number)
        for i in round.record["clients"]:
            if number == 1 or (pool == "seen" and i not in known):
                assert not round.down[i]
                continue
            expected = k_bar(members, weights, round.down[i]["rad"], [i])
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
        message, weights = watch.rounds[number - 1].down[0], known_to_the_server(members, watch.rounds, number)
        mean = k_bar(members, weights, message["rad"], range(4))
        fed.server.round = number
        order = torch.randperm(20, generator=fed.server.generator("permuted")).numpy()
        assert up_to_scale(received_kernel(message), mean[np.ix_(order, order)]) < 1e-6
        assert up_to_scale(received_kernel(message), mean) > 1e-2
        orders.append(order.tolist())
    assert orders[0] != orders[1]


# ---- the RAD (8.14)  ----


def test_rad_rows_are_drawn_from_the_hold_out_without_replacement_and_anew():
    held = public(40)
    history = rounds(hetero(), clients(MIXED), held=held, rounds=4)
    again = rounds(hetero(), clients(MIXED), held=held, rounds=4)
    other = rounds(hetero(), clients(MIXED), held=held, rounds=2, seed=1)
    drawn = []
    for round in history[1:]:
        rads = [message["rad"] for message in round.down.values()]
        assert all(torch.equal(rad, rads[0]) for rad in rads), "all clients see the same rows in the same order"
        places = [(held.samples.x == row).all(1).nonzero().flatten().tolist() for row in rads[0]]
        assert all(len(place) == 1 for place in places)
        drawn.append([place[0] for place in places])
        assert len(set(drawn[-1])) == 20
    assert set(drawn[0]) != set(drawn[1]) != set(drawn[2])
    assert all(torch.equal(a.down[0]["rad"], b.down[0]["rad"]) for a, b in zip(history[1:], again[1:], strict=True))
    assert not torch.equal(other[1].down[0]["rad"], history[1].down[0]["rad"])


def test_too_few_hold_out_rows_are_refused_before_round_1():
    for held, given in ((public(19), "got 19"), (None, "got 0")):
        with pytest.raises(ConfigError, match=rf"20 rows.*{given}.*data.holdout"):
            federation(hetero(), clients(MIXED), held=held)
    federation(hetero(), clients(MIXED), held=public(20))


# ---- bytes (8.11, section 2.4)  ----


@pytest.mark.parametrize(("rank", "exact_rank", "columns"), [(128, 256, 23), (3, 22, 3), (3, 23, 23)])
def test_heterogeneous_bytes(rank, exact_rank, columns, monkeypatch):
    monkeypatch.setattr(mean_kernel, "EXACT_RANK", exact_rank)
    members = clients(MIXED)
    history = rounds(hetero(rank=rank), members, held=public(), rounds=3, client_fraction=0.5, local_epochs=1)
    for number, round in enumerate(history, 1):
        drawn = round.record["clients"]
        assert len(drawn) == 2
        down = 20 * INPUTS * 4 + 4 * 20 * columns if number > 1 else 0
        expected = {str(i): {"down": down, "up": 4 * FLOATS[members[i].architecture]} for i in drawn}
        assert round.record["bytes_by_client"] == expected
        tail = round.record["server"].get("factor_tail")
        assert tail is None if number == 1 else (tail > 0) == (columns == 3)


def test_homogeneous_bytes():
    history = rounds(homo(), clients(["deep"] * 4), held=public(), rounds=3, client_fraction=0.5)
    for number, round in enumerate(history, 1):
        down = 4 * FLOATS["deep"] + (20 * INPUTS * 4 if number > 1 else 0)
        expected = {str(i): {"down": down, "up": 4 * FLOATS["deep"] + 8} for i in round.record["clients"]}
        assert round.record["bytes_by_client"] == expected


# ---- state and results  ----


@pytest.mark.slow
def test_alignment_brings_kernels_together():
    """With weight the networks end with more alike kernels than alone: mean CKA over pairs of clients."""
    held = public(60)
    members = [Client(a, samples(40, i, (i % 3, (i + 1) % 3))) for i, a in enumerate(MIXED)]

    def alike(history):
        kernels = [kernel(model_with(NETS[a], history[-1].weights[i]), held.samples.x) for i, a in enumerate(MIXED)]
        unit = [k / np.linalg.norm(k) for k in kernels]
        return np.mean([(unit[i] * unit[j]).sum() for i in range(4) for j in range(i)])

    settings = {"rounds": 8, "local_epochs": 2}
    ours = rounds(hetero(eta0=1.0, size=40, batch=40), members, held=held, **settings)
    local = rounds(Local(), members, **settings)
    assert alike(ours) > alike(local) + 0.05
    values = [round.record["sums"]["d_cka"] for round in ours[1:]]
    assert all(0 <= v <= 1 for v in values)
    assert values[-1] < values[0]
