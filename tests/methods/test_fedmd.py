"""FedMD against NumPy by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from polyfed import methods, testing
from polyfed.data.samples import LabeledSamples
from polyfed.methods import FedMD, fedmd
from polyfed.testing import Reduction
from tests.helpers.toys import CLASSES, INPUTS, clients, federation, public, softmax

LINEAR = {"linear": lambda: nn.Linear(INPUTS, CLASSES)}
NO_TRANSFER = {"public_epochs": 0, "private_epochs": 0}
HELD = public(20)
SIZES = (6, 14, 9)


def ran(method, held=HELD):
    """Whole batches of linear networks: their first weights, their rows, and the rounds."""
    members = clients(["linear"] * 3, list(SIZES))
    fed, watch = federation(method, members, LINEAR, held=held, batch_size=64)
    w = [{n: t.double().numpy() for n, t in fed.server.client_weights(i).items()} for i in range(3)]
    fed.run()
    return w, [client.data.train for client in members], watch.rounds


def check(round, w):
    for i, one in enumerate(w):
        for name, t in round.weights[i].items():
            np.testing.assert_allclose(t.numpy(), one[name], atol=1e-5)


def arrays(data):
    return data.x.double().numpy(), data.y.numpy()


def scored(w, x):
    return x @ w["weight"].T + w["bias"]


def stepped(w, x, dz, lr=0.1):
    """A step of SGD from the gradient in the scores."""
    return {"weight": w["weight"] - lr * dz.T @ x, "bias": w["bias"] - lr * dz.sum(0)}


def learnt(w, data):
    x, y = arrays(data)
    return stepped(w, x, (softmax(scored(w, x)) - np.eye(CLASSES)[y]) / len(y))


def digested(w, x, target):
    gap = scored(w, x) - target
    assert gap.min() < 0 < gap.max()
    return stepped(w, x, np.sign(gap) / gap.size)


def test_two_rounds_by_hand():
    """Transfer on public, then on private; scores, their mean, a digesting and a revisiting step."""
    w, own, history = ran(FedMD(public_epochs=1, private_epochs=2))
    w = [learnt(learnt(learnt(one, HELD.samples), data), data) for one, data in zip(w, own, strict=True)]
    x, _ = arrays(HELD.samples)
    for round in history:
        scores = [scored(one, x) for one in w]
        mean = np.mean(scores, axis=0)
        np.testing.assert_allclose(round.down[1]["consensus"].numpy(), mean, atol=1e-5)
        w = [learnt(digested(one, x, mean), data) for one, data in zip(w, own, strict=True)]
        check(round, w)


def test_the_control_labels_digests_the_labels_of_public_rows():
    """By hand: a step on the public rows' labels, one on the client's own."""
    w, own, history = ran(FedMD(**NO_TRANSFER, control="labels"))
    for round in history:
        w = [learnt(learnt(one, HELD.samples), data) for one, data in zip(w, own, strict=True)]
        check(round, w)


@pytest.mark.parametrize("bound", [0.5, 1.0])
def test_pseudo_labels_digests_what_the_client_is_sure_of_and_sends_nothing(monkeypatch, bound):
    """By hand: a step on the sure rows and their classes, if there are any, and one on the client's own."""
    monkeypatch.setattr(fedmd, "_SURE", bound)
    w, own, history = ran(FedMD(**NO_TRANSFER, control="pseudo-labels"), dataclasses.replace(HELD, origin="other"))
    for round in history:
        assert round.record["bytes_up"] == round.record["bytes_down"] == 0
        for i, data in enumerate(own):
            scores = scored(w[i], arrays(HELD.samples)[0])
            sure = softmax(scores).max(1) > bound
            assert 0 < sure.sum() < 20 or bound == 1
            guessed = LabeledSamples(HELD.samples.x[sure], torch.tensor(scores.argmax(1))[sure])
            w[i] = learnt(learnt(w[i], guessed) if sure.any() else w[i], data)
        check(round, w)


test_conformance = testing.conformance(
    methods.FedMD(public_epochs=0, private_epochs=0),
    expected_bytes=lambda server, _: (4 * len(server.public) * 3, 4 * len(server.public) * 3),
    reductions=[Reduction({"digest_epochs": 0}, methods.Local())],
)
