"""FedHeNN's own properties; oracles use L x L kernels in float64. The homogeneous step is in test_conformance.py."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.core.client import Client
from polyfed.core.model_factory import ModelFactory
from polyfed.errors import RunError
from polyfed.functional.kernel_similarity import kernel_distance
from polyfed.methods import FedHeNN, HomogeneousFedHeNN, Local
from polyfed.methods.building_blocks import kernel_alignment
from polyfed.models.split import SequentialSplit
from polyfed.testing import ChangedValue, Reduction
from polyfed.validation.settings import flat_fields
from tests.helpers import oracles
from tests.helpers.quick import others_slow
from tests.helpers.toys import (
    INPUTS,
    NETS,
    batch,
    clients,
    federation,
    model_with,
    public,
    rounds,
    same,
    samples,
    worker,
)

MIXED = ["shallow", "deep", "wide", "broad"]  # widths of their representations: 5, 5, 5, 8
ROW = INPUTS * 4  # bytes of one input
FLOATS = {name: sum(t.numel() for t in net().state_dict().values()) for name, net in NETS.items() if "-" not in name}

TABLE_OF = {inner: table for table, _, inner in (name.partition(".") for name in flat_fields(FedHeNN)) if inner}


def nested(**flat):
    """What `FedHeNN` takes: settings of its tables in a mapping each, the others as they are."""
    found = {}
    for name, value in flat.items():
        if name in TABLE_OF:
            found.setdefault(TABLE_OF[name], {})[name] = value
        else:
            found[name] = value
    return found


def hetero(kind=FedHeNN, **hyperparameters):
    return kind(**nested(**{"eta0": 0.5, "size": 20, "batch": 20, **hyperparameters}))


homo = functools.partial(hetero, HomogeneousFedHeNN)
steady = functools.partial(hetero, eta_schedule="constant")
steady_homo = functools.partial(homo, eta_schedule="constant")


def represented(model, x):
    return copy.deepcopy(model).double().eval().represent(x.double()).detach().numpy()


def kernel(model, x):
    """H K H in float64, from the definition."""
    a = represented(model, x)
    h = np.eye(len(a)) - 1 / len(a)
    return h @ a @ a.T @ h


def up_to_scale(a, b):
    """Distance of two matrices once both are of norm 1."""
    return np.abs(a / np.linalg.norm(a) - b / np.linalg.norm(b)).max()


def k_bar(fed_clients, weights, x, members, norm="none"):
    kernels = [kernel(model_with(NETS[fed_clients[j].architecture], weights[j]), x) for j in members]
    return np.mean([k / np.linalg.norm(k) if norm == "fro" else k for k in kernels], axis=0)


def received_kernel(message):
    f = message["factor"].double().numpy()
    return f @ f.T


def received(method, members, *, round=2, number=0, step=0):
    """A client that has received its message in `round`, the message, and the context of one step."""
    fed, _ = federation(method, members, held=public())
    method.init_server(fed.server)
    fed.server.round = round
    method.start_round(fed.server, [client.id for client in fed.clients])
    message = method.broadcast(fed.server, number)
    at = worker(fed, number, round)
    at.context = method.receive(at, message)
    return fed, at, message, {**at.context, **method.step_inputs(at, step, torch.Generator().manual_seed(step))}


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


def hand_gradient(model, data, x, target, weight):
    """Autograd of CE + weight (1 - CKA) with the L x L definition, in float64."""
    model = copy.deepcopy(model).double().train()
    loss = F.cross_entropy(model(data.x.double()), data.y)
    if weight:
        a = model.eval().represent(x.double())
        h = torch.eye(len(a), dtype=torch.float64) - 1 / len(a)
        k, m = a @ a.T, torch.as_tensor(target)

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
        fed, at, message, context = received(method, members, round=5, number=2, step=step)
        target = k_bar(fed.clients, [fed.server.client_weights(i) for i in range(4)], message["rad"], range(4), norm)
        on = step % every == 0
        assert ("rad_x" in context) == on
        x, chosen = message["rad"], torch.arange(20)
        if on and rows < 20:
            chosen = torch.randperm(20, generator=torch.Generator().manual_seed(step))[:rows]
            assert torch.equal(context["rad_x"], x[chosen])
        weight = every * 0.5 * math.sqrt(4) if on else 0.0
        data = batch(at.data.train)
        expected, loss = hand_gradient(at.model, data, x[chosen], target[np.ix_(chosen, chosen)], weight)
        found = method.gradients(at.model, data, context)
        assert float(found.loss) == pytest.approx(loss, abs=1e-5)
        for name, gradient in found.grads.items():
            torch.testing.assert_close(gradient.double(), expected[name], atol=5e-6, rtol=0)


def test_the_pass_over_the_rad_is_in_eval_mode_and_leaves_statistics_alone():
    method = hetero()
    _, at, _, context = received(method, clients(["dropout"] * 2, 12), number=1)
    alone = copy.deepcopy(at.model)
    torch.manual_seed(0)
    method.gradients(at.model, batch(at.data.train), context)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    method.gradients(alone, batch(at.data.train), {})
    assert same(at.model.state_dict(), alone.state_dict())
    assert torch.equal(state, torch.get_rng_state()), "dropout is off in the pass over the RAD"
    assert all(m.training for m in at.model.modules())


def known_to_the_server(members, history, upto, seed=0):
    """Everybody's latest weights before round `upto`: the last upload that arrived, else the seeded start."""
    start = ModelFactory(NETS, Local().build, seed, torch.device("cpu"))
    latest = {i: start.initial_state(c.architecture, owner=i) for i, c in enumerate(members)}
    for round in history[: upto - 1]:
        refused = {entry["client"] for entry in round.record["refused"]}
        latest |= {i: m["model"] for i, m in round.up.items() if i not in refused}
    return latest


