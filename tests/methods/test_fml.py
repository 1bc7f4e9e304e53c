"""FML against NumPy by hand; who teaches whom, what each reduction leaves, what BatchNorm and clipping do."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.core.client import Client
from polyfed.methods import FML, Local
from polyfed.methods.building_blocks.auxiliary_model import JointModel
from tests.helpers.toys import (
    NETS,
    Two,
    batch,
    clients,
    federation,
    log_softmax,
    moved,
    rounds,
    same,
    samples,
    two_parameter_clients,
    worker,
)


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


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_one_optimizer_over_both_is_two(kind: str) -> None:
    """A step of the engine is a step of each network by an optimizer of its own on its own loss."""
    settings: dict[str, Any] = {"momentum": 0.9} if kind == "sgd" else {}
    (round,) = rounds(
        FML(shared="deep"), clients(["wide"], 12), rounds=1, local_epochs=3, batch_size=12, optimizer=kind, **settings
    )
    fed, _ = federation(FML(shared="deep"), clients(["wide"], 12), batch_size=12)
    pair: Any = worker(fed, 0).model
    whole, nets = batch(samples(12, 0)), (pair.own, pair.auxiliary_model)
    made = {"sgd": lambda p: torch.optim.SGD(p, 0.1, 0.9), "adam": lambda p: torch.optim.Adam(p, 0.1)}[kind]
    steppers = [made(net.parameters()) for net in nets]
    for _ in range(3):
        scores = [net(whole.x) for net in nets]
        teachers = [torch.log_softmax(s.detach(), 1) for s in scores]
        losses = [
            0.5 * torch.nn.functional.cross_entropy(scores[i], whole.y)
            + 0.5
            * torch.nn.functional.kl_div(
                torch.log_softmax(scores[i], 1), teachers[1 - i], log_target=True, reduction="batchmean"
            )
            for i in (0, 1)
        ]
        for stepper, loss in zip(steppers, losses, strict=True):
            stepper.zero_grad()
            loss.backward()
            stepper.step()
    for name, value in pair.state_dict().items():
        torch.testing.assert_close(round.weights[0][name], value, atol=1e-5, rtol=1e-4)


def test_no_gradient_reaches_the_teacher() -> None:
    """How strongly a network teaches does not show in its own gradient, how strongly it is taught does."""
    pair, data = JointModel(NETS["shallow"](), NETS["deep"]()), batch(samples(8, 0))

    def gradients(alpha: float, beta: float, prefix: str) -> dict[str, torch.Tensor]:
        grads = FML(alpha=alpha, beta=beta).gradients(pair, data, {}).grads
        return {name: g for name, g in grads.items() if name.startswith(prefix) and g is not None}

    for prefix, taught, teaching in (("own.", (0.1, 0.9), (0.1, 0.2)), ("auxiliary_model.", (0.9, 0.1), (0.2, 0.1))):
        one = gradients(*taught, prefix)
        assert one
        assert same(one, gradients(*teaching, prefix))
        assert moved(one, gradients(0.5, 0.5, prefix)) > 1e-3


def test_the_mutual_terms_bite_at_the_defaults() -> None:
    mutual, alone = (rounds(m, clients(["wide", "deep"]), rounds=2)[-1] for m in (FML(), Local()))
    for number in (0, 1):
        own = {n.removeprefix("own."): t for n, t in mutual.weights[number].items() if n.startswith("own.")}
        assert own.keys() == alone.weights[number].keys()
        assert moved(own, alone.weights[number]) > 1e-3
    fedavg = rounds(FML(beta=1.0), clients(["wide", "deep"]), rounds=2)[-1]
    assert moved(mutual.after["auxiliary_model"], fedavg.after["auxiliary_model"]) > 1e-3


def test_equal_networks_teach_each_other_nothing() -> None:
    one = [Client(NETS["deep"](), samples(12, 0))]
    fed, watch = federation(FML(alpha=0.3, beta=0.3), one, rounds=3)
    fed.run()
    plain, other = federation(FML(alpha=0.3, beta=1.0), one, rounds=3)
    for round in watch.rounds:
        own = {n.removeprefix("own."): t for n, t in round.weights[0].items() if n.startswith("own.")}
        assert same(
            own,
            {
                n.removeprefix("auxiliary_model."): t
                for n, t in round.weights[0].items()
                if n.startswith("auxiliary_model.")
            },
        )
    plain.run()
    assert moved(other.rounds[-1].after["auxiliary_model"], watch.rounds[-1].after["auxiliary_model"]) > 1e-3


def test_who_is_absent_keeps_its_network_and_hears_later() -> None:
    history = rounds(FML(), clients(["wide", "broad", "shallow"]), rounds=4, client_fraction=0.4)
    for before, after in itertools.pairwise(history):
        for number in range(3):
            if number not in after.record["clients"]:
                assert after.weights[number] is before.weights[number]
        for message in after.down.values():
            assert same(message["model"], before.after["auxiliary_model"])


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
