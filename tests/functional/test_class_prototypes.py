"""One row per class: means, merging, losses, the nearest row and the header's step against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from polyfed.functional.class_prototypes import (
    batch_class_sums,
    class_means,
    distances,
    merge,
    nearest_distances,
    prototype_distance,
    soft_cross_entropy,
    to_dense,
)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([4, 0, 4, 2, 0, 4], dtype=torch.int32)
COUNTS = torch.tensor([3.0, 1.0, 5.0, 2.0, 7.0, 1.0])


def test_merge_is_the_weighted_mean_of_each_class() -> None:
    rows = draw(6, 3)
    labels, found = merge(rows, LABELS, COUNTS)
    assert labels.tolist() == [0, 2, 4]
    assert labels.dtype == torch.int32
    for label, row in zip([0, 2, 4], found, strict=True):
        mine = (label == LABELS).numpy()
        expected = np.average(rows.double().numpy()[mine], axis=0, weights=COUNTS.numpy()[mine])
        assert row.numpy() == pytest.approx(expected, rel=1e-6)


def numpy_distance(z: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return ((z - t) ** 2).mean(1), 2 * (z - t) / z.shape[1]


def numpy_cross_entropy(z: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    return -(t * np.log(p)).sum(1), p - t


@pytest.mark.parametrize(
    ("loss", "by_hand"),
    [(prototype_distance, numpy_distance), (soft_cross_entropy, numpy_cross_entropy)],
)
def test_losses_towards_known_rows_against_numpy_and_their_gradients(loss: Any, by_hand: Any) -> None:
    """Targets are rows that sum to 1, as soft cross entropy has them."""
    z, targets, known = draw(5, 4).requires_grad_(), *to_dense(draw(2, 4, seed=3).softmax(1), torch.tensor([0, 2]), 3)
    y, w = torch.tensor([0, 1, 2, 2, 1]), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    value = loss(z, y, w, targets, known)
    rows, slopes = by_hand(z.detach().double().numpy(), targets.double().numpy()[y])
    shares = (w * known[y]).double().numpy() / 4
    assert float(value.detach()) == pytest.approx(float((shares * rows).sum()), rel=1e-6)
    (gradient,) = torch.autograd.grad(value, z)
    assert gradient.numpy() == pytest.approx(slopes * shares[:, None], abs=1e-6)
    assert gradient.min() < 0 < gradient.max()
    assert not gradient[[1, 2, 4]].any()  # no target, or no weight
    assert float(loss(z.detach(), y, torch.zeros(5), targets, known)) == 0.0
    assert torch.autograd.grad(loss(z * 0, y, w, targets, known), z)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distances_far_from_zero_are_as_precise_as_the_rows(dtype: torch.dtype) -> None:
    z, rows = draw(40, 3).to(dtype) + 100, draw(4, 3, seed=1).to(dtype) + 100
    gaps = np.linalg.norm(z.double().numpy()[:, None] - rows.double().numpy()[None], axis=2)
    assert distances(z, rows).dtype == dtype
    np.testing.assert_allclose(distances(z, rows).numpy(), gaps, rtol=1e-5 if dtype == torch.float32 else 1e-12)
    among = np.linalg.norm(rows.numpy()[:, None] - rows.numpy()[None], axis=2) + np.diag([np.inf] * 4)
    np.testing.assert_allclose(nearest_distances(rows).numpy(), among.min(1), rtol=1e-5)
    assert nearest_distances(torch.ones(2, 3)).tolist() == [0, 0]


def data(n=100, d=6, classes=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g).abs(), torch.randint(0, classes, (n,), generator=g)


def test_against_numpy():
    z, y = data()
    y[y == 3] = 1
    labels, means, counts = class_means(z, y, 5)
    assert labels.tolist() == [0, 1, 2, 4]
    assert (labels.dtype, means.dtype, counts.dtype) == (torch.int32, torch.float32, torch.int64)
    for s, mean, count in zip(labels.tolist(), means.numpy(), counts.tolist(), strict=True):
        rows = z.numpy()[y.numpy() == s].astype(np.float64)
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-7)
        assert count == len(rows)


def test_duplicates_and_order_do_not_show():
    z, y = data(100)
    _, expected, _ = class_means(z, y, 5)
    _, doubled, counts = class_means(torch.cat([z, z]), torch.cat([y, y]), 5)
    assert torch.equal(doubled, expected)
    assert counts.sum() == 200
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    assert torch.equal(class_means(z[order], y[order], 5)[1], expected)


def test_bad_calls():
    z, _ = data(4)
    with pytest.raises(ValueError, match=r"\[0, 3\), got -1 to 1"):
        class_means(z[:2], torch.tensor([-1, 1]), 3)
    with pytest.raises(ValueError, match=r"\[0, 3\), got 0 to 3"):
        class_means(z[:2], torch.tensor([0, 3]), 3)


def test_sums_of_a_batch() -> None:
    z, y = draw(7, 3), torch.tensor([2, 0, 2, 2, 4, 0, 3])
    w = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0, 1.0, 0.0])
    sums, totals = batch_class_sums(z, y, w, classes=5)
    assert totals.tolist() == [3.0, 0.0, 2.5, 0.0, 1.0]
    expected = [(z.double() * w[:, None].double())[y == c].sum(0).numpy() for c in range(5)]
    np.testing.assert_allclose(sums.numpy(), np.stack(expected), atol=1e-6)