@pytest.mark.parametrize("norm", ["none", "fro"])
@pytest.mark.parametrize(
    ("control", "pool"),
    others_slow(
        [("none", "all"), ("none", "seen"), ("own", "all"), ("own", "seen")],
        quick=[("none", "seen"), ("own", "seen")],
    ),
)
def test_kernel_alignment_of_each_pool(control, pool, norm):
    """With the control "own" to the client's own kernel, where the pool has it."""
    members = clients([*MIXED, "deep"])
    method = hetero(control=control, pool=pool, norm=norm)
    history = rounds(method, members, held=public(), rounds=4, client_fraction=0.4, lose=lambda r, i: r == 1 and i == 3)
    seen = set()
    checked = 0
    for number, round in enumerate(history, 1):
        latest = known_to_the_server(members, history, number)
        for i in round.record["clients"]:
            who = {"all": set(range(5)), "seen": seen}[pool]
            if control == "own":
                who = who & {i}
            if number == 1 or not who:
                assert not round.down[i]
                continue
            expected = k_bar(members, latest, round.down[i]["rad"], sorted(who), norm)
            assert up_to_scale(received_kernel(round.down[i]), expected) < 1e-6
            assert round.down[i]["factor"].shape[1] == sum(8 if members[j].architecture == "broad" else 5 for j in who)
            checked += 1
        refused = {entry["client"] for entry in round.record["refused"]}
        seen |= set(round.record["clients"]) - refused
        assert not any(name.startswith("factor") for name in round.after)
    assert checked >= (2 if (control, pool) == ("own", "seen") else 4)
    assert len(seen) < 5 or pool != "seen", "choose another seed: somebody should stay unseen for long"


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


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("form", others_slow([steady, steady_homo], quick=[steady]))
def test_how_inputs_are_sent_changes_bytes_alone(form, fixed):
    """A fixed RAD is sent in the first round alone; its number of four bytes is sent in all."""
    members = clients(["deep"] * 3)
    reference = rounds(form(fixed=fixed), members, held=public(), rounds=3)
    other = rounds(form(fixed=fixed, transport="indices"), members, held=public(), rounds=3)
    for number, (a, b) in enumerate(zip(reference, other, strict=True)):
        assert all(same(a.weights[i], b.weights[i]) for i in range(3))
        is_sent = number == 0 or not fixed
        assert a.record["bytes_down"] - b.record["bytes_down"] == (3 * 20 * (ROW - 4) if is_sent else 0)
        assert all(("rad" in message) == is_sent for message in a.down.values())
        assert all(("rad_draw" in message) == fixed for message in a.down.values())
        assert torch.equal(a.before["rad"], reference[0].before["rad"]) == (fixed or number == 0)
        assert ("rad" in a.after) == fixed


