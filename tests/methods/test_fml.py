"""FML against steps by hand; who teaches whom, what each reduction leaves, what BatchNorm and clipping do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.methods import FML
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.toys import Two, rounds, two_parameter_clients


class Small(nn.Module):
    """One parameter: logits (v x, -x)."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.v * x, -x], dim=1)


def step_by_hand(w: Tensor, v: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both after a step of rate 0.5 on L_w + L_m, alpha 0.3 and beta 0.8, the teachers held."""
    w, v = (t.clone().requires_grad_() for t in (w, v))
    log_w, log_m = (x * w).log_softmax(1), torch.cat([v * x, -x], dim=1).log_softmax(1)
    p_w, p_m = log_w.detach().exp(), log_m.detach().exp()
    of_w = 0.3 * F.nll_loss(log_w, y) + 0.7 * (p_m * (p_m.log() - log_w)).sum(1).mean()
    of_m = 0.8 * F.nll_loss(log_m, y) + 0.2 * (p_w * (p_w.log() - log_m)).sum(1).mean()
    of_w, of_m = torch.autograd.grad(of_w + of_m, (w, v))
    return (w - 0.5 * of_w).detach(), (v - 0.5 * of_m).detach()


@pytest.mark.parametrize(("weighting", "shares"), [("samples", (0.25, 0.75)), ("uniform", (0.5, 0.5))])
def test_two_clients_by_hand(weighting: Any, shares: tuple[float, float]) -> None:
    members = two_parameter_clients()
    method = FML(alpha=0.3, beta=0.8, weighting=weighting, shared="small")
    history = rounds(
        method, members, {"two": Two, "small": Small}, classes=2, rounds=3, local_epochs=2, batch_size=8, lr=0.5
    )
    own, common, signs = [torch.tensor([0.3, -0.2])] * 2, torch.tensor([0.5]), set()
    for round in history:
        ends = []
        for number, member in enumerate(members):
            w, v = own[number], common
            for _ in range(2):
                w, v = step_by_hand(w, v, member.data.train.x, member.data.train.y)
            signs.add(float((v - common).sign()))
            own[number] = w
            ends.append(v)
            torch.testing.assert_close(round.weights[number]["own.w"], w, atol=1e-5, rtol=0)
        common = shares[0] * ends[0] + shares[1] * ends[1]
        torch.testing.assert_close(round.after["auxiliary_model"]["v"], common, atol=1e-5, rtol=0)
    assert signs == {-1.0, 1.0}, "the two clients should pull both ways"


test_conformance = testing.conformance(
    methods.FML(alpha=0.3, beta=0.6),
    expected_bytes=oracles.auxiliary_bytes,
    counted="updates",
    changed_values={"shared": "largest"},
    reductions=[
        Reduction({"alpha": 1.0}, methods.Local(), part="own."),
        Reduction({"beta": 1.0}, methods.FedAvg(), "received", same_architecture=True, part="auxiliary_model."),
    ],
)
