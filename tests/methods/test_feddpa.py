"""FedDPA against NumPy by hand: which entries are personal, which move when, what is released."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from polyfed import methods, testing
from polyfed.core.client import Client
from polyfed.methods import Local
from polyfed.methods.feddpa import FedDPA, min_max_normalize
from polyfed.testing import Reduction
from tests.helpers import oracles
from tests.helpers.toys import INPUTS, Flat, flat_clients, rounds, same, samples


def errors(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    p = np.exp(x @ w.T)
    return p / p.sum(1, keepdims=True) - np.eye(3)[y]


def numpy_client(
    own: np.ndarray, w: np.ndarray, data: Any, m: FedDPA, lr: float, epochs: int
) -> tuple[np.ndarray, np.ndarray]:
    """The client's weights after training, and its mask."""
    x, y = data.x.double().numpy(), data.y.numpy()
    fisher = np.einsum("nc,nd->cd", errors(own, x, y) ** 2, x**2) / len(x)
    mask = (fisher - fisher.min()) / (fisher.max() - fisher.min()) > m.threshold
    end = np.where(mask, own, w)
    for moves, first in ((mask, True), (~mask, False)):
        for _ in range(epochs):
            grad, u = errors(end, x, y).T @ x / len(x), end - w
            size = np.linalg.norm(u)
            unit = u / size if size else u
            pull = m.lambda1 * u if first else m.lambda2 * unit * (size - m.max_update_norm)
            grad = grad + pull
            end = end - lr * moves * grad
    return end, mask


def test_two_clients_by_hand() -> None:
    members, lr = flat_clients(), 0.3
    m = FedDPA(lambda1=0.6, lambda2=0.8, max_update_norm=0.2)
    history = rounds(m, members, {"flat": Flat}, rounds=4, local_epochs=3, batch_size=8, lr=lr)
    w = Flat().weight.detach().double().numpy()
    own = [w, w]
    signs: set[float] = set()
    for round in history:
        ends, sent = [], []
        for i, client in enumerate(members):
            end, mask = numpy_client(own[i], w, client.data.train, m, lr, 3)
            assert 0 < mask.sum() < 6
            u = np.where(mask, 0, end - w)
            np.testing.assert_allclose(round.weights[i]["weight"], end, atol=1e-5)
            np.testing.assert_allclose(round.up[i]["model"]["weight"], w + u, atol=1e-5)
            signs |= set(np.sign(u).ravel().tolist())
            ends, sent = [*ends, end], [*sent, u]
        own = ends
        w = w + 0.25 * sent[0] + 0.75 * sent[1]
        np.testing.assert_allclose(round.after["model union"]["weight"], w, atol=1e-5)
    assert signs >= {-1.0, 1.0}


def given(*sizes: int) -> list[Client]:
    """Clients that start from one network of their own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 5), nn.Tanh(), nn.Linear(5, 3))
    return [Client(model, samples(n, i)) for i, n in enumerate(sizes)]


def test_with_everything_personal_and_no_pull_it_is_local() -> None:
    runs = [rounds(m, given(9, 14), rounds=3, momentum=0.5) for m in (FedDPA(threshold=-0.1, lambda1=0.0), Local())]
    assert all(same(runs[0][-1].weights[i], runs[1][-1].weights[i]) for i in (0, 1))
    start = runs[0][0].before["model union"]
    assert all(same(round.after["model union"], start) for round in runs[0]), "nothing reaches w"


def test_a_constant_tensor_has_the_range_0() -> None:
    t = torch.tensor([[0.3, -1.0], [2.0, 0.0]])
    np.testing.assert_allclose(min_max_normalize(t), (t.numpy() + 1) / 3, atol=1e-7)
    assert min_max_normalize(torch.full((3,), 2.5)).tolist() == [0, 0, 0]
    assert min_max_normalize(torch.zeros(0)).shape == (0,)


def pulled(model: Any, batch: Any, context: Any) -> float:
    """CE + 0.4 / 2 ||w - w_received||^2, or + 0.3 / 2 (||w - w_received|| - 0.5)^2, in float64."""
    gaps = [p.detach().double().numpy() - context["w"][n].double().numpy() for n, p in model.named_parameters()]
    squared = sum(float((gap**2).sum()) for gap in gaps)
    pull = 0.2 * squared if context["personal turn"] else 0.15 * (np.sqrt(squared) - 0.5) ** 2
    return oracles.cross_entropy(model, batch, context) + pull


test_conformance = testing.conformance(
    methods.FedDPA(lambda1=0.4, lambda2=0.3),
    reference_loss=pulled,
    expected_bytes=oracles.of_weights(),
    reductions=[Reduction({"threshold": 1.0, "lambda2": 0.0}, methods.FedAvg(), "received")],
)