def test_final_average_is_of_everybodys_latest_weights():
    sizes = [4, 8, 12, 16, 20]
    members = clients(["deep"] * 5, sizes)
    method = steady_homo(final_average=True)
    history = rounds(method, members, held=public(), rounds=2, client_fraction=0.4)
    *before, last = history
    assert [r.record["final_round"] for r in history] == [False, False, True]
    assert len(before) == 2
    trained = before[-1].weights
    w_hat = before[-1].after["model deep"]
    never = [i for i in range(5) if trained[i] is None]
    assert never
    for name, value in last.after["model deep"].items():
        given = [(w_hat if trained[i] is None else trained[i])[name].double() for i in range(5)]
        expected = sum(n * t for n, t in zip(sizes, given, strict=True)) / sum(sizes)
        torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=0)
    spent = {int(i): v for i, v in last.record["bytes_by_client"].items()}
    assert spent == {i: {"down": 0, "up": 8 + (0 if i in never else 4 * FLOATS["deep"])} for i in range(5)}
    assert all(last.weights[i] is None for i in never)
    assert all(same(last.weights[i], trained[i]) for i in set(range(5)) - set(never))
    assert "rad" not in last.after


def test_the_rad_is_the_same_for_all_and_drawn_anew_without_replacement():
    held = public(40)
    rads = []
    for round in rounds(hetero(), clients(MIXED), held=held, rounds=4)[1:]:
        rad = round.down[0]["rad"]
        assert all(torch.equal(message["rad"], rad) for message in round.down.values())
        rads.append({int((held.samples.x == row).all(1).nonzero()) for row in rad})
        assert len(rads[-1]) == 20
    assert rads[0] != rads[1] != rads[2]


@pytest.mark.parametrize("similarity", ["rbf", "procrustes"])
@pytest.mark.parametrize("chunk", [256, 7])
def test_other_distances_of_equal_networks_also_in_chunks(similarity, chunk, monkeypatch):
    monkeypatch.setattr(kernel_alignment, "ROWS_AT_ONCE", chunk)
    method = steady_homo(similarity=similarity)
    _, at, message, context = received(method, clients(["deep"] * 2))
    target, data = represented(at.model, message["rad"]), batch(at.data.train)
    with torch.no_grad():
        for i, p in enumerate(at.model.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), alpha=0.3)
    z = at.model.double().eval().represent(message["rad"].double())
    expected = kernel_distance(similarity, z, torch.from_numpy(target), factor=False, width=0.5)
    names, parameters = zip(*at.model.named_parameters(), strict=True)
    slopes = dict(zip(names, torch.autograd.grad(expected, parameters, allow_unused=True), strict=True))
    at.model.float().train()
    found, plain = (method.gradients(at.model, data, given) for given in (context, {}))
    assert float(found.sums["d_cka"]) == pytest.approx(float(expected.detach()), abs=1e-5)
    assert float(found.loss - plain.loss) == pytest.approx(0.5 * float(expected.detach()), abs=1e-5)
    for name, slope in slopes.items():
        pull = 0 if slope is None else 0.5 * slope.float()
        torch.testing.assert_close(found.grads[name], plain.grads[name] + pull, atol=1e-5, rtol=1e-4)


