"""FedHeNN, less usual forms: other similarities, sources and transports of the RAD, kernel uploads, final rounds."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.core.client import Client, PublicData
from polyfed.data.samples import LabeledSamples
from polyfed.errors import ConfigError, RunError
from polyfed.functional.compression import dequantize_columns
from polyfed.methods import FedHeNN, HomogeneousFedHeNN, fedhenn
from polyfed.methods.building_blocks import mean_kernel
from polyfed.models.split import SequentialSplit
from polyfed.testing.fixtures import TIMES
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
    worker,
)

MIXED = ["shallow", "deep", "wide", "broad"]  # widths of their representations: 5, 5, 5, 8
FLOATS = {name: sum(t.numel() for t in net().state_dict().values()) for name, net in NETS.items() if "-" not in name}
ROW = INPUTS * 4  # bytes of one input


def hetero(**hyperparameters):
    usual = {"eta0": 0.5, "size": 20, "batch": 20, "eta_schedule": "constant"}
    return FedHeNN(**nested(**{**usual, **hyperparameters}))


def homo(**hyperparameters):
    usual = {"eta0": 0.5, "size": 20, "batch": 20, "eta_schedule": "constant"}
    return HomogeneousFedHeNN(**nested(**{**usual, **hyperparameters}))


def received(method, members, *, round=2, number=0, step=0, held=None):
    """A client that has received its message in `round`, the message, and the context of one step."""
    fed, _ = federation(method, members, held=public() if held is None else held)
    method.init_server(fed.server)
    fed.server.round = round
    method.start_round(fed.server, [client.id for client in fed.clients])
    message = method.broadcast(fed.server, number)
    at = worker(fed, number, round)
    at.context = method.receive(at, message)
    return fed, at, message, {**at.context, **method.step_inputs(at, step, torch.Generator().manual_seed(step))}


def shaken(model):
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), alpha=0.3)


# ---- similarities ----


def rbf(a, factor=0.5):
    """Centered RBF kernel in float64 with the median rule; the lower of two middle distances."""
    d = np.linalg.norm(a[:, None] - a[None], axis=2)
    pairs = np.sort(d[np.triu_indices(len(a), 1)])
    s = factor * pairs[(len(pairs) - 1) // 2]
    h = np.eye(len(a)) - 1 / len(a)
    return h @ np.exp(-(d**2) / (2 * s**2)) @ h


def cka(k, m):
    return (k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum())


def represented(model, x):
    return copy.deepcopy(model).double().eval().represent(x.double()).detach().numpy()


@pytest.mark.parametrize("width", [0.5, 2.0])
def test_rbf_kernels_are_averaged_and_aligned(width):
    """All 20 rows are landmarks, so that the factor is exact: K_bar is the mean of four RBF kernels."""
    method = hetero(similarity="rbf", width=width)
    fed, at, message, context = received(method, clients(MIXED), number=2)
    models = [model_with(NETS[c.architecture], fed.server.client_weights(c.id)) for c in fed.clients]
    k_bar = np.mean([rbf(represented(m, message["rad"]), width) for m in models], axis=0)
    f = dequantize_columns(message["factor"]).double().numpy()
    assert np.abs(f @ f.T / np.linalg.norm(f @ f.T) - k_bar / np.linalg.norm(k_bar)).max() < 1e-5
    data = batch(at.data.train)
    loss = float(method.gradients(at.model, data, context).loss)
    plain = float(method.gradients(at.model, data, {}).loss)
    expected = 0.5 * (1 - cka(rbf(represented(at.model, message["rad"]), width), k_bar))
    assert loss - plain == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("similarity", ["linear", "rbf", "procrustes"])
def test_homogeneous_distances(similarity):
    method = homo(similarity=similarity)
    _, at, message, context = received(method, clients(["deep"] * 2))
    target = represented(at.model, message["rad"])
    data = batch(at.data.train)
    start = float(method.gradients(at.model, data, context).loss - method.gradients(at.model, data, {}).loss)
    assert abs(start) < 1e-6
    shaken(at.model)
    moved_ = represented(at.model, message["rad"])
    a, m = (z - z.mean(axis=0) for z in (moved_, target))
    nuclear = np.linalg.svd(m.T @ a, compute_uv=False).sum() / np.linalg.norm(a) / np.linalg.norm(m)
    expected = {
        "linear": 1 - cka(a @ a.T, m @ m.T),
        "rbf": 1 - cka(rbf(moved_), rbf(target)),
        "procrustes": 2 - 2 * nuclear,
    }[similarity]
    found = method.gradients(at.model, data, context)
    plain = method.gradients(at.model, data, {})
    assert float(found.loss - plain.loss) == pytest.approx(0.5 * expected, abs=1e-5)
    assert expected > 0.01
    assert max(float((found.grads[n] - g).abs().max()) for n, g in plain.grads.items() if g is not None) > 1e-3


@pytest.mark.parametrize(
    ("hyperparameters", "text"),
    [
        ({"uploads": "kernels"}, r"expected alignment_data\.refresh 0"),
        ({"uploads": "kernels", "refresh": 3}, "got 3"),
    ],
)
def test_combinations_that_cannot_be(hyperparameters, text):
    with pytest.raises(ValueError, match=text):
        FedHeNN(**nested(**hyperparameters))


# ---- where the RAD comes from, and how it travels ----


@pytest.mark.parametrize("form", others_slow([hetero, homo], quick=[hetero]))
@pytest.mark.parametrize("refresh", others_slow([1, 2, 0], quick=[2]))
def test_transports_are_alike_but_for_bytes(form, refresh):
    members = clients(["deep"] * 3)
    reference = rounds(form(refresh=refresh), members, held=public(), rounds=3)
    for transport in ("indices", "seed"):
        other = rounds(form(refresh=refresh, transport=transport), members, held=public(), rounds=3)
        for number, (a, b) in enumerate(zip(reference, other, strict=True)):
            assert all(same(a.weights[i], b.weights[i]) for i in range(3))
            sent = number == 0 or (refresh and number % refresh == 0)
            saved = 20 * ROW - {"indices": 4 * 20, "seed": 8}[transport] if sent else 0
            assert a.record["bytes_down"] - b.record["bytes_down"] == 3 * saved


# ---- how long it stays ----


@pytest.mark.parametrize("refresh", others_slow([1, 2, 3, 0], quick=[2, 0]))
def test_refresh(refresh):
    history = rounds(hetero(refresh=refresh), clients(MIXED), held=public(), rounds=5)
    rads = [round.before["rad"] for round in history]
    for number in range(1, 5):
        fresh = bool(refresh) and number % refresh == 0
        assert torch.equal(rads[number], rads[number - 1]) != fresh
        down = 4 * 20 * 23 + (20 * ROW if fresh else 0) + (0 if refresh == 1 else 4)
        assert history[number].record["bytes_down"] == 4 * down
        assert ("rad" in history[number].after) == (refresh != 1)


def test_who_missed_the_rad_is_sent_it():
    history = rounds(
        hetero(refresh=0), clients(MIXED * 2), held=public(), rounds=6, client_fraction=0.5, lose=lambda r, i: i == 1
    )
    holds = set()
    for round in history:
        for i, message in round.down.items():
            assert ("rad" in message) == (i not in holds)
        holds |= set(round.down) - {1}
    assert len(holds) > 4


@pytest.mark.parametrize("refresh", others_slow([0, 1], quick=[0]))
def test_only_who_trained_represents_a_fixed_rad_again(refresh, monkeypatch):
    """8 clients in the first mean kernel, then the 4 of the last round; and the same bits without any memory."""

    def run():
        count = 0
        whole = mean_kernel.public_outputs

        def counted(server, models, *args):
            nonlocal count
            count += len(models)
            return whole(server, models, *args)

        with monkeypatch.context() as patch:
            patch.setattr(mean_kernel, "public_outputs", counted)
            history = rounds(hetero(refresh=refresh), clients(MIXED * 2), held=public(), rounds=4, client_fraction=0.5)
        return count, [{**round.record, **dict.fromkeys(TIMES, 0)} for round in history]

    count, records = run()
    assert count == (8 * 4 if refresh else 8 + 3 * 4)
    monkeypatch.setattr(mean_kernel, "REMEMBERED_BYTES", 0)
    again, plain = run()
    assert again == 8 * 4
    assert plain == records


@pytest.mark.parametrize("bad", [torch.tensor([3, 40]), torch.tensor([-1, 2]), torch.tensor([], dtype=torch.int64)])
def test_rows_that_nobody_has_are_refused(bad):
    _, at, _, _ = received(hetero(transport="indices"), clients(MIXED))
    with pytest.raises(RunError, match="rows below 40"):
        hetero(transport="indices").receive(at, {"rad_rows": bad})
    for other, given in (
        (torch.zeros(20, 5), r"\(5,\) float32"),
        (torch.zeros(20, 4, dtype=torch.uint8), r"\(4,\) uint8"),
    ):
        with pytest.raises(RunError, match=r"inputs \(4,\) float32, got " + given):
            hetero().receive(at, {"rad": other})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("client", r"one shape and type; client 2 has \(5,\) float32, client 0 \(4,\) float32"),
        ("public", r"what everybody may see has \(4,\) float64, client 0 \(4,\) float32"),
    ],
)
def test_inputs_that_cannot_be_a_rad_are_refused_before_round_1(change, text):
    members, held = clients(["deep"] * 3), public()
    if change == "client":
        long = LabeledSamples(torch.zeros(12, 5), members[2].data.train.y)
        members[2] = Client("deep", long, prepare=lambda x: x[:, :INPUTS])
    if change == "public":
        held = PublicData(LabeledSamples(held.samples.x.double(), held.samples.y))
    with pytest.raises(ConfigError, match=text):
        federation(hetero(), members, held=held)
    federation(hetero(eta0=0.0), members, held=held)


@pytest.mark.parametrize("pool", ["seen", "selected"])
def test_no_rad_without_a_kernel_to_be_aligned_to(pool):
    """Before anybody has answered there is no K_bar: weights need no RAD then, uploads of kernels do."""
    for uploads, names in (("weights", set()), ("kernels", {"rad", "rad_draw"})):
        history = rounds(hetero(pool=pool, uploads=uploads, refresh=0), clients(MIXED), held=public())
        assert all(set(message) == names for message in history[0].down.values())
        assert all("factor" in message for message in history[1].down.values())
        assert all(("rad" in message) == (uploads == "weights") for message in history[1].down.values())


# ---- kernel uploads ----


@pytest.mark.parametrize("similarity", ["linear", "rbf"])
def test_the_server_of_kernel_uploads_opens_no_model(monkeypatch, similarity):
    from polyfed.core.server import Server

    def closed(*args, **kwargs):
        raise AssertionError("the server asked for weights")

    for name in ("model", "client_weights", "initial_state", "store_weights", "architectures"):
        monkeypatch.setattr(Server, name, property(closed) if name == "architectures" else closed)
    method = hetero(uploads="kernels", refresh=0, similarity=similarity)
    history = rounds(method, clients(MIXED), held=public(), rounds=3)
    assert history[-1].record["sums"]["d_cka"] > 0


def test_an_uploaded_kernel_is_of_the_trained_model_on_the_rad():
    (round,) = rounds(hetero(uploads="kernels", refresh=0), clients(MIXED), held=public(), rounds=1)
    for i in range(4):
        expected = model_with(NETS[MIXED[i]], round.weights[i]).represent(round.before["rad"])
        assert torch.equal(dequantize_columns(round.up[i]["kernel"]), expected.detach())


def test_a_kernel_of_other_rows_is_refused():
    fed, _, _, _ = received(hetero(uploads="kernels", refresh=0), clients(MIXED), round=1)
    with pytest.raises(RunError, match="expected 20 rows in the kernel of client 2, got 7"):
        fed.method.aggregate(fed.server, {2: {"kernel": {"values": torch.ones(7, 5)}}})


def linear_client(scale, n=4):
    """Without a bounded layer, on inputs of 0: its first loss is finite whatever the scale of its weights."""
    model = SequentialSplit(nn.Linear(INPUTS, 4), nn.Linear(4, 5), nn.Linear(5, 3))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(0.0 if name.endswith("bias") else 0.1 if name.startswith("head") else scale)
    return Client(model, (torch.zeros(n, INPUTS), torch.arange(n) % 3))


@pytest.mark.parametrize("similarity", ["linear", "rbf"])
def test_an_infinite_kernel_of_finite_weights_is_left_out(similarity):
    members = [linear_client(1e25), *clients(MIXED)]
    fed, _ = federation(hetero(similarity=similarity), members, held=public())
    fed.server.round = 2
    fed.method.start_round(fed.server, [1])
    assert fed.server.log["kernels_left_out"] == 1
    without, _ = federation(hetero(similarity=similarity, pool="seen"), members, held=public())
    without.server.round = 2
    for i in range(1, 5):
        without.server.store_weights(i, without.server.client_weights(i))
    without.method.start_round(without.server, [1])
    assert "kernels_left_out" not in without.server.log
    found, expected = (f.method.broadcast(f.server, 1)["factor"] for f in (fed, without))
    assert same(found, expected)


# ---- what counts, and in which precision ----


@pytest.mark.parametrize(
    ("precision", "factor", "kernel"),
    [
        ("float32", 4 * 20 * 23, 4 * 20 * 5),
        pytest.param("float16", 2 * 20 * 23 + 4, 2 * 20 * 5 + 4, marks=pytest.mark.slow),
        ("int8", 20 * 23 + 4 * 23, 20 * 5 + 4 * 5),
    ],
)
def test_precision_is_metered_and_near(precision, factor, kernel):
    exact = rounds(hetero(), clients(MIXED), held=public(), rounds=2)
    history = rounds(hetero(precision=precision), clients(MIXED), held=public(), rounds=2)
    assert history[1].record["bytes_by_client"]["0"]["down"] == 20 * ROW + factor
    assert moved(history[1].weights[0], exact[1].weights[0]) < (0 if precision == "float32" else 1e-2) + 1e-12
    assert (moved(history[1].weights[0], exact[1].weights[0]) > 0) == (precision != "float32")
    method = hetero(precision=precision, uploads="kernels", refresh=0)
    (round,) = rounds(method, clients(MIXED), held=public(), rounds=1)
    assert round.record["bytes_by_client"]["0"]["up"] == kernel + 4


# ---- the gradient in chunks ----


@pytest.mark.parametrize("similarity", ["linear", "rbf", "procrustes"])
@pytest.mark.parametrize("architecture", others_slow(["deep", "bn", "dropout"], quick=["bn"]))
@pytest.mark.parametrize("chunk", [1, 7, 19])
def test_chunks_change_nothing(similarity, architecture, chunk, monkeypatch):
    method = homo(similarity=similarity)
    _, at, _, context = received(method, clients([architecture] * 2))
    shaken(at.model)
    data = batch(at.data.train)
    found = []
    for at_once in (fedhenn.ROWS_AT_ONCE, chunk):
        monkeypatch.setattr(fedhenn, "ROWS_AT_ONCE", at_once)
        torch.manual_seed(0)
        before = copy.deepcopy(at.model.state_dict())
        found.append(method.gradients(at.model.train(), data, context))
        at.model.load_state_dict(before)
    a, b = found
    assert float(a.loss) == pytest.approx(float(b.loss), abs=1e-6)
    assert float(a.sums["d_cka"]) == pytest.approx(float(b.sums["d_cka"]), abs=1e-6)
    for name, gradient in a.grads.items():
        torch.testing.assert_close(b.grads[name], gradient, atol=2e-6, rtol=1e-4)


# ---- after the last round ----


def test_final_average_is_of_everybodys_latest_weights():
    sizes = [4, 8, 12, 16, 20]
    members = clients(["deep"] * 5, sizes)
    method = homo(final_average=True)
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


# ---- who comes, who is late ----


def test_only_who_answers_with_the_present_draw_holds_it():
    """Client 0's upload is late: it was made with the draw before."""
    fed, _ = federation(hetero(refresh=2), clients(MIXED), held=public())
    fed.server.round = 3
    fed.method.start_round(fed.server, [0, 1, 2])
    fed.method.aggregate(
        fed.server, {0: {"rad_draw": torch.tensor(1)}, 1: {"rad_draw": torch.tensor(3, dtype=torch.int32)}, 2: {}}
    )
    fed.server.round = 4
    fed.method.start_round(fed.server, [0, 1, 2])
    assert ["rad" in fed.method.broadcast(fed.server, i) for i in range(3)] == [True, False, True]
