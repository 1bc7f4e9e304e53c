"""FjORD against prefixes made by hand (baselines 4.4)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.engine.executors.client_work import working_copy
from polyfed.methods import FjORD
from polyfed.methods.fjord import forward_at_width, num_widths
from polyfed.testing.fixtures import tiny_model
from tests.helpers import oracles
from tests.helpers.slices import prefix
from tests.helpers.toys import batch, clients, federation, net, samples

WIDTH, FEATURES = 6, 5  # the toys'


def sizes(p: float) -> tuple[int, int]:
    return math.ceil(round(p * WIDTH, 9)), math.ceil(round(p * FEATURES, 9))


def made(p: float, like: torch.nn.Module, batchnorm: bool = False) -> torch.nn.Module:
    """The toys' network of some width, with the prefix of another's weights."""
    wide, high = sizes(p)
    model = net(width=wide, features=high, batchnorm=batchnorm)
    own = dict(like.named_parameters())
    model.load_state_dict({n: prefix(own[n].detach(), t) if n in own else t for n, t in model.state_dict().items()})
    return model


@pytest.mark.parametrize("batchnorm", [False, True])
@pytest.mark.parametrize("largest", [5, 3])
def test_every_width_is_the_network_made_that_narrow(batchnorm, largest):
    model = FjORD().build(net(batchnorm=batchnorm), str(largest)).train()
    x = torch.randn(8, 4)
    assert num_widths(model) == largest
    for place in range(largest):
        hand = made((place + 1) / 5, model, batchnorm).train()
        torch.testing.assert_close(forward_at_width(model, place, x), hand(x))
    assert not batchnorm or not model.extractor.bn.running_mean.any()  # no width leaves statistics behind


@pytest.mark.parametrize("place", range(5))
def test_the_loss_is_the_widests_and_what_the_drawn_width_learns_from_it(place):
    model, data = FjORD().build(net(), "5"), batch(samples(8, 0))
    found = FjORD().gradients(model, data, {"width": place})
    hand = model.state_dict()
    total = F.cross_entropy(model(data.x), data.y)
    grads = dict(zip(hand, torch.autograd.grad(total, list(model.parameters())), strict=True))
    if place < 4:
        target = model(data.x).detach().softmax(1)
        inner = made((place + 1) / 5, model)
        kl = (target * (target.log() - inner(data.x).log_softmax(1))).sum(1).mean()
        total = total + kl.detach()
        parts = torch.autograd.grad(kl, list(inner.parameters()))
        for (name, _), part in zip(inner.named_parameters(), parts, strict=True):
            prefix(grads[name], part).add_(part)  # the target is no function of the weights
    torch.testing.assert_close(found.loss, total.detach())
    for name, grad in grads.items():
        torch.testing.assert_close(found.grads[name], grad, atol=1e-6, rtol=1e-5)
    plain = FjORD(distill=False).gradients(model, data, {"width": place})
    expected = F.cross_entropy(made((place + 1) / 5, model)(data.x), data.y)
    torch.testing.assert_close(plain.loss, expected.detach())


def test_widths_are_drawn_for_every_batch_alike_likely_up_to_the_clients_own():
    fed, _ = federation(FjORD(), clients(["shallow"] * 5, 4))
    for number, client in enumerate(fed.clients):
        at = working_copy(client, str(number + 1), fed.model_factory)
        draws = at.generator("inputs")
        counts = np.bincount([fed.method.step_inputs(at, step, draws)["width"] for step in range(400)], minlength=5)
        assert not counts[number + 1 :].any()
        expected = 400 / (number + 1)
        assert np.abs(counts[: number + 1] - expected).max() < 4 * math.sqrt(expected)


def fjord_bytes(server: Any, client_id: int) -> tuple[int, int]:
    """P of a third, two thirds and all of 8 and 12 channels."""
    p = oracles.of_width(*((3, 4), (6, 8), (8, 12))[client_id // 2])
    return 4 * p, 4 * p


def ordered_dropout(model: Any, batch: Any, context: Any) -> float:
    """CE of the widest and, where a narrower width was drawn, KL(widest || narrower); the narrower one made by hand."""
    task = oracles.cross_entropy(model, batch, context)
    widest = {3: 0, 6: 1, 8: 2}[len(model.extractor.conv.bias)]
    if context["width"] == widest:
        return task
    w, f = ((3, 4), (6, 8))[context["width"]]
    inner = tiny_model(1, w, f)
    for (_, small), (_, large) in zip(inner.named_parameters(), model.named_parameters(), strict=True):
        small.data = large.detach()[tuple(slice(0, n) for n in small.shape)]
    return task + oracles.divergence(oracles.log_softmax(model(batch.x)), oracles.log_softmax(inner(batch.x)))


test_conformance = testing.conformance(
    methods.FjORD(num_widths=3),
    models=oracles.WIDE,
    reference_loss=ordered_dropout,
    expected_bytes=fjord_bytes,
    skip=oracles.NUMBERED,
    changed_values={"num_widths": 2},
    reductions=[oracles.is_fedavg({"num_widths": 1})],
)