def test_factors_and_kernels_are_metered():
    history = rounds(steady(), clients(MIXED), held=public())
    assert history[1].record["bytes_by_client"]["0"]["down"] == 20 * ROW + 4 * 20 * 23
    (round,) = rounds(steady(uploads="kernels", fixed=True), clients(MIXED), held=public(), rounds=1)
    assert round.record["bytes_by_client"]["0"]["up"] == 4 * 20 * 5 + 4


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"expected alignment_data\.fixed = true, got false"):
        FedHeNN(uploads="kernels")
    _, at, message, _ = received(steady(uploads="kernels", fixed=True), clients(MIXED), round=1)
    for bad in (torch.tensor([3, 40]), torch.tensor([-1, 2]), torch.tensor([], dtype=torch.int64)):
        with pytest.raises(RunError, match="rows below 40"):
            steady(transport="indices").receive(at, {"rad_rows": bad})
    for shape, kind, given in (((20, 5), torch.float32, r"\(5,\) float32"), ((20, 4), torch.uint8, r"\(4,\) uint8")):
        with pytest.raises(RunError, match=r"inputs \(4,\) float32, got " + given):
            steady().receive(at, {"rad": torch.zeros(shape, dtype=kind)})
    with pytest.raises(RunError, match=r"expected a factor of 20 rows, got shape \(7, 3\)"):
        steady().receive(at, {"rad": message["rad"], "factor": torch.ones(7, 3)})
    at.state = {}
    with pytest.raises(RunError, match="expected a client that holds the RAD"):
        steady(fixed=True).receive(at, {"rad_draw": message["rad_draw"]})


def test_an_infinite_kernel_of_finite_weights_is_left_out():
    unbounded = SequentialSplit(nn.Linear(INPUTS, 4), nn.Linear(4, 5), nn.Linear(5, 3))
    fed, _ = federation(steady(), [Client(unbounded, samples(9, 0)), *clients(MIXED)[1:]], held=public())
    fed.server.round = 2
    fed.server.store_weights(0, {n: torch.full_like(t, 1e25) for n, t in fed.server.client_weights(0).items()})
    fed.method.start_round(fed.server, [1])
    assert fed.server.log["kernels_left_out"] == 1
    assert fed.method.broadcast(fed.server, 1)["factor"].shape == (20, 5 + 5 + 8)


def test_only_who_acknowledges_the_inputs_holds_them():
    """Client 0's upload is late: it is of a round without them."""
    fed, _ = federation(steady(fixed=True), clients(MIXED), held=public())
    fed.server.round = 3
    fed.method.start_round(fed.server, [0, 1, 2])
    fed.method.aggregate(fed.server, {0: {}, 1: {"rad_draw": torch.tensor(3, dtype=torch.int32)}})
    fed.server.round = 4
    fed.method.start_round(fed.server, [0, 1, 2])
    assert ["rad" in fed.method.broadcast(fed.server, i) for i in range(3)] == [True, False, True]


def fedhenn_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """Down L s + 4 L r, up 4 P: L = 16 rows of 36 floats; r = 2 (6 + 5 + 7), the widths of all six clients."""
    return 16 * 36 * 4 + 4 * 16 * 36, 4 * oracles.numbers(server, client_id)


def constant(kernel: dict[str, Any], **options: Any) -> methods.FedHeNN:
    return methods.FedHeNN(eta0=0.5, eta_schedule="constant", kernel=kernel, **options)


test_conformance = testing.conformance(
    methods.FedHeNN(alignment_data={"size": 16, "batch": 8}, eta0=0.5),
    reference_loss=oracles.alignment,
    expected_bytes=fedhenn_bytes,
    reductions=[
        Reduction({"eta0": 0.0}, methods.Local()),
        Reduction(
            constant({}, alignment_data=oracles.FIXED, uploads="kernels"),
            constant({"pool": "seen"}, alignment_data=oracles.FIXED),
        ),
    ],
    changed_values={
        "kernel.similarity": "rbf",
        "kernel.width": ChangedValue(2.0, {"kernel.similarity": "rbf"}),
        "alignment_data.fixed": ChangedValue(True, {"eta_schedule": "constant"}),
        "uploads": ChangedValue("kernels", {"alignment_data.fixed": True}),
    },
    no_effect={"kernel.rank": "with few features in all the factor is exact"},
)

test_other_settings = oracles.other_settings(
    (
        constant(
            {"similarity": "rbf"},
            uploads="kernels",
            alignment_data={**oracles.FIXED, "transport": "indices"},
        ),
        {},
    ),
    (constant({"control": "own", "norm": "fro"}, alignment_data={"size": 16, "batch": 8}), {}),
    (constant({"control": "permuted"}, uploads="kernels", alignment_data=oracles.FIXED), {}),
)
