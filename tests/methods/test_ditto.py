"""Ditto by hand: the common network is FedAvg's, the personal one is pulled to it as it was received."""

from __future__ import annotations

import numpy as np
import pytest
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.methods import Ditto, Local
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.toys import Two, rounds, two_gradient, two_parameter_clients


class FromOneStart(Local):
    """Local, of networks that start alike."""

    common_start = "all"


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_rounds_by_hand(weighting):
    """Also the logged loss; who was not drawn keeps its personal network."""
    members, pull, lr = two_parameter_clients(3), 0.7, 0.5
    method = Ditto(pull=pull, weighting=weighting)
    history = rounds(
        method, members, {"two": Two}, classes=2, rounds=5, local_epochs=3, batch_size=8, lr=lr, client_fraction=0.7
    )
    w = np.array([0.3, -0.2])
    own, drawn = [w, w, w], set()
    for round in history:
        ends, losses = [], []
        for i in round.record["clients"]:
            data, common, personal = members[i].data.train, w, own[i]
            for _ in range(3):
                task = sum(F.cross_entropy(data.x * data.x.new_tensor(v), data.y).item() for v in (common, personal))
                losses.append((task + pull / 2 * ((personal - w) ** 2).sum(), len(data)))
                common = common - lr * two_gradient(common, data)
                personal = personal - lr * (two_gradient(personal, data) + pull * (personal - w))
            own[i] = personal
            ends.append((common, len(data) if weighting == "samples" else 1))
        drawn.add(tuple(round.record["clients"]))
        w = sum(end * n for end, n in ends) / sum(n for _, n in ends)
        np.testing.assert_allclose(round.after["auxiliary_model"]["w"].numpy(), w, atol=1e-6)
        for i in round.record["clients"]:
            np.testing.assert_allclose(round.weights[i]["own.w"].numpy(), own[i], atol=1e-6)
        loss = sum(value * n for value, n in losses) / sum(n for _, n in losses)
        assert round.record["train_loss"] == pytest.approx(loss, abs=1e-6)
    assert len(drawn) > 1


def two_losses_and_the_pull(model, batch, context):
    """CE of both networks + (0.35 / 2) ||v - w_received||^2 in float64."""
    received = context["received"]
    apart = [(v.detach() - received[f"own.{name}"]).double().numpy() for name, v in model.own.named_parameters()]
    both = sum(oracles.cross_entropy(network, batch, context) for network in (model.own, model.auxiliary_model))
    return both + 0.35 / 2 * sum(float((d**2).sum()) for d in apart)


test_conformance = testing.conformance(
    methods.Ditto(pull=0.35),
    reference_loss=two_losses_and_the_pull,
    expected_bytes=oracles.auxiliary_bytes,
    counted="updates",
    reductions=[
        Reduction({"pull": 0.0}, FromOneStart(), part="own."),
        Reduction({}, methods.FedAvg(), "received", part="auxiliary_model."),
    ],
)
