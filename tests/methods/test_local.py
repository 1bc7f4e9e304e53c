"""Local, and with it the training loop that all methods share, against a plain PyTorch loop (baselines 3.1)."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from polyfed.core.model_factory import ModelFactory
from polyfed.core.randomness import generator
from polyfed.methods import Local
from tests.helpers.quick import others_slow
from tests.helpers.toys import NETS, clients, federation, moved, rounds, same


def initial(architecture, client_id, seed=0):
    return ModelFactory(NETS, Local().build, seed, torch.device("cpu")).initial_state(architecture, owner=client_id)


def plain(model, data, optimizer, epochs, batch_size, order, skip_single=False):
    """What anybody would write: shuffled minibatches, the last one ragged."""
    model.train()
    for _ in range(epochs):
        permutation = torch.randperm(len(data.y), generator=order)
        for start in range(0, len(permutation), batch_size):
            rows = permutation[start : start + batch_size]
            if skip_single and len(rows) == 1:
                continue
            optimizer.zero_grad()
            F.cross_entropy(model(data.x[rows]), data.y[rows]).backward()
            optimizer.step()


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
OPTIMIZERS = {
    "sgd": ({"lr": 0.1}, SGD),
    "momentum": ({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}, SGD),
    "adam": ({"optimizer": "adam", "lr": 0.01}, ADAM),
    "adam and decay": ({"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1}, ADAM),
    "adamw": ({"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1}, ADAMW),
}


def pairs_of_weights(architecture, kind, fused):
    """Weights after each round: polyfed's, and the plain loop's. The optimizer is new in every round."""
    training, make = OPTIMIZERS[kind]
    options = {name: value for name, value in training.items() if name != "optimizer"}
    members = clients([architecture] * 2, sizes=[13, 10])  # 13 in batches of 4: a last batch of 1, which BN cannot take
    history = rounds(Local(), members, rounds=3, local_epochs=2, **training)
    for number, client in enumerate(members):
        model = NETS[architecture]()
        model.load_state_dict(initial(architecture, number))
        for round in (1, 2, 3):
            order = generator(0, "batches", "train", round, number)
            optimizer = make(model.parameters(), **options, fused=fused)
            plain(model, client.data.train, optimizer, 2, 4, order, skip_single=architecture == "bn")
            yield history[round - 1].weights[number], model.state_dict()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("architecture", others_slow(["shallow", "deep", "bn"], quick=["bn"]))
def test_equals_a_plain_loop_bit_for_bit(architecture, kind):
    """With PyTorch's fused steps, which the engine takes."""
    for ours, theirs in pairs_of_weights(architecture, kind, fused=True):
        assert same(ours, theirs)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_equals_plain_steps_up_to_rounding(kind):
    """Not under BatchNorm: the bias before it has no gradient but rounding, which Adam scales up to its rate."""
    for ours, theirs in pairs_of_weights("deep", kind, fused=False):
        assert moved(ours, theirs) < 1e-5


def test_adam_against_the_formula():
    """One batch per round, so that NumPy can follow: step 1 of Adam is lr * g / (|g| + eps), whatever the betas."""
    members = clients(["shallow"], sizes=8)
    one = rounds(Local(), members, rounds=1, batch_size=8, optimizer="adam", lr=0.01)[0].weights[0]
    model = NETS["shallow"]()
    start = initial("shallow", 0)
    model.load_state_dict(start)
    F.cross_entropy(model(members[0].data.train.x), members[0].data.train.y).backward()
    for name, p in model.named_parameters():
        g = p.grad.double().numpy()
        expected = start[name].double().numpy() - 0.01 * g / (np.abs(g) + 1e-8)
        np.testing.assert_allclose(one[name].numpy(), expected, atol=2e-6)


def test_the_users_own_network_starts_where_it_stands_and_is_not_touched():
    from polyfed.core.client import Client

    torch.manual_seed(3)
    mine = NETS["shallow"]()
    before = copy.deepcopy(mine.state_dict())
    data = clients(["shallow"])[0].data.train
    fed, watch = federation(Local(), [Client(mine, data)], rounds=1, local_epochs=1)
    fed.run()
    assert same(mine.state_dict(), before)
    plain(mine, data, SGD(mine.parameters(), lr=0.1, fused=True), 1, 4, generator(0, "batches", "train", 1, 0))
    assert same(watch.rounds[0].weights[0], mine.state_dict())
