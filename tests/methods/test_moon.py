"""MOON against gradients by hand: drawn to what was received, away from the client's own last model."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.methods import MOON
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.toys import NETS, clients, model_with, rounds


def term(z, near, far, temperature):
    """l_con as it stands in the paper."""
    a, b = (torch.exp((F.normalize(z) * F.normalize(o)).sum(1) / temperature) for o in (near, far))
    return -torch.log(a / (a + b)).mean()


@pytest.mark.parametrize("architecture", ["deep", "bn"])
def test_rounds_by_hand(architecture):
    """Full batches, three epochs: every client's way from what was received, with its own last model as it then was."""
    members, mu, temperature = clients([architecture] * 3, 8), 2.0, 0.3
    method = MOON(mu=mu, temperature=temperature)
    history = rounds(method, members, rounds=4, local_epochs=3, batch_size=8, lr=0.3, client_fraction=0.7)
    last, seen, losses = {}, 0, []
    for round in history:
        for i in round.record["clients"]:
            data = members[i].data.train
            model, near = (model_with(NETS[architecture], round.down[i]["model"]) for _ in range(2))
            far = model_with(NETS[architecture], last.get(i, round.down[i]["model"]))
            seen += i in last
            optimizer = torch.optim.SGD(model.train().parameters(), 0.3)
            for _ in range(3):
                optimizer.zero_grad()
                z = model.represent(data.x)
                with torch.no_grad():
                    others = near.represent(data.x), far.represent(data.x)
                loss = F.cross_entropy(model.head(z), data.y) + mu * term(z, *others, temperature)
                loss.backward()
                losses.append(float(loss.detach()))
                optimizer.step()
            for name, t in round.up[i]["model"].items():
                torch.testing.assert_close(t, model.state_dict()[name], atol=2e-5, rtol=1e-4)
            last[i] = dict(round.trained[i])
        assert round.record["train_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
        losses = []
    assert seen >= 3, "clients should come again"


test_conformance = testing.conformance(
    methods.MOON(mu=1.5, temperature=0.4),
    expected_bytes=oracles.averaging_bytes,
    counted="updates",
    reductions=[Reduction({"mu": 0.0}, methods.FedAvg(), "received")],
)
