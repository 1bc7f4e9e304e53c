"""FedHeNN's own properties; oracles use L x L kernels in float64."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyfed.core.client import Client, PublicData
from polyfed.core.message import nbytes
from polyfed.core.model_factory import ModelFactory
from polyfed.data.samples import LabeledSamples
from polyfed.errors import ConfigError
from polyfed.functional.quantization import dequantize_columns
from polyfed.methods import FedHeNN, Local
from polyfed.methods.building_blocks import kernel_alignment
from polyfed.models import zoo
from polyfed.models.split import SequentialSplit
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
    return hetero(setting="homogeneous", **hyperparameters)


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


@pytest.mark.parametrize("client_fraction", [1.0, 0.5])
def test_heterogeneous_without_weight_is_local_bit_for_bit(client_fraction):
    members = clients([*MIXED, "bn", "dropout"])
    ours = rounds(
        hetero(eta0=0.0), members, rounds=3, client_fraction=client_fraction
    )  # no hold-out rows: never touched
    local = rounds(Local(), members, rounds=3, client_fraction=client_fraction)
    for a, b in zip(ours, local, strict=True):
        assert a.record["bytes_down"] == 0
        assert "rad" not in a.before
        for i in range(len(members)):
            assert a.weights[i] is b.weights[i] is None or same(a.weights[i], b.weights[i])


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


def alignment_only(method, at, context):
    """The alignment's gradient and value; the task's is taken off by a batch of weight 0."""
    data = batch(at.data.train)
    nothing = data._replace(w=torch.zeros_like(data.w), x=data.x.to(next(at.model.parameters()).dtype))
    return method.gradients(at.model, nothing, context)


def test_homogeneous_without_weight_sends_weights_alone():
    for round in rounds(homo(eta0=0.0), clients(["deep"] * 2), rounds=3):
        assert all(message.keys() == {"model"} for message in round.down.values())


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("rows", [20, 8])
def test_homogeneous_first_step_has_no_alignment_gradient(rows, double):
    method = homo(batch=rows)
    _, at, _, context = at_step(method, clients(["deep"] * 2), double=double)
    found = alignment_only(method, at, context)
    tolerance = 1e-14 if double else 1e-6  # "exactly 0" up to rounding: the target was centered by itself
    assert abs(float(found.loss)) < tolerance
    assert max(float(g.abs().max()) for g in found.grads.values() if g is not None) < tolerance
    task = super(FedHeNN, method).gradients(at.model, batch(at.data.train), {}) if not double else None
    assert task is None or max(float(g.abs().max()) for g in task.grads.values()) > 1e-3


def test_started_at_the_target_without_a_task_the_model_stays():
    """8.8 (a): homogeneous, the task's loss switched off. The rate is small: a large one would blow up the rounding."""
    method = homo(eta0=1.0)
    _, at, _, context = at_step(method, clients(["deep"]), double=True)
    before = {n: p.detach().clone() for n, p in at.model.named_parameters()}
    for _ in range(20):
        found = alignment_only(method, at, context)
        with torch.no_grad():
            for name, p in at.model.named_parameters():
                if found.grads[name] is not None:
                    p -= 0.01 * found.grads[name]
    assert moved(before, at.model.state_dict()) < 1e-14


def test_one_client_meets_its_own_kernel():
    method = hetero()
    _, at, message, context = at_step(method, clients(["broad"]))
    assert up_to_scale(received_kernel(message), kernel(at.model, message["rad"])) < 1e-6
    assert abs(float(alignment_only(method, at, context).loss)) < 1e-6


def test_identical_clients_are_aligned():
    torch.manual_seed(2)
    model = NETS["deep"]()
    members = [Client(model, samples(12, i)) for i in range(3)]
    for number in range(3):
        method = hetero()
        _, at, _, context = at_step(method, members, number=number)
        assert abs(float(alignment_only(method, at, context).loss)) < 1e-6


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


def test_unselected_clients_count_with_their_latest_weights():
    """The first round's clients, not drawn again, are in the later K_bar as they were after that round."""
    members = clients(MIXED)
    history = rounds(hetero(), members, held=public(), rounds=3, client_fraction=0.5)
    third = history[2]
    out = set(range(4)) - set(third.record["clients"])
    latest = known_to_the_server(members, history, 3)
    assert any(i in out and i in round.up for round in history[:2] for i in range(4))
    message = third.down[third.record["clients"][0]]
    assert up_to_scale(received_kernel(message), k_bar(members, latest, message["rad"], range(4))) < 1e-6
    without = k_bar(members, latest, message["rad"], third.record["clients"])
    assert up_to_scale(received_kernel(message), without) > 1e-3


@pytest.mark.parametrize("own", [False, True])
def test_the_server_knows_the_weights_from_which_a_client_starts(own):
    torch.manual_seed(4)
    members = clients(MIXED)
    if own:
        members = [Client(NETS[c.architecture](), c.data.train) for c in members]
    fed, watch = federation(hetero(), members, held=public(), rounds=2, lr=0.0)
    fed.method.init_server(fed.server)
    initial = {i: dict(fed.server.client_weights(i)) for i in range(4)}
    for i in range(4):
        assert same(initial[i], worker(fed, i).model.state_dict())
        assert not fed.server.has_weights(i)
        if own:
            assert same(initial[i], members[i].given.state_dict())
    assert moved(initial[0], {n: t for n, t in initial[1].items() if n in initial[0]}) > 1e-3
    fed.run()
    for i in range(4):  # at rate 0 what is trained and uploaded is the start
        assert same(watch.rounds[0].trained[i], initial[i])
        assert same(watch.rounds[0].up[i]["model"], initial[i])


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
    for held, came in ((public(19), "got 19"), (None, "got 0")):
        with pytest.raises(ConfigError, match=rf"20 rows.*{came}.*data.holdout"):
            federation(hetero(), clients(MIXED), held=held)
    federation(hetero(), clients(MIXED), held=public(20))


