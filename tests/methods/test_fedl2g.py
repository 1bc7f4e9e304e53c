"""FedL2G against NumPy by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.core.client import Client
from polyfed.core.randomness import generator
from polyfed.errors import ConfigError
from polyfed.methods import FedL2G, fedl2g
from polyfed.methods.fedl2g import meta_gradient
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.toys import CLASSES, INPUTS, clients, federation, normal, rounds, samples, softmax

LINEAR = {"linear": lambda: nn.Linear(INPUTS, CLASSES)}
COLD = {"warmup_rounds": 0}


def halves(client, seed=0, size=4):
    """The quiz's rows and the study set's; of a client with so many samples that the quiz is whole."""
    order = torch.randperm(client.n, generator=generator(seed, "quiz", client.id))
    return order[:size], order[size:]


def stepped(w, x, y, g, lr):
    """One guided step of a linear network, whose logits are guided."""
    scores = x @ w["weight"].T + w["bias"]
    d = (softmax(scores) - np.eye(CLASSES)[y]) / len(y) + 2 * (scores - g[y]) / scores.size
    return {"weight": w["weight"] - lr * d.T @ x, "bias": w["bias"] - lr * d.sum(0)}


def meta(w, study, quiz, g, lr):
    """grad_g of the quiz's CE after the step, by the chain rule: d w' / d g_y = lr 2 x / (N C)."""
    (x, y), (xq, yq) = study, quiz
    after = stepped(w, x, y, g, lr)
    dw = (softmax(xq @ after["weight"].T + after["bias"]) - np.eye(CLASSES)[yq]) / len(yq)
    d_weight, d_bias = dw.T @ xq, dw.sum(0)
    each = lr * 2 / (len(y) * CLASSES) * (x @ d_weight.T + d_bias)
    return {c: each[y == c].sum(0) for c in sorted(set(y.tolist()))}


@pytest.mark.parametrize("clip", [100.0, 0.004])
def test_two_rounds_by_hand(clip, monkeypatch):
    """A warm-up round and one that trains: half of 8 samples is the quiz, the other half a whole study batch."""
    members = [Client("linear", samples(8, 0, classes)) for classes in ((0,), (0, 1), (1,))]  # nobody has class 2
    monkeypatch.setattr(fedl2g, "MAX_GRADIENT_NORM", clip)
    method = FedL2G(warmup_rounds=1, server_lr=5.0)
    fed, watch = federation(method, members, LINEAR, lr=0.5)
    w = [{n: t.double().numpy() for n, t in fed.server.client_weights(i).items()} for i in range(3)]
    fed.run()
    parts = []
    for client in fed.clients:
        x, y = client.data.train.x.double().numpy(), client.data.train.y.numpy()
        parts.append([(x[rows], y[rows]) for rows in (r.numpy() for r in halves(client))])
    g, signs = watch.rounds[0].down[0]["guides"].double().numpy(), set()
    for number, round in enumerate(watch.rounds):
        np.testing.assert_allclose(round.down[2]["guides"].numpy(), g, atol=1e-5)
        if number:
            w = [stepped(one, *study, g, 0.5) for one, (_, study) in zip(w, parts, strict=True)]
            for i, one in enumerate(w):
                for name, t in round.weights[i].items():
                    np.testing.assert_allclose(t.numpy(), one[name], atol=1e-5)
        else:
            assert set(round.weights.values()) == {None}
        sent = [meta(one, study, quiz, g, 0.5) for one, (quiz, study) in zip(w, parts, strict=True)]
        for i, rows in enumerate(sent):
            assert round.up[i]["labels"].tolist() == list(rows)
            np.testing.assert_allclose(round.up[i]["gradients"].numpy(), np.stack(list(rows.values())), atol=1e-6)
        gradient = np.zeros((CLASSES, CLASSES))
        for c in (0, 1):
            gradient[c] = np.mean([rows[c] for rows in sent if c in rows], axis=0)
        norm = np.linalg.norm(gradient)
        assert round.record["server"]["guide_gradient"] == pytest.approx(norm, rel=1e-4)
        assert (norm > clip) == (clip < 1)
        signs |= set(np.sign(gradient).ravel())
        g = g - 5.0 * gradient * min(1, clip / norm)
    assert {-1, 1} <= signs
    np.testing.assert_allclose(watch.rounds[-1].after["guides"].numpy(), g, atol=1e-5)
    assert torch.equal(watch.rounds[-1].after["guides"][2], watch.rounds[0].before["guides"][2])


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return 2 * gradient


class Fused(nn.Linear):
    """A layer without second derivative, as fused kernels are."""

    def forward(self, x):
        return _Once.apply(super().forward(x))


def test_networks_without_second_derivative_are_refused(tmp_path):
    kinds = {**LINEAR, "fused": lambda: Fused(INPUTS, CLASSES)}
    line = r"^fedl2g needs networks with second derivatives; client 1 \('fused'\) has none: .*; use fd, which"
    with pytest.raises(ConfigError, match=line) as error:
        federation(FedL2G(), clients(["linear", "fused"]), kinds, out=tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
    assert rounds(FedL2G(guide_weight=0.0), clients(["linear", "fused"]), kinds)


class Guided(nn.Module):
    """Scores, and the linear features before them, which are guided."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(INPUTS, 3), nn.Linear(3, CLASSES)

    def forward(self, x):
        z = self.body(x)
        return self.head(z), z


