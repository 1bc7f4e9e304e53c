"""One row per class: merging, losses and the nearest row against NumPy; the network behind trained prototypes."""

from __future__ import annotations

import functools
from itertools import permutations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from polyfed.functional import server_prototypes
from polyfed.functional.class_prototypes import (
    align,
    batch_class_means,
    entangle,
    merge,
    most_similar,
    nearest_prototype_scores,
    prototype_distance,
    soft_cross_entropy,
    soft_header_sgd_step,
    structure_loss,
    to_dense,
    update_rows,
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


def test_renewed_keeps_what_is_not_new() -> None:
    old, new = draw(3, 2), draw(2, 2, seed=1)
    labels, rows = update_rows(old, torch.tensor([0, 2, 5]), new, torch.tensor([1, 2]))
    assert labels.tolist() == [0, 1, 2, 5]
    assert torch.equal(rows, torch.stack([old[0], new[0], new[1], old[2]]))


def test_pull_against_numpy_and_its_gradient() -> None:
    z, prototypes, known = draw(5, 4).requires_grad_(), *to_dense(draw(2, 4, seed=3), torch.tensor([0, 2]), 3)
    y, w = torch.tensor([0, 1, 2, 2, 1]), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    value = prototype_distance(z, y, w, prototypes, known)
    gap = z.detach().double().numpy() - prototypes.double().numpy()[y]
    counts = (w * known[y]).double().numpy()
    assert float(value.detach()) == pytest.approx(float((counts * (gap**2).mean(1)).sum() / 4), rel=1e-6)
    (gradient,) = torch.autograd.grad(value, z)
    assert gradient.numpy() == pytest.approx(2 * gap * counts[:, None] / 4 / 4, rel=1e-5)
    assert (gap[0] > 0).any()
    assert (gap[0] < 0).any()  # both signs
    assert not gradient[[1, 2, 4]].any()  # no prototype, or no weight
    assert float(prototype_distance(z.detach(), y, torch.zeros(5), prototypes, known)) == 0.0


def test_soft_cross_entropy_against_numpy_and_its_gradient() -> None:
    logits, y, w = draw(4, 3).requires_grad_(), torch.tensor([0, 1, 2, 0]), torch.ones(4)
    targets, known = to_dense(torch.softmax(draw(2, 3, seed=5), 1), torch.tensor([0, 1]), 3)
    value = soft_cross_entropy(logits, y, w, targets, known)
    f = logits.detach().double().numpy()
    p = np.exp(f) / np.exp(f).sum(1, keepdims=True)
    t = targets.double().numpy()[y]
    there = np.array([1, 1, 0, 1])
    assert float(value.detach()) == pytest.approx(float(-(there * (t * np.log(p)).sum(1)).sum() / 4), rel=1e-6)
    (gradient,) = torch.autograd.grad(value, logits)
    assert gradient.numpy() == pytest.approx((p - t) * there[:, None] / 4, abs=1e-6)


def test_align_against_numpy_and_its_gradient() -> None:
    z, prototypes, known = draw(5, 4).requires_grad_(), *to_dense(draw(2, 4, seed=3), torch.tensor([0, 2]), 3)
    y, w = torch.tensor([0, 1, 2, 2, 1]), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    value = align(z, y, w, prototypes, known)
    a, b = z.detach().double().numpy(), prototypes.double().numpy()[y]
    lengths = np.linalg.norm(a, axis=1, keepdims=True)
    unit = b / np.maximum(np.linalg.norm(b, axis=1, keepdims=True), 1e-12)
    cosine = (a * unit).sum(1, keepdims=True) / lengths
    counts = (w * known[y]).double().numpy()[:, None]
    assert float(value.detach()) == pytest.approx(float((counts * (1 - cosine)).sum() / 4), rel=1e-6)
    (gradient,) = torch.autograd.grad(value, z)
    assert gradient.numpy() == pytest.approx(-counts / 4 * (unit - cosine * a / lengths) / lengths, abs=1e-6)
    assert not gradient[[1, 2, 4]].any()  # no prototype, or no weight
    twice = align(2 * z.detach(), y, w, 3 * prototypes, known)
    assert float(twice) == pytest.approx(float(value.detach()), rel=1e-6)  # only angles count
    assert torch.autograd.grad(align(z * 0, y, w, prototypes, known), z)[0].isfinite().all()


# the network behind trained prototypes ------------------------------------------------------------------------------


def apart(margin: float) -> server_prototypes.Loss:
    return functools.partial(server_prototypes.margin_loss, margin=margin)


def numpy_loss(weights: dict[str, np.ndarray], rows: np.ndarray, labels: np.ndarray, margin: float) -> float:
    hidden = np.maximum(weights["embedding"] @ weights["hidden.weight"].T + weights["hidden.bias"], 0)
    p = hidden @ weights["output.weight"].T + weights["output.bias"]
    d = np.linalg.norm(rows[:, None] - p[None], axis=2)
    d[np.arange(len(rows)), labels] += margin
    return float((d[np.arange(len(rows)), labels] + np.log(np.exp(-d).sum(1))).mean())


def test_a_step_of_the_fit_against_finite_differences() -> None:
    weights = server_prototypes.init_network(3, 5, 4, torch.Generator().manual_seed(0))
    rows, labels = draw(4, 4), torch.tensor([0, 2, 0, 1], dtype=torch.int32)
    before = {name: t.clone() for name, t in weights.items()}
    new, loss = server_prototypes.train_network(
        weights, rows, labels, apart(0.7), 1, 4, 0.5, torch.Generator().manual_seed(1)
    )
    w = {name: t.double().numpy() for name, t in weights.items()}
    assert loss == pytest.approx(numpy_loss(w, rows.double().numpy(), labels.numpy(), 0.7), rel=1e-5)
    for name, t in w.items():
        assert torch.equal(weights[name], before[name])
        for place in list(np.ndindex(t.shape))[:6]:
            values = []
            for way in (1e-5, -1e-5):
                moved = {**w, name: t.copy()}
                moved[name][place] += way
                values.append(numpy_loss(moved, rows.double().numpy(), labels.numpy(), 0.7))
            slope = (values[0] - values[1]) / 2e-5
            assert float(new[name][place]) == pytest.approx(t[place] - 0.5 * slope, abs=1e-5)


def test_initial_layers_are_uniform_within_one_over_the_root_of_their_inputs() -> None:
    made = server_prototypes.init_network(3, 400, 100, torch.Generator().manual_seed(0))
    for layer, inputs in (("hidden", 100), ("output", 400)):
        assert 0.95 * inputs**-0.5 < float(made[f"{layer}.weight"].abs().max()) <= inputs**-0.5


def test_the_margin_is_the_largest_gap_to_the_nearest() -> None:
    centers = draw(4, 3)
    d = np.linalg.norm(centers.numpy()[:, None] - centers.numpy()[None], axis=2) + np.diag([np.inf] * 4)
    assert server_prototypes.margin(centers, 100.0) == pytest.approx(d.min(1).max(), rel=1e-6)
    assert server_prototypes.margin(centers, 0.1) == 0.1
    assert server_prototypes.margin(centers[:1], 100.0) == 100.0


def test_orthogonality_against_numpy_with_cosines_of_both_signs() -> None:
    p, rows, labels = draw(3, 4), draw(5, 4, seed=1), torch.tensor([0, 2, 1, 1, 0])
    a, b = (t.double().numpy() for t in (rows, p))
    cosines = np.array([[x @ y / np.linalg.norm(x) / np.linalg.norm(y) for y in b] for x in a])
    own = np.eye(3)[labels]
    assert (cosines[own == 0] < 0).any()
    assert (cosines[own == 0] > 0).any()
    for gamma in (0.0, 0.5, 2.0):
        expected = (1 - cosines)[own == 1].mean() + gamma * np.abs(cosines[own == 0]).mean()
        found = server_prototypes.orthogonality(p, rows, labels, gamma)
        assert float(found) == pytest.approx(expected, rel=1e-6)


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


def test_the_margin_loss_keeps_small_distances_of_many_rows_far_from_zero() -> None:
    """By products of rows, as PyTorch takes distances of more than 25 rows, they would drown in rounding."""
    rows, prototypes = 1000 + 0.1 * draw(60, 3), 1000 + 0.1 * draw(5, 3, seed=1)
    labels = torch.arange(60) % 5
    gaps = np.linalg.norm(rows.double().numpy()[:, None] - prototypes.double().numpy()[None], axis=2)
    away = np.exp(-gaps - 0.5 * np.eye(5)[labels.numpy()])
    expected = -np.log(away[np.arange(60), labels.numpy()] / away.sum(1)).mean()
    found = server_prototypes.margin_loss(prototypes, rows, labels, 0.5)
    assert float(found) == pytest.approx(expected, rel=1e-5)


# mixtures -----------------------------------------------------------------------------------------------------------


def test_the_mixture_and_its_label_have_the_same_weights() -> None:
    rows, labels, weights = draw(3, 5), torch.tensor([4, 0, 2]), torch.tensor([0.2, 0.9, 0.5])
    mixture, encoding = entangle(rows, labels, weights, classes=6)
    shares = weights.double().numpy() / 1.6
    assert mixture.numpy() == pytest.approx(shares @ rows.double().numpy(), abs=1e-6)
    assert encoding.tolist() == pytest.approx([shares[1], 0, shares[2], 0, shares[0], 0])
    again = entangle(rows, labels, 7 * weights, classes=6)
    assert torch.allclose(again[0], mixture)
    assert torch.allclose(again[1], encoding)


def header() -> tuple[torch.Tensor, torch.Tensor]:
    return draw(4, 5, seed=1), draw(4, seed=2)


def test_a_step_is_that_of_autograd() -> None:
    theta, bias = header()
    z, q = draw(3, 5, seed=3), torch.softmax(draw(3, 4, seed=4), 1)
    w, b = theta.clone().requires_grad_(), bias.clone().requires_grad_()
    F.cross_entropy(z @ w.T + b, q, reduction="sum").backward()
    found = soft_header_sgd_step(theta, bias, z, q, 0.3)
    assert w.grad is not None
    assert b.grad is not None
    torch.testing.assert_close(found[0], theta - 0.3 * w.grad)
    torch.testing.assert_close(found[1], bias - 0.3 * b.grad)
    assert torch.equal(theta, header()[0])
    assert all(map(torch.equal, soft_header_sgd_step(theta, bias, z, q, 0.0), (theta, bias)))


# structure ----------------------------------------------------------------------------------------------------------

COMMON = torch.tensor([True, False, True, True, False, True])


MEANS, TARGETS = draw(6, 4), draw(6, 4, seed=1)


def expected(means: torch.Tensor, targets: torch.Tensor) -> float:
    """From the rows that count alone, in float64."""
    m, t = (rows.double().numpy() for rows in (means, targets))
    gaps = [np.linalg.norm(m[a] - m[b]) - np.linalg.norm(t[a] - t[b]) for a, b in permutations(range(len(m)), 2)]
    return float(np.square(gaps).mean() / m.shape[1])


def test_the_gap_is_that_of_the_common_rows() -> None:
    found = structure_loss(MEANS, TARGETS, COMMON)
    assert float(found) == pytest.approx(expected(MEANS[COMMON], TARGETS[COMMON]), rel=1e-5)
    spoilt = torch.where(COMMON[:, None], MEANS, torch.full_like(MEANS, 1e6))
    assert torch.equal(structure_loss(spoilt, TARGETS, COMMON), found)


def test_too_few_classes_have_no_structure() -> None:
    for count in range(4):
        common = torch.arange(6) < count
        means = MEANS.clone().requires_grad_()
        gap = structure_loss(means, TARGETS, common)
        (slope,) = torch.autograd.grad(gap, means)
        matters = count > 1
        assert (float(gap.detach()) > 0) == bool(slope.abs().sum() > 0) == matters
        assert torch.isfinite(slope).all()
        assert slope[~common].eq(0).all()


def test_gradients_against_finite_differences_and_under_vmap() -> None:
    def gap(means: torch.Tensor) -> torch.Tensor:
        return structure_loss(means, TARGETS.to(means), COMMON)

    assert torch.autograd.gradcheck(gap, MEANS.double().requires_grad_())
    several = torch.stack([MEANS, -0.5 * MEANS + 1])
    found = torch.func.vmap(torch.func.grad(gap))(several)
    for one, slope in zip(several, found, strict=True):
        torch.testing.assert_close(torch.func.grad(gap)(one), slope)


def test_means_of_a_batch() -> None:
    z, y = draw(7, 3), torch.tensor([2, 0, 2, 2, 4, 0, 3])
    w = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0, 1.0, 0.0])
    means, present = batch_class_means(z, y, w, classes=5)
    assert present.tolist() == [True, False, True, False, True]  # the only row of class 3 has no weight
    for c in range(5):
        mine = (y == c).numpy() & (w > 0).numpy()
        row = np.average(z.double().numpy()[mine], axis=0, weights=w.numpy()[mine]) if mine.any() else np.zeros(3)
        assert means[c].numpy() == pytest.approx(row, abs=1e-6)
