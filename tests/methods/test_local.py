"""Local, and with it the training loop that all methods share, against a plain PyTorch loop (baselines 3.1)."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.core.model_factory import ModelFactory
from polyfed.core.randomness import generator
from polyfed.methods import Local
from tests.helpers import oracles
from tests.helpers.quick import others_slow
from tests.helpers.toys import NETS, clients, rounds, same


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


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("architecture", others_slow(["shallow", "deep", "bn"], quick=["bn"]))
def test_equals_a_plain_loop_bit_for_bit(architecture, kind):
    """With PyTorch's fused steps, which the engine takes. The optimizer is new in every round."""
    training, make = OPTIMIZERS[kind]
    options = {name: value for name, value in training.items() if name != "optimizer"}
    members = clients([architecture] * 2, sizes=[13, 10])  # 13 in batches of 4: a last batch of 1, which BN cannot take
    history = rounds(Local(), members, rounds=3, local_epochs=2, **training)
    for number, client in enumerate(members):
        model = NETS[architecture]()
        factory = ModelFactory(NETS, Local().build, 0, torch.device("cpu"))
        model.load_state_dict(factory.initial_state(architecture, owner=number))
        for round in (1, 2, 3):
            order = generator(0, "batches", "train", round, number)
            optimizer = make(model.parameters(), **options, fused=True)
            plain(model, client.data.train, optimizer, 2, 4, order, skip_single=architecture == "bn")
            assert same(history[round - 1].weights[number], model.state_dict())


test_conformance = testing.conformance(
    methods.Local(), reference_loss=oracles.cross_entropy, expected_bytes=lambda *_: (0, 0)
)