def problem():
    module = Guided().double()
    for seed, p in enumerate(module.parameters()):
        p.data = normal(*p.shape, seed=seed).double()
    study = normal(6, INPUTS, seed=11).double(), torch.tensor([0, 1, 0, 1, 0, 1])  # nobody of class 2
    quiz = normal(7, INPUTS, seed=12).double(), torch.tensor([2, 1, 0, 0, 1, 2, 0])
    return module, normal(CLASSES, 3, seed=13).double(), study, quiz


def after_the_step(module, g, study, quiz, lr, weight):
    """CE on the quiz after a step of autograd on the study set."""
    (x, y), (xq, yq) = study, quiz
    scores, found = module(x)
    loss = F.cross_entropy(scores, y) + weight * (found - g[y]).square().mean()
    names, parameters = zip(*module.named_parameters(), strict=True)
    steps = zip(names, parameters, torch.autograd.grad(loss, parameters), strict=True)
    scores, _ = torch.func.functional_call(module, {n: p.detach() - lr * d for n, p, d in steps}, (xq,))
    return float(F.cross_entropy(scores, yq))


def test_the_meta_gradient_against_finite_differences():
    weight = 0.3
    module, guides, study, quiz = problem()
    before = [p.clone() for p in module.parameters()]
    found = meta_gradient(module, guides, study, quiz, 0.5, weight).numpy()
    g, h, expected = guides.clone(), 1e-5, np.zeros(guides.shape)
    for at in np.ndindex(*g.shape):
        ends = []
        for sign in (1, -1):
            g[at] += sign * h
            ends.append(after_the_step(module, g, study, quiz, 0.5, weight))
            g[at] -= sign * h
        expected[at] = (ends[0] - ends[1]) / (2 * h)
    assert expected.min() < -1e-4 < 1e-4 < expected.max(), "both signs"
    np.testing.assert_allclose(found, expected, atol=1e-8)
    assert not found[2].any()
    assert all(torch.equal(a, p) for a, p in zip(before, module.parameters(), strict=True))
    assert all(p.grad is None for p in module.parameters())


test_conformance = testing.conformance(
    methods.FedL2G(guide_weight=0.8, warmup_rounds=0, server_lr=1.0),
    expected_bytes=oracles.of_classes(4 * 3 * 3, 4 * (3 + 1)),  # down 4 C C; up 4 (S C + S)
    changed_values={"warmup_rounds": 1},
    reductions=[Reduction({"guide_weight": 0.0}, methods.Local())],
)
