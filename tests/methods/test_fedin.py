"""FedIN's own properties; oracles take gradients by hand and mix them in NumPy."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.core.method import TrainingResult
from polyfed.core.randomness import generator
from polyfed.functional.feature_pooling import random_orthogonal
from polyfed.functional.modes import eval_mode
from polyfed.methods import FedIN
from polyfed.methods.fedin import cosine
from polyfed.testing import ChangedValue, Reduction
from polyfed.testing.fixtures import SIZES
from tests.helpers import oracles
from tests.helpers.toys import (
    NETS,
    batch,
    clients,
    federation,
    model_with,
    moved,
    net,
    rounds,
    same,
    worker,
)


def test_pairs_are_the_senders_own_rows_after_training_in_eval_mode():
    members = clients(["bn", "deep-bn", "bn"])
    (round,) = rounds(FedIN(), members, rounds=1, local_epochs=2)
    drawn = []
    for i, client in enumerate(members):
        model = model_with(NETS[client.architecture], round.trained[i])
        s_in = model.extract(client.data.train.x).detach()
        sent = round.up[i]["features"]
        rows = [int((s_in - row).abs().sum(1).argmin()) for row in sent["s_in"]]
        assert len(set(rows)) == 4
        torch.testing.assert_close(sent["s_in"], s_in[rows], atol=1e-6, rtol=0)
        torch.testing.assert_close(sent["s_out"], model.transform(s_in[rows]).detach(), atol=1e-6, rtol=0)
        drawn.append(rows)
    assert drawn != [[0, 1, 2, 3]] * 3


def pairs(rows=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {"s_in": torch.randn(rows, 6, generator=g), "s_out": torch.tanh(torch.randn(rows, 5, generator=g))}


def at_step(method, architecture="deep", context=None):
    """A client at work away from its received weights, and the context of a step with pairs."""
    fed, _ = federation(method, clients([architecture] * 2))
    method.init_server(fed.server)
    at = worker(fed, 0, round=2)
    received = method.receive(at, method.broadcast(fed.server, 0))
    with torch.no_grad():
        for i, p in enumerate(at.model.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), alpha=0.2)
    return at, {**received, **(pairs() if context is None else context)}


def grads(loss, model):
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, tuple(named.values()), allow_unused=True)
    return {n: None if g is None else g.double().numpy() for n, g in zip(named, found, strict=True)}


def oracle(x, y, mode):
    """Z of G_local and G_IN."""
    a, b = (x * x).sum(), (x * y).sum()
    z = y if b >= 0 or a == 0 else y - b / a * x
    return {"simple": y + x / 2, "project": x + z, "none": x + y}[mode]


@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize("mode", ["simple", "project", "none"])
def test_combined_gradients(mode, mu):
    method = FedIN(combine=mode, mu=mu)
    at, context = at_step(method)
    model, data = at.model, batch(at.data.train)
    local = F.cross_entropy(model(data.x), data.y)
    if mu:
        local = local + mu / 2 * sum((p - context["received"][n]).square().sum() for n, p in model.named_parameters())
    g = grads(local, model)
    h = grads(((model.transform(context["s_in"]) - context["s_out"]) ** 2).mean(), model)
    assert {n for n in h if h[n] is not None} == {n for n in h if n.startswith("intermediate")}
    found = method.gradients(model, data, context)
    inner = [n for n in g if n.startswith("intermediate")]
    expected = {n: oracle(g[n], h[n], mode) for n in inner}
    for name in g:
        np.testing.assert_allclose(found.grads[name].numpy(), expected.get(name, g[name]), atol=1e-6)
    dots = [(g[n] * h[n]).sum() for n in inner]
    assert min(dots) < 0 < max(dots), "both signs of b should occur"
    assert float(found.loss) == pytest.approx(float(local.detach()), abs=1e-6)
    assert float(found.sums["loss_in"]) == pytest.approx(
        float(((model.transform(context["s_in"]) - context["s_out"]) ** 2).mean().detach()), abs=1e-6
    )


def test_gradients_of_zero_tiny_ones_and_half_precision():
    zero, one = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    assert cosine(zero, one) == cosine(one, zero) == 0
    tiny = {"w": 1e-25 * torch.tensor([1.0, 2.0, -2.0])}
    assert cosine(tiny, tiny) == pytest.approx(1, abs=1e-6)
    turned = {"w": torch.tensor([2.0, 1.0, 2.0])}
    assert cosine(turned, {"w": torch.tensor([-1.0, 0.0, 0.0])}) == pytest.approx(-2 / 3)
    for mode in ("simple", "project", "none"):
        direction = FedIN(combine=mode).direction
        assert direction(zero["w"], zero["w"]).eq(0).all()
        assert direction(zero["w"], one["w"]).eq(1).all()
    g_local, g_in = torch.full((100_000,), 2.0).half(), torch.full((100_000,), -1.0).half()
    both = FedIN(combine="project").direction(g_local, g_in)  # a = 400000 overflows float16
    assert both.dtype == torch.float16
    assert torch.equal(both, g_local)
    assert torch.equal(FedIN(combine="project").direction(-g_local, -g_in), -g_local)


@pytest.mark.parametrize("architecture", ["bn", "deep-bn"])
def test_batchnorm_normalizes_the_pairs_by_themselves_and_keeps_its_statistics(architecture):
    method = FedIN(mu=0.0)
    at, context = at_step(method, architecture, pairs(rows=9))
    alone, by_hand = copy.deepcopy(at.model), copy.deepcopy(at.model).train()
    data = batch(at.data.train)
    found = method.gradients(at.model, data, context)
    method.gradients(alone, data, {})
    assert same(at.model.state_dict(), alone.state_dict()), "the IN pass left a trace in the running statistics"
    expected = ((by_hand.transform(context["s_in"]) - context["s_out"]) ** 2).mean().detach()
    assert float(found.sums["loss_in"]) == pytest.approx(float(expected), abs=1e-6)
    with eval_mode(alone):
        in_eval = ((alone.transform(context["s_in"]) - context["s_out"]) ** 2).mean()
    assert abs(float(expected - in_eval.detach())) > 1e-3
    before = {n: t.clone() for n, t in at.model.state_dict().items()}
    method.upload(at, TrainingResult())
    assert same(before, at.model.state_dict())
    assert all(m.training for m in at.model.modules())


def test_a_single_pair_is_left_out_under_batchnorm():
    for architecture, expected in (("bn", False), ("deep", True)):
        fed, _ = federation(FedIN(), clients([architecture]))
        at = worker(fed, 0)
        model = {n: t for n, t in at.model.state_dict().items() if t.is_floating_point()}
        at.context = FedIN().receive(at, {"model": model, "features": pairs(1)})
        assert ("s_in" in FedIN().step_inputs(at, 0, torch.Generator())) == expected


def loud():
    """A network whose output follows its input closely."""
    model = net(depth=0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    return model


@pytest.mark.parametrize("level", [0.2, 0.8, 1.5])
def test_how_loud_the_noise_of_the_messages_is(level):
    """Standard deviation of what was added over that of the features: 0.80 (8.5), not the square root of 0.8."""
    members, builders = clients(["loud"] * 2, 800), {"loud": loud}
    clean, noisy = (
        rounds(m, members, builders, rounds=1, batch_size=800)[0]
        for m in (FedIN(), FedIN(noise_level=level, noise_where="message"))
    )
    added = []
    for i in (0, 1):
        assert same(clean.trained[i], noisy.trained[i]), "noise in messages alone does not touch training"
        s_in, sent = clean.up[i]["features"]["s_in"], noisy.up[i]["features"]
        s_out = model_with(loud, noisy.trained[i]).transform(sent["s_in"]).detach()  # of the noisy s_in, then noised
        assert moved({"s": s_out}, {"s": clean.up[i]["features"]["s_out"]}) > 0.1
        for plain, found in ((s_in, sent["s_in"]), (s_out, sent["s_out"])):
            added.append((found - plain) / plain.std(correction=0))
            assert float(added[-1].std()) == pytest.approx(level, rel=0.05)
    draws = torch.stack([noise[:, 0] for noise in added])
    assert float((torch.corrcoef(draws) - torch.eye(4)).abs().max()) < 0.15, "every cut and client draws for itself"


def test_noise_in_the_forward_pass():
    """Fresh in every step, at both cuts, of the stated level; the IN pass has none."""
    method = FedIN(noise_level=0.8, mu=0.0, combine="none")
    at, _ = at_step(method, "deep")
    at.context = method.receive(at, {"model": {n: p.detach().clone() for n, p in at.model.named_parameters()}})
    draws = torch.Generator().manual_seed(3)
    data = batch(at.data.train, slice(0, 3))  # a ragged batch: 3 of 4 rows
    losses = []
    for step in range(2):
        given = method.step_inputs(at, step, draws)
        assert (given["z_in"].shape, given["z_out"].shape) == ((4, 6), (4, 5))
        z = at.model.extract(data.x)
        z = at.model.transform(z + 0.8 * z.detach().std(correction=0) * given["z_in"][:3])
        z = z + 0.8 * z.detach().std(correction=0) * given["z_out"][:3]
        expected = F.cross_entropy(at.model.head(z), data.y)
        found = method.gradients(at.model, data, {**at.context, **given, **pairs()})
        assert float(found.loss) == pytest.approx(float(expected.detach()), abs=1e-6)
        in_loss = ((at.model.transform(pairs()["s_in"]) - pairs()["s_out"]) ** 2).mean()
        assert float(found.sums["loss_in"]) == pytest.approx(float(in_loss.detach()), abs=1e-7)
        losses.append(float(expected.detach()))
    assert losses[0] != losses[1]


UNEQUAL = ["shallow", "wide", "broad"]  # s_in 6, 9, 6; s_out 5, 5, 8
SMALL = {"projection_channels": 4, "projection_grid": 2, "projection_features": 3}


def projected(**hyperparameters):
    return FedIN(**{"aggregation": "same-shape", "projection": "fixed", **SMALL, **hyperparameters})


def test_what_is_sent_is_the_own_features_times_the_matrices():
    members = clients(UNEQUAL)
    plain = rounds(FedIN(aggregation="same-shape"), clients(["wide"]), rounds=1)
    assert "features" in plain[0].up[0]
    (round,) = rounds(projected(), members, rounds=1)
    for i, (c, d) in enumerate([(6, 5), (9, 5), (6, 8)]):
        p_in = random_orthogonal(4, c, generator(0, "projection in", 4, c)).double().numpy()
        p_out = random_orthogonal(3, d, generator(0, "projection out", 3, d)).double().numpy()
        model = model_with(NETS[members[i].architecture], round.trained[i])
        rows = torch.randperm(12, generator=generator(0, "features", "train", 1, i))[:4]
        s_in = model.extract(members[i].data.train.x[rows]).detach()
        s_out = model.transform(s_in).detach().double().numpy() @ p_out.T
        sent = round.up[i]["features"]
        for place in range(5):  # a vector is one place: the summary, and each of 2 x 2
            np.testing.assert_allclose(sent["s_in"][:, place], s_in.double().numpy() @ p_in.T, atol=1e-5)
        np.testing.assert_allclose(sent["s_out"], s_out, atol=1e-5)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_misfit_and_its_gradient_by_hand(number):
    """The mean of (P_out f(P_in' s_in) - s_out)^2, f going through one layer after the other."""
    method = projected(mu=0.0, combine="none")
    at = worker(federation(method, clients(UNEQUAL))[0], number)
    g = torch.Generator().manual_seed(5)
    pairs = {"s_in": torch.randn(4, 5, 4, generator=g), "s_out": torch.randn(4, 3, generator=g)}
    at.context = method.receive(at, {"model": {}, "features": pairs})
    data, given = batch(at.data.train), {**at.context, **pairs}
    found = method.gradients(at.model, data, given)
    c, d = int(at.context["p_in"].shape[1]), int(at.context["p_out"].shape[1])
    assert (c, d) == [(6, 5), (9, 5), (6, 8)][number]
    own = pairs["s_in"][:, 1:].mean(dim=1) @ at.context["p_in"]
    loss = (at.model.transform(own) @ at.context["p_out"].T - pairs["s_out"]).square().mean()
    assert float(found.sums["loss_in"]) == pytest.approx(float(loss.detach()), abs=1e-6)
    local = F.cross_entropy(at.model(data.x), data.y)
    for name, p in at.model.named_parameters():
        inner = name.startswith("intermediate")
        (expected,) = torch.autograd.grad(local + loss if inner else local, p, retain_graph=True)
        torch.testing.assert_close(found.grads[name], expected, atol=1e-6, rtol=0)


def fedin_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """Up 4 (P + B q), down 4 (P + B q) from round 2 on: q = 4*3*3 + 6, B = 8 or all that a client has."""
    p = oracles.numbers(server, client_id)
    return 4 * (p + 8 * 42), 4 * (p + min(8, SIZES[client_id]) * 42)


def fedin_projected_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """As `fedin_bytes`, but q = (1 + 2*2) * 3 + 512, whatever the network."""
    p, q = oracles.numbers(server, client_id), 5 * 3 + 512
    return 4 * (p + 8 * q), 4 * (p + min(8, SIZES[client_id]) * q)


test_conformance = testing.conformance(
    methods.FedIN(mu=0.35),
    reference_loss=oracles.proximal,
    expected_bytes=fedin_bytes,
    skip=oracles.IN_ORDER,
    changed_values={
        "weighting": "samples",
        "noise_where": ChangedValue("message", {"noise_level": 0.8}),
        "projection": "fixed",
        "projection_channels": ChangedValue(3, {"projection": "fixed"}),
        "projection_grid": ChangedValue(2, {"projection": "fixed"}),
        "projection_features": ChangedValue(4, {"projection": "fixed"}),
    },
    reductions=[
        Reduction(methods.FedIN(exchange_features=False, mu=0.0), methods.FedAvg(weighting="uniform"), "received"),
        Reduction(methods.FedIN(exchange_features=False, mu=0.0, weighting="samples"), methods.FedAvg(), "received"),
        Reduction(
            methods.FedIN(exchange_features=False, mu=0.0, aggregation="same-shape"),
            methods.FedAvg(aggregation="same-shape"),
            "received",
        ),
    ],
)

test_other_settings = oracles.other_settings(
    (methods.FedIN(noise_level=0.8, aggregation="same-shape", combine="project"), {"skip": oracles.IN_ORDER}),
    (
        methods.FedIN(projection="fixed", projection_channels=3, projection_grid=2, aggregation="same-shape"),
        {"expected_bytes": fedin_projected_bytes, "skip": oracles.IN_ORDER},
    ),
)
