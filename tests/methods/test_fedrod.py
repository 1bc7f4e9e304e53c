"""Fed-RoD by hand: which loss moves which part, and what each predictor adds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.core.client import Client
from polyfed.data.samples import LabeledSamples
from polyfed.methods import FedRoD
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.toys import federation
from tests.methods.test_fedrep import linear

Weights = dict[str, Tensor]


def two_clients() -> list[Client]:
    """The first has rows of classes 0 and 2 alone, one and three of them."""
    first = (torch.tensor([[2.0, -1.3], [0.4, 1.0], [-1.0, 0.2], [0.3, 0.8]]), torch.tensor([0, 2, 2, 2]))
    second = (torch.tensor([[1.0, 0.5], [-3.0, 1.0], [0.5, -2.0]]), torch.tensor([1, 0, 2]))
    return [Client("flat", first), Client("flat", second)]


def client_by_hand(start: Weights, data: LabeledSamples, lr: float, gamma: float) -> Weights:
    """Two steps. Over the client's own classes, p(c) is in proportion to n_c^gamma exp(score)."""
    w = {name: t.clone().requires_grad_() for name, t in start.items()}
    own = [c for c in range(3) if (data.y == c).any()]
    counts = torch.stack([(data.y == c).sum() for c in own]).float()
    target = torch.tensor([own.index(int(c)) for c in data.y])
    for _ in range(2):
        z = data.x @ w["phi"].T
        raised = (z @ w["h"].T)[:, own].exp() * counts**gamma
        balanced = -(raised[range(len(z)), target] / raised.sum(1)).log().mean()
        fixed = z.detach()
        personal = F.cross_entropy(fixed @ w["h"].detach().T + fixed @ w["g"].T, data.y)
        common = torch.autograd.grad(balanced, (w["phi"], w["h"]))
        slopes = dict(zip(("phi", "h", "g"), (*common, *torch.autograd.grad(personal, w["g"])), strict=True))
        w = {name: (t - lr * slopes[name]).detach().requires_grad_() for name, t in w.items()}
    return {name: t.detach() for name, t in w.items()}


@pytest.mark.parametrize("gamma", [1.0, 0.4])
def test_two_clients_by_hand(gamma: float) -> None:
    members = two_clients()
    fed, watch = federation(
        FedRoD(gamma=gamma), members, {"flat": linear}, rounds=3, local_epochs=2, batch_size=8, lr=0.3
    )
    common = fed.server.initial_state("flat")
    phi, h = common["extractor.weight"], common["head.weight"]
    heads = [fed.server.client_weights(i)["head.weight"].clone() for i in (0, 1)]
    done = fed.run()
    for round in watch.rounds:
        starts = [{"phi": phi, "h": h, "g": g} for g in heads]
        ends = [client_by_hand(s, c.data.train, 0.3, gamma) for s, c in zip(starts, members, strict=True)]
        heads = [end["g"] for end in ends]
        phi, h = ((4 * ends[0][name] + 3 * ends[1][name]) / 7 for name in ("phi", "h"))
        for i, end in enumerate(ends):
            np.testing.assert_allclose(round.weights[i]["head.weight"], end["g"], atol=1e-5)
            np.testing.assert_allclose(round.weights[i]["auxiliary_model.head.weight"], end["h"], atol=1e-5)
        np.testing.assert_allclose(round.after["auxiliary_model"]["extractor.weight"], phi, atol=1e-5)
    x = members[0].data.train.x
    z = x @ ends[0]["phi"].T
    generic = FedRoD(predictor="generic").predict(done.models[0].network, x, {}).detach()
    np.testing.assert_allclose(generic, z @ ends[0]["h"].T, atol=1e-4)
    np.testing.assert_allclose(done.models[0](x).detach() - generic, z @ ends[0]["g"].T, atol=1e-4)


def both_losses(model: Any, batch: Any, context: Any) -> float:
    """CE of the balanced scores and of the sum of both heads', in float64."""
    z = model.auxiliary_model.represent(batch.x)
    generic = model.auxiliary_model.head(z).detach().double().numpy()
    both = generic + model.head(z).detach().double().numpy()
    balanced = generic + context["offsets"].double().numpy()
    return sum(oracles.of_labels(oracles.log_softmax(scores), batch.y) for scores in (balanced, both))


test_conformance = testing.conformance(
    methods.FedRoD(gamma=0.7),
    reference_loss=both_losses,
    expected_bytes=oracles.auxiliary_bytes,
    counted="updates",
    reductions=[Reduction({"gamma": 0.0}, methods.FedAvg(), "received", part="auxiliary_model.")],
)
