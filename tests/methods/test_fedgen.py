"""FedGen against NumPy by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.methods import FedGen, fedgen
from polyfed.methods.fedgen import generate, init_generator, observed_classes, train_generator
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.toys import CLASSES, batch, clients, federation, moved, rounds, same, samples, worker

SMALL = {"LATENT_DIM": 4, "HIDDEN_DIM": 8, "GENERATOR_STEPS": 5, "GENERATOR_BATCH": 16, "WEIGHT_DECAY": 0.0}
MIXED = ["shallow", "deep", "deep"]


@pytest.fixture(autouse=True)
def small_generator(request, monkeypatch):
    if request.node.originalname != "test_conformance":
        for name, value in SMALL.items():
            monkeypatch.setattr(fedgen, name, value)


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def numpy_generate(weights, z, y, training):
    w = {name: t.double().numpy() for name, t in weights.items()}
    hidden = np.concatenate([z, np.eye(CLASSES)[y]], axis=1) @ w["hidden.weight"].T + w["hidden.bias"]
    mean, var = (hidden.mean(0), hidden.var(0)) if training else (w["norm.running_mean"], w["norm.running_var"])
    normed = (hidden - mean) / np.sqrt(var + 1e-5) * w["norm.weight"] + w["norm.bias"]
    return np.maximum(normed, 0) @ w["output.weight"].T + w["output.bias"]


def test_initial_layers_are_uniform_within_one_over_the_root_of_their_inputs():
    weights = init_generator(CLASSES, 5, draws())
    for layer, inputs in (("hidden", 4 + CLASSES), ("output", 8)):
        low, high = (float(end) for end in weights[f"{layer}.weight"].aminmax())
        bound = inputs**-0.5
        assert -bound <= low < -0.8 * bound < 0.8 * bound < high <= bound


def test_one_step_by_hand(monkeypatch):
    """The loss with its weights omega and its diversity, against which the first step of Adam goes by lr."""
    monkeypatch.setattr(fedgen, "GENERATOR_STEPS", 1)
    weights, g = init_generator(CLASSES, 5, draws()), draws(3)
    heads = [nn.Linear(5, CLASSES).double().requires_grad_(False) for _ in range(3)]
    for head in heads:
        head.weight.copy_(torch.randn(CLASSES, 5, generator=g))
        head.bias.copy_(torch.randn(CLASSES, generator=g))
    counts = torch.tensor([[5, 0, 1], [3, 2, 0], [0, 6, 0]])
    new, moments, loss = train_generator(weights, {}, heads, counts, 1e-2, draws(9))
    g = draws(9)  # the same draws again: classes as often as there are samples; class 2 has only one
    y = torch.multinomial(torch.tensor([8.0, 8.0, 0.0]).double(), 16, replacement=True, generator=g).numpy()
    z = torch.randn(16, 4, generator=g).double().numpy()
    assert set(y) == {0, 1}
    omega = counts.numpy() / counts.numpy().sum(0)
    np.testing.assert_allclose(omega.sum(0), 1)
    pairs = [(a, b) for a in range(16) for b in range(16)]

    def numpy_loss(weights):
        made = numpy_generate(weights, z, y, training=True)
        logits = np.stack([made @ h.weight.numpy().T + h.bias.numpy() for h in heads])
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        ce = -log_p[:, np.arange(16), y]
        of_heads = np.mean([sum(omega[s, y[b]] * ce[s, b] for s in range(3)) for b in range(16)])
        exponent = [((z[a] - z[b]) ** 2).mean() * np.abs(made[a] - made[b]).mean() for a, b in pairs]
        return of_heads + np.exp(-np.mean(exponent))

    assert loss == pytest.approx(numpy_loss(weights), rel=1e-6)
    for place in [(0, 0), (1, 3), (4, 7)]:
        up, down = ({**weights, "output.weight": weights["output.weight"].double()} for _ in range(2))
        for moved_weights, by in ((up, 1e-5), (down, -1e-5)):
            moved_weights["output.weight"] = moved_weights["output.weight"].clone()
            moved_weights["output.weight"][place] += by
        step = float(new["output.weight"][place] - weights["output.weight"][place])
        assert step == pytest.approx(-1e-2 * np.sign(numpy_loss(up) - numpy_loss(down)), abs=1e-5)
    assert all(moved({n: new[n]}, {n: weights[n]}) > 1e-4 for n in ("norm.running_mean", "norm.running_var"))
    assert moments["steps hidden.weight"] == 1
    _, moments, _ = train_generator(new, moments, heads, counts, 1e-2, draws(9))
    assert moments["steps hidden.weight"] == 2
    assert observed_classes(torch.tensor([[5, 0, 1, 1], [3, 2, 0, 1]])).tolist() == [8, 2, 0, 2]


def test_the_generator_is_trained_on_the_heads_that_came():
    method = FedGen()
    history = rounds(method, clients(MIXED, [8, 12, 16]))
    for number, round in enumerate(history, 1):
        heads = []
        for message in round.up.values():
            head = nn.Linear(5, CLASSES)
            head.load_state_dict({n.removeprefix("head."): t for n, t in message["model"].items() if "head" in n})
            heads.append(head.double().requires_grad_(False))
        counts = torch.stack([m["counts"].long() for m in round.up.values()])
        moments = round.before.get("moments", {})
        server = federation(method, clients(MIXED, [8, 12, 16]))[0].server
        server.round = number
        new, left, _ = train_generator(
            round.before["generator"], moments, heads, counts, 3e-4 * 0.98 ** (number - 1), server.generator("features")
        )
        assert same(new, round.after["generator"])
        assert same(left, round.after["moments"])


def test_weights_fall_from_round_to_round_and_stop_at_the_floor(monkeypatch):
    monkeypatch.setattr(fedgen, "DECAY", 0.5)
    method = FedGen(alpha=10.0, beta=1e-3)
    fed, _ = federation(method, clients(MIXED))
    fed.run()
    for round, expected in ((2, (5.0, 5e-4)), (4, (1.25, 1.25e-4)), (40, (1e-4, 1e-4))):
        client = worker(fed, 0, round)
        context = method.receive(client, method.broadcast(fed.server, 0))
        found = [float(context[name]) for name in ("a_t", "b_t")]
        assert found == pytest.approx(expected)


def test_the_teacher_gets_no_gradient():
    """With the KL alone the head moves only through f(x), not through what it makes of G(z, y)."""
    method = FedGen(alpha=0.0, beta=1.0)
    fed, _ = federation(method, clients(MIXED))
    fed.run()
    client = worker(fed, 1, 3)
    context = dict(method.receive(client, method.broadcast(fed.server, 1)))
    client.context = context
    context |= method.step_inputs(client, 0, draws())
    assert same(
        method.step_inputs(client, 0, draws()), {name: context[name] for name in ("y_drawn", "z_drawn", "z_batch")}
    )
    data, model = batch(samples(4, 5)), client.model
    found = method.gradients(model, data, context).grads
    teacher = model.head(generate(context["generator"], context["z_batch"], data.y)).detach()
    scores = model(data.x)
    kl = F.kl_div(scores.log_softmax(1), teacher.softmax(1), reduction="batchmean")
    (F.cross_entropy(scores, data.y) + 0.98**2 * kl).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, atol=1e-6, rtol=1e-5)


def generated(model: Any, batch: Any, context: Any) -> float:
    """CE + a CE(h(G(z', y')), y') + b KL(softmax h(G(z, y)) || softmax f(x)) in float64; G written out."""
    head = {name: p.detach().double().numpy() for name, p in model.head.named_parameters()}

    def made(z: Any, y: Any) -> Any:
        features = numpy_generate(context["generator"], z.double().numpy(), y.numpy(), training=False)
        return oracles.log_softmax(features @ head["weight"].T + head["bias"])

    drawn = oracles.of_labels(made(context["z_drawn"], context["y_drawn"]), context["y_drawn"])
    kl = oracles.divergence(made(context["z_batch"][: len(batch.y)], batch.y), oracles.log_softmax(model(batch.x)))
    return oracles.cross_entropy(model, batch, context) + 0.98 * (0.2 * drawn + 0.1 * kl)  # of round 2


test_conformance = testing.conformance(
    methods.FedGen(alpha=0.2, beta=0.1),
    reference_loss=generated,
    # Z = 32, H = 256, C = 3, D = 6
    expected_bytes=oracles.of_weights(4 * ((32 + 3 + 5) * 256 + (256 + 1) * 6 + 3), 4 * 3),
    reductions=[
        Reduction({"alpha": 0.0, "beta": 0.0}, methods.FedAvg(), "received"),
        Reduction({"alpha": 0.0, "beta": 0.0, "weighting": "uniform"}, methods.FedAvg(weighting="uniform"), "received"),
    ],
)
