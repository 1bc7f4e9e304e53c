"""FedDF step by step: the averages, the ensemble's scores, Adam along a cosine."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.engine.method_wrappers import alone
from polyfed.methods import FedAvg, FedDF
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.few_classes import SIZES, disagreeing
from tests.helpers.toys import NETS, model_with, moved, numpy_mean, public, rounds, same

HELD = public(20)
MIXED = ["shallow", "broad", "shallow", "broad"]  # heads of different tensors, too
WHOLE = {"server_batch": 20, "server_steps": 3, "server_lr": 0.02}  # all inputs in every step


def played(method, architectures=MIXED, held=HELD, **options):
    return rounds(method, disagreeing(architectures), held=held, **options)


def distilled(model, targets, steps, lr):
    """PyTorch's Adam on the mean KL(softmax targets || softmax scores), the rate along a cosine."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    p = torch.from_numpy(targets).softmax(1).float()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.zero_grad()
        F.kl_div(model(HELD.samples.x).log_softmax(1), p, reduction="batchmean").backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def scores_of(architectures, sent):
    """The uploaded networks' scores of the public inputs, (S, N, C)."""
    with torch.no_grad():
        nets = [model_with(NETS[a], w) for a, w in zip(architectures, sent, strict=True)]
        return np.stack([one(HELD.samples.x).double().numpy() for one in nets])


def test_two_rounds_by_hand():
    """The mean of all clients' scores, of both architectures, teaches the average of each."""
    history = played(FedDF(**WHOLE), lr=0.02)
    for round in history:
        sent = [round.up[i]["model"] for i in range(4)]
        targets = scores_of(MIXED, sent).mean(0)
        for architecture in ("shallow", "broad"):
            members = [i for i, a in enumerate(MIXED) if a == architecture]
            theirs, counts = [sent[i] for i in members], [SIZES[i] for i in members]
            mean = {name: torch.from_numpy(numpy_mean(theirs, counts, name)).float() for name in theirs[0]}
            expected = distilled(model_with(NETS[architecture], mean), targets, 3, 0.02)
            found = round.after[f"model {architecture}"]
            assert found.keys() == expected.keys()
            assert moved(found, expected) < 1e-5
            assert moved(found, mean) > 0.02
    for i, architecture in enumerate(MIXED):
        assert same(history[1].down[i]["model"], history[0].after[f"model {architecture}"])


def test_a_lone_client_is_averaged_alone():
    """Its own scores are its own network's; Adam would take steps of full length along rounding errors."""
    (round,) = played(FedDF(**WHOLE), ["shallow"], rounds=1)
    assert same(round.after["model shallow"], round.up[0]["model"])
    alone_, plain = (played(alone(m)) for m in (FedDF(**WHOLE), FedAvg(aggregation="same-shape")))
    for one, other in zip(alone_, plain, strict=True):
        assert all(same(one.weights[i], other.weights[i]) for i in range(4))


OF_PUBLIC_INPUTS = "the distilled network's statistics move on to those of the public inputs"

test_conformance = testing.conformance(
    methods.FedDF(server_steps=4, server_batch=8, server_lr=0.01),
    reference_loss=oracles.cross_entropy,
    expected_bytes=oracles.averaging_bytes,
    skip={"batchnorm": OF_PUBLIC_INPUTS},
    reductions=[
        Reduction({"server_steps": 0}, methods.FedAvg(aggregation="same-shape"), "received"),
        Reduction({"server_lr": 0.0}, methods.FedAvg(aggregation="same-shape"), "received"),
    ],
)
