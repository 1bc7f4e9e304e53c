"""One row per class: means, merging, losses, the nearest row and the header's step against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from polyfed.functional.class_prototypes import (
    align,
    batch_class_sums,
    class_means,
    header_sgd_step,
    merge,
    most_similar,
    nearest_prototype_scores,
    prototype_distance,
    soft_cross_entropy,
    soft_header_sgd_step,
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


def numpy_angle(z: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.linalg.norm(z, axis=1, keepdims=True)
    unit = t / np.maximum(np.linalg.norm(t, axis=1, keepdims=True), 1e-12)
    cosine = (z * unit).sum(1, keepdims=True) / lengths
    return 1 - cosine[:, 0], (cosine * z / lengths - unit) / lengths


def numpy_cross_entropy(z: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    return -(t * np.log(p)).sum(1), p - t


@pytest.mark.parametrize(
    ("loss", "by_hand"),
    [(prototype_distance, numpy_distance), (align, numpy_angle), (soft_cross_entropy, numpy_cross_entropy)],
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
def test_scores_are_as_precise_as_representations_and_rule_out_who_has_no_row(dtype: torch.dtype) -> None:
    z, rows, labels = draw(40, 3).to(dtype) + 100, draw(2, 3, seed=1).to(dtype) + 100, torch.tensor([3, 1])
    near, turned = nearest_prototype_scores(z, rows, labels, 4), most_similar(z, rows, labels, 4)
    a, b = z.double().numpy(), rows.double().numpy()
    gaps = np.linalg.norm(a[:, None] - b[None], axis=2)
    cosines = a @ b.T / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)
    for found, expected in ((near, -gaps), (turned, cosines)):
        assert found.dtype == dtype
        assert found[:, [0, 2]].eq(-torch.inf).all()
        np.testing.assert_allclose(found[:, labels].numpy(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-12)


def test_a_step_to_soft_labels_is_that_of_autograd() -> None:
    theta, bias = draw(4, 5, seed=1), draw(4, seed=2)
    z, q = draw(3, 5, seed=3), torch.softmax(draw(3, 4, seed=4), 1)
    w, b = theta.clone().requires_grad_(), bias.clone().requires_grad_()
    F.cross_entropy(z @ w.T + b, q, reduction="sum").backward()
    found = soft_header_sgd_step(theta, bias, z, q, 0.3)
    assert w.grad is not None
    assert b.grad is not None
    torch.testing.assert_close(found[0], theta - 0.3 * w.grad)
    torch.testing.assert_close(found[1], bias - 0.3 * b.grad)
    assert torch.equal(theta, draw(4, 5, seed=1))
    assert all(map(torch.equal, soft_header_sgd_step(theta, bias, z, q, 0.0), (theta, bias)))


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


def header(c=4, d=6, m=7, seed=1, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    weight, bias, z = (torch.randn(*s, generator=g, dtype=dtype) for s in ((c, d), (c,), (m, d)))
    return weight, bias, z, torch.randint(0, c, (m,), generator=g), torch.rand(m, generator=g, dtype=dtype)


@pytest.mark.parametrize("clip", [None, 0, 0.05, 50])
@pytest.mark.parametrize("m", [1, 7])
def test_step_against_autograd(m, clip):
    weight, bias, z, y, w = header(m=m)
    new_weight, new_bias = header_sgd_step(weight, bias, z, y, w, 0.3, clip)
    params = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    ((w * F.cross_entropy(z @ params[0].T + params[1], y, reduction="none")).sum() / w.sum()).backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(params, clip)
    torch.testing.assert_close(new_weight, weight - 0.3 * params[0].grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(new_bias, bias - 0.3 * params[1].grad, rtol=1e-5, atol=1e-7)


def test_pairs_without_weight_move_nothing():
    weight, bias, z, y, w = header()
    step = header_sgd_step(weight, bias, z, y, w, 0.3, 0)
    torch.testing.assert_close(header_sgd_step(weight, bias, z, y, 9 * w, 0.3, 0), step)
    assert torch.equal(header_sgd_step(weight, bias, z, y, 0 * w, 0.3, 0)[0], weight)


def test_sums_of_a_batch() -> None:
    z, y = draw(7, 3), torch.tensor([2, 0, 2, 2, 4, 0, 3])
    w = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0, 1.0, 0.0])
    sums, totals = batch_class_sums(z, y, w, classes=5)
    assert totals.tolist() == [3.0, 0.0, 2.5, 0.0, 1.0]
    expected = [(z.double() * w[:, None].double())[y == c].sum(0).numpy() for c in range(5)]
    np.testing.assert_allclose(sums.numpy(), np.stack(expected), atol=1e-6)
