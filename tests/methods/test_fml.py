"""FML against NumPy by hand; who teaches whom, what each reduction leaves, what BatchNorm and clipping do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.methods import FML
from tests.helpers.toys import NETS, Two, clients, federation, log_softmax, rounds, same, two_parameter_clients


class Small(nn.Module):
    """One parameter: logits (v x, -x)."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.v * x, -x], dim=1)


def numpy_loss(
    w: np.ndarray, v: np.ndarray, teachers: Any, x: np.ndarray, y: np.ndarray, alpha: float, beta: float
) -> float:
    """L_w + L_m with the teachers' log probabilities (p_w, p_m) given."""
    log_w, log_m = log_softmax(x * w), log_softmax(np.concatenate([v * x, -x], axis=1))
    p_w, p_m = teachers
    rows = np.arange(len(y)), y
    of_w = alpha * -log_w[rows] + (1 - alpha) * (np.exp(p_m) * (p_m - log_w)).sum(1)
    of_m = beta * -log_m[rows] + (1 - beta) * (np.exp(p_w) * (p_w - log_m)).sum(1)
    return float((of_w + of_m).mean())


def numpy_step(w, v, x, y, alpha, beta, lr):
    """Central differences of the loss, the teachers held."""
    teachers = log_softmax(x * w), log_softmax(np.concatenate([v * x, -x], axis=1))
    theta, grad = np.concatenate([w, v]), np.zeros(3)
    for i in range(3):
        up, down = theta.copy(), theta.copy()
        up[i] += 1e-5
        down[i] -= 1e-5
        ends = (numpy_loss(t[:2], t[2:], teachers, x, y, alpha, beta) for t in (up, down))
        grad[i] = (next(ends) - next(ends)) / 2e-5
    theta = theta - lr * grad
    return theta[:2], theta[2:]


@pytest.mark.parametrize(("weighting", "shares"), [("samples", (0.25, 0.75)), ("uniform", (0.5, 0.5))])
def test_two_clients_by_hand(weighting: Any, shares: tuple[float, float]) -> None:
    members = two_parameter_clients()
    method = FML(alpha=0.3, beta=0.8, weighting=weighting, shared="small")
    history = rounds(
        method, members, {"two": Two, "small": Small}, classes=2, rounds=3, local_epochs=2, batch_size=8, lr=0.5
    )
    own, common, signs = [np.array([0.3, -0.2])] * 2, np.array([0.5]), set()
    for round in history:
        ends = []
        for number, member in enumerate(members):
            x, y = member.data.train.x.double().numpy(), member.data.train.y.numpy()
            w, v = own[number], common
            for _ in range(2):
                w, v = numpy_step(w, v, x, y, 0.3, 0.8, 0.5)
            signs.add(float(np.sign(v - common)[0]))
            own[number] = w
            ends.append(v)
            np.testing.assert_allclose(round.weights[number]["own.w"].numpy(), w, atol=1e-5)
        common = sum(s * end for s, end in zip(shares, ends, strict=True))
        np.testing.assert_allclose(round.after["auxiliary_model"]["v"].numpy(), common, atol=1e-5)
    assert signs == {-1.0, 1.0}, "the two clients should pull both ways"


def test_scored_is_the_private_network() -> None:
    fed, watch = federation(FML(), clients(["wide", "broad"], test=9), rounds=2)
    done = fed.run()
    assert fed.stages == ["personal"]
    for number, name in enumerate(["wide", "broad"]):
        model = done.models[number]
        assert model.state_dict().keys() == NETS[name]().state_dict().keys()
        assert same(
            model.state_dict(),
            {n.removeprefix("own."): t for n, t in watch.rounds[-1].weights[number].items() if n.startswith("own.")},
        )
        data = fed.clients[number].data.test
        right = float((model(data.x).argmax(1) == data.y).double().mean())
        assert done.history[-1]["accuracy_per_client"][number] == pytest.approx(right)
