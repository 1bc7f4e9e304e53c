"""ClosedForm recomputed with numpy alone, from stored inputs, by the formulas of its page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import polyfed as pf
from polyfed.core.client import Client
from polyfed.data.transforms import Prepare
from polyfed.methods import ClosedForm
from tests.helpers import regression

Array = NDArray[np.float64]
CLASSES, SHRINKAGE = 3, 0.2
OWNED = ((0, 1), (1, 2), (0, 1))
PREPARE = Prepare(mean=(0.3,), std=(0.2,))


def images(seed: int, owned: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes 1 x 8 x 8, brighter in a row that tells the class."""
    draws = torch.Generator().manual_seed(seed)
    y = torch.tensor(owned)[torch.randint(len(owned), (24,), generator=draws)]
    x = torch.randint(0, 150, (24, 1, 8, 8), generator=draws)
    x[torch.arange(24), :, 2 * y + 1] += 80
    return x.to(torch.uint8), y


def views(x: Array) -> list[Array]:
    """The image and its shifts by a pixel, half of what 8 pixels a side are padded by, along the diagonals."""
    padded = np.pad(x, ((1, 1), (1, 1)))
    shifted = [padded[i : i + 8, j : j + 8] for i, j in ((0, 0), (2, 2), (0, 2), (2, 0))]
    return [one for image in (x, *shifted) for one in (image, image[:, ::-1])]


def features(x: Array, filters: Array, bias: Array) -> Array:
    """The map of an image (8, 8) of bytes."""
    padded = np.pad((x / 255 - 0.3) / 0.2, 1)
    found = []
    for one, beyond in zip(filters, bias, strict=True):
        maps = np.array([[(padded[i : i + 3, j : j + 3] * one).sum() + beyond for j in range(8)] for i in range(8)])
        cells = np.maximum(maps, 0).reshape(2, 4, 2, 4).mean(axis=(1, 3))
        found.append(np.sqrt(np.maximum(cells, 1e-8)).flatten())
    return np.concatenate(found)


def covariance_of_rows(phi: list[Array], y: list[Array], mean: Array) -> Array:
    """Sigma, of rows of views (N, V, D) of each client."""
    off = [rows - mean[labels][:, None] for rows, labels in zip(phi, y, strict=True)]
    seconds = sum(np.einsum("nvd,nve->de", one, one) / one.shape[1] for one in off)
    return np.asarray(seconds / sum(len(labels) for labels in y))


def covariance_of_means(phi: list[Array], y: list[Array], mean: Array) -> Array:
    scatter = np.zeros((mean.shape[1], mean.shape[1]))
    free = 0
    for label in range(CLASSES):
        held = [rows[labels == label].mean(axis=1) for rows, labels in zip(phi, y, strict=True) if label in labels]
        for rows in held:
            off = rows.mean(axis=0) - mean[label]
            scatter += len(rows) * np.outer(off, off)
        free += len(held) - 1
    return scatter / free


@pytest.mark.parametrize("second_moments", ["rows", "clients"])
def test_classes(second_moments: Literal["rows", "clients"]) -> None:
    data = [images(i, owned) for i, owned in enumerate(OWNED)]
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, CLASSES))
    method = ClosedForm(map="random", features=12, shrinkage=SHRINKAGE, second_moments=second_moments)
    clients = [Client(network, train, images(9, (0, 1, 2)), prepare=PREPARE) for train in data]
    run = pf.Federation(clients, method, pf.Training(rounds=2, augmentation="crop-flip"))
    run.run()
    state = run.clients[0].state
    filters, bias = (state["map"][name].double().numpy() for name in ("filters", "bias"))
    filters = filters[:, 0]
    assert np.allclose(filters.sum(axis=(1, 2)), 0, atol=1e-6)
    assert np.allclose(np.square(filters).sum(axis=(1, 2)), 1)

    phi = [
        np.array([[features(v, filters, bias) for v in views(x[0])] for x in own.double().numpy()]) for own, _ in data
    ]
    y = [labels.numpy() for _, labels in data]
    means = np.concatenate([rows.mean(axis=1) for rows in phi])
    labels = np.concatenate(y)
    mean = np.array([means[labels == c].mean(axis=0) for c in range(CLASSES)])
    covariance = {"rows": covariance_of_rows, "clients": covariance_of_means}[second_moments](phi, y, mean)
    scale = np.trace(covariance) / len(covariance)
    weight = np.linalg.solve((1 - SHRINKAGE) * covariance + SHRINKAGE * scale * np.eye(len(covariance)), mean.T)
    offset = -(mean.T * weight).sum(axis=0) / 2
    own = np.array([(y[0] == c).mean() for c in range(CLASSES)])
    assert own[2] == 0

    x, _ = images(9, (0, 1, 2))
    temperature = 0.5  # without validation rows
    scores = temperature * (np.array([features(one[0], filters, bias) for one in x.double().numpy()]) @ weight + offset)
    with np.errstate(divide="ignore"):
        scores += np.log(own)
    expected = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    found = method.predict(None, PREPARE(x), state).numpy()
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-3)


def test_numbers() -> None:
    method = ClosedForm(features=30, shrinkage=SHRINKAGE)
    run = pf.Federation(regression.clients(), method, pf.Training(rounds=2))
    run.run()
    state = run.clients[0].state
    projection, bias = (state["map"][name].double().numpy() for name in ("projection", "bias"))

    def phi(client: Client) -> Array:
        return np.maximum(client.prepare(client.data.train.x).flatten(1).double().numpy() @ projection + bias, 0)

    rows = np.concatenate([phi(client) for client in run.clients])
    y = np.concatenate([client.data.train.y.double().numpy().flatten() for client in run.clients])
    centered = rows - rows.mean(axis=0)
    covariance = centered.T @ centered / len(rows)
    ridge = SHRINKAGE / (1 - SHRINKAGE) * np.trace(covariance) / len(covariance)
    slope = centered.T @ (y - y.mean()) / len(rows)
    weight = np.linalg.solve(covariance + ridge * np.eye(len(covariance)), slope)
    expected = y.mean() + (phi(run.clients[0]) - rows.mean(axis=0)) @ weight
    x = run.clients[0].prepare(run.clients[0].data.train.x)
    assert method.predict(None, x, state).flatten().numpy() == pytest.approx(expected, rel=1e-4, abs=1e-4)
