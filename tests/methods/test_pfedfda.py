"""pFedFDA against scipy's normal densities: the head, beta by a grid, and what the server averages."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.model_selection import StratifiedKFold
from torch import Tensor

from polyfed import methods, testing
from polyfed.core.client import Client
from polyfed.core.modules import float_state
from polyfed.functional.class_statistics import unpack
from polyfed.methods.pfedfda import Gaussians, PFedFDA, choose_beta, estimate
from tests.helpers import oracles
from tests.helpers.toys import federation, normal, samples, worker

SHARES = np.array([0.2, 0.3, 0.5])


def log_posterior(z: Any, means: Any, covariance: Any, shares: Any) -> Any:
    """By Bayes' rule, of normal densities with a covariance that is shrunk by 1e-4."""
    width = len(covariance)
    shrunk = (1 - 1e-4) * covariance + 1e-4 * np.trace(covariance) / width * np.eye(width)
    return oracles.log_softmax(np.stack([multivariate_normal(m, shrunk).logpdf(z) for m in means], 1) + np.log(shares))


def statistics(z: Any, y: Any, ridge: float) -> tuple[Any, Any]:
    means = np.stack([z[y == c].mean(0) for c in range(3)])
    return means, np.cov((z - means[y]).T, bias=True) * len(z) / (len(z) - 1) + ridge * np.eye(z.shape[1])


def rows(count: int) -> tuple[Tensor, Tensor]:
    y = torch.arange(count) % 3
    return normal(count, 4).double() + y.unsqueeze(1), y


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("apart", [0.0, 3.0])
def test_beta_is_the_best_for_rows_left_out(size: int, apart: float) -> None:
    z, y = rows(30)
    common = Gaussians(torch.full((3, 4), apart) + torch.arange(3).unsqueeze(1).double(), 2 * torch.eye(4).double())
    numbers, labels = z.numpy(), y.numpy()

    def badness(beta: Any) -> float:
        total = 0.0
        for fit, left in StratifiedKFold(2, shuffle=True, random_state=0).split(numbers, labels):
            means, covariance = statistics(numbers[fit], labels[fit], 0.1)
            means = beta[0] * means + (1 - beta[0]) * common.means.numpy()
            covariance = beta[-1] * covariance + (1 - beta[-1]) * common.covariance.numpy()
            total += oracles.of_labels(log_posterior(numbers[left], means, covariance, SHARES), y[left])
        return total

    found = choose_beta(z, y, common, torch.tensor(SHARES), 0.1, size)
    assert badness(found.numpy()) <= min(map(badness, itertools.product(np.linspace(0, 1, 11), repeat=size))) + 1e-3


def test_rows_of_classes_of_their_own_leave_the_federations() -> None:
    z, y = rows(3)
    common = Gaussians(torch.zeros(3, 4).double(), torch.eye(4).double())
    assert choose_beta(z, y, common, torch.tensor(SHARES), 0.1, 2).tolist() == [0, 0]
    means, covariance = estimate(z[:1], y[:1], common, 0.1)
    assert torch.equal(means, torch.cat([z[:1], common.means[1:]])), "classes without rows have the common means"
    assert torch.equal(covariance, 0.1 * torch.eye(4).double())


def test_what_is_sent_averaged_and_scored() -> None:
    members = [Client("deep", samples(30, 0)), Client("deep", samples(10, 1))]
    fed, watch = federation(PFedFDA(ridge=0.1), members, rounds=2)
    fed.run()
    last = watch.rounds[-1]
    for name in ("means", "covariance"):
        mean = (30 * last.up[0][name].double() + 10 * last.up[1][name].double()) / 40
        np.testing.assert_allclose(last.after[name], mean, rtol=1e-5, atol=1e-6)
    at = worker(fed, 0)
    message = fed.method.broadcast(fed.server, 0)
    fed.method.receive(at, message)
    y = at.data.train.y.numpy()
    with torch.no_grad():
        z = at.model.eval().represent(at.data.train.x).double()
        x = samples(9, 5).x
        found, features = fed.method.predict(at.model, x, at.state), at.model.represent(x).double()
    common = Gaussians(message["means"].double(), unpack(message["covariance"].double(), z.shape[1]))
    shares = np.bincount(y, minlength=3) / len(y) + 1e-4
    beta = choose_beta(z, at.data.train.y, common, torch.tensor(shares / shares.sum()), 0.1, 2).numpy()
    means, covariance = statistics(z.numpy(), y, 0.1)
    means = beta[0] * means + (1 - beta[0]) * common.means.numpy()
    covariance = beta[1] * covariance + (1 - beta[1]) * common.covariance.numpy()
    expected = log_posterior(features.numpy(), means, covariance, shares / shares.sum())
    np.testing.assert_allclose(oracles.log_softmax(found), expected, atol=1e-4)


def by_the_received_head(model: Any, batch: Any, context: Any) -> float:
    z = model.represent(batch.x).detach().double().numpy()
    scores = z @ context["common_weight"].double().numpy() + context["common_bias"].double().numpy()
    return oracles.of_labels(oracles.log_softmax(scores), batch.y)


def parts(server: Any, client_id: int) -> tuple[int, int]:
    """P_f, C D and the triangle of D = 6 features; the count of samples goes up as int64."""
    model = server.model(server.clients[client_id].architecture, {})
    numbers = sum(t.numel() for t in float_state(model, parts=("extractor", "intermediate")).values()) + 3 * 6 + 21
    return 4 * numbers, 4 * numbers + 8


test_conformance = testing.conformance(
    methods.PFedFDA(),
    reference_loss=by_the_received_head,
    expected_bytes=parts,
    skip={"learns": "the network's own head stands aside for one that is made of Gaussians"},
)
