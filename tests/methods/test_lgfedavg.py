"""LG-FedAvg's own properties against NumPy by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyfed import methods, testing
from polyfed.methods import LGFedAvg
from polyfed.models import adapt
from tests.helpers import oracles
from tests.helpers.toys import CLASSES, INPUTS, NETS, Forward, clients, numpy_mean, rounds

MIXED = ["shallow", "deep", "wide", "bn"]  # different extractors, one head
SIZES = [12, 5, 9, 7]


def test_the_head_is_the_clients_mean():
    for round in rounds(LGFedAvg(), clients(MIXED, SIZES)):
        trained = [round.trained[i] for i in range(4)]
        for name, now in round.after["shared"].items():
            assert now.numpy() == pytest.approx(numpy_mean(trained, SIZES, name), abs=1e-6)
            ways = {bool(w) for t in trained for w in (t[name] > round.before["shared"][name]).flatten()}
            assert ways == {True, False}  # entries went both ways


def named(head):
    """A plain network whose last layer has this name."""
    layers = {"body": nn.Sequential(nn.Linear(INPUTS, 5), nn.Tanh()), head: nn.Linear(5, CLASSES)}
    network = Forward(lambda module, x: getattr(module, head)(module.body(x)), **layers)
    return adapt.split(network, head=head, extractor=None, example=torch.zeros(2, INPUTS))


def test_heads_of_other_names_are_one_head():
    builders = {**NETS, "fc": lambda: named("fc"), "top": lambda: named("top")}
    (round,) = rounds(LGFedAvg(), clients(["fc", "top", "shallow"], [12, 5, 9]), builders, rounds=1)
    mine = ("original.fc.bias", "original.top.bias", "head.bias")
    heads = [{"bias": round.trained[i][name]} for i, name in enumerate(mine)]
    assert round.after["shared"]["head.bias"].numpy() == pytest.approx(numpy_mean(heads, [12, 5, 9], "bias"), abs=1e-6)
    assert all(set(message["shared"]) == {"head.weight", "head.bias"} for message in round.down.values())


test_conformance = testing.conformance(
    methods.LGFedAvg(),
    reference_loss=oracles.cross_entropy,
    expected_bytes=lambda *_: (4 * 21, 4 * 21),  # the head, 6 x 3 weights and 3 biases
    counted="updates",
)