# ---- bytes (8.11, section 2.4)  ----


@pytest.mark.parametrize(("rank", "exact_rank", "columns"), [(128, 256, 23), (3, 22, 3), (3, 23, 23)])
def test_heterogeneous_bytes(rank, exact_rank, columns, monkeypatch):
    monkeypatch.setattr(kernel_alignment, "EXACT_RANK", exact_rank)
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


class Pooled(nn.Module):
    """Mean colors of 64 parts of an image: cheap, but fed like a CIFAR network."""

    def forward(self, x):
        return F.adaptive_avg_pool2d(x, 8).flatten(1)


@pytest.mark.slow
def test_bytes_of_the_papers_sizes(monkeypatch):
    """L = 5000 CIFAR images as bytes: 15 360 000 B; a factor of rank 64: 1 280 000 B; 307 842 weights. And the page."""
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (5000, 3, 32, 32), dtype=torch.uint8, generator=g)
    held = PublicData(LabeledSamples(images, torch.zeros(5000, dtype=torch.int64)))
    builders = {
        "tiny": lambda: SequentialSplit(Pooled(), nn.Sequential(nn.Linear(192, 80), nn.Tanh()), nn.Linear(80, 10)),
        "fedhenn-cifar10": lambda: zoo.build("fedhenn-cifar10", (3, 32, 32), 10),
    }
    data = (images[:4], torch.tensor([0, 1, 2, 3]))
    hyperparameters = {"eta0": 0.01, "size": 5000, "batch": 16, "eta_schedule": "constant"}
    monkeypatch.setattr(kernel_alignment, "EXACT_RANK", 0)
    (round,) = rounds(
        FedHeNN(**nested(rank=64, **hyperparameters)), [Client("tiny", data)], builders, held=held, classes=10, rounds=1
    )
    assert (nbytes({"rad": round.down[0]["rad"]}), nbytes({"f": round.down[0]["factor"]["values"]})) == (
        15_360_000,
        1_280_000,
    )
    hyperparameters |= {"size": 20, "setting": "homogeneous"}
    (round,) = rounds(
        FedHeNN(**nested(**hyperparameters)),
        [Client("fedhenn-cifar10", data)],
        builders,
        held=held,
        classes=10,
        rounds=1,
    )
    assert nbytes(round.down[0]) == 1_231_368 + 20 * 3072
    assert nbytes(round.up[0]) == 1_231_368 + 8
    hyperparameters |= {"setting": "heterogeneous"}
    (round,) = rounds(
        FedHeNN(**nested(**hyperparameters)),
        [Client("fedhenn-cifar10", data)],
        builders,
        held=held,
        classes=10,
        rounds=1,
    )
    assert nbytes(round.up[0]) == 1_231_368

    pair = [Client("d64", data), Client("d64", data)]  # widths that add up to r = 128
    builders = {
        "d64": lambda: SequentialSplit(Pooled(), nn.Sequential(nn.Linear(192, 64), nn.Tanh()), nn.Linear(64, 10))
    }
    hyperparameters |= {"size": 5000}
    (weights,) = rounds(FedHeNN(**nested(**hyperparameters)), pair, builders, held=held, classes=10, rounds=1)
    assert nbytes(weights.down[0]) == 15_360_000 + 2_560_000
    kernels = FedHeNN(**nested(uploads="kernels", refresh=0, **hyperparameters))
    first, second = rounds(kernels, pair, builders, held=held, classes=10, rounds=2)
    assert (nbytes(first.down[0]), nbytes(first.up[0])) == (15_360_004, 1_280_004)
    assert (nbytes(second.down[0]), nbytes(second.up[0])) == (2_560_004, 1_280_004)
    page = (Path(__file__).parents[2] / "docs" / "methods" / "fedhenn.md").read_text()
    for row in (
        "| 15 360 000 + 2 560 000 |",
        "| 4 P_k | 1 231 368 |",
        "| b L r + 4 | 2 560 004 |",
        "| b L d_k + 4 | 1 280 004 |",
        "| 4 P + R | 1 231 368 + 15 360 000 |",
        "| 4 P + 8 | 1 231 376 |",
    ):
        assert row in page


# ---- state and results  ----


def test_unselected_and_lost_clients():
    history = rounds(
        hetero(),
        clients([*MIXED, "deep"]),
        held=public(),
        rounds=4,
        client_fraction=0.6,
        lose=lambda r, i: i == 0 or r == 3,
    )
    for last, round in itertools.pairwise(history):
        for i in set(range(5)) - set(round.record["clients"]):
            assert str(i) not in round.record["bytes_by_client"]
            assert round.weights[i] is last.weights[i] or same(round.weights[i], last.weights[i])
        assert all(name == "last" or name.startswith("weights ") for name in round.after), "nothing of the RAD"
        assert "weights 0" not in round.after
    assert all(same(history[2].after[n], history[2].before[n]) for n in history[2].after if n.startswith("weights"))


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
