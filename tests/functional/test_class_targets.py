"""One row per class: merging, losses and the nearest row against NumPy; the network behind trained prototypes."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from polyfed.functional import prototype_network
from polyfed.functional.class_targets import (
    align,
    merge,
    most_similar,
    nearest_prototype_scores,
    prototype_distance,
    soft_cross_entropy,
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


def test_merging_with_counts_is_associative_and_blind_to_order() -> None:
    rows, labels = draw(6, 3), torch.zeros(6, dtype=torch.int64)
    whole = merge(rows, labels, COUNTS)[1]
    halves = torch.cat([merge(rows[s], labels[s], COUNTS[s])[1] for s in (slice(0, 2), slice(2, 6))])
    again = merge(halves, labels[:2], torch.tensor([float(COUNTS[:2].sum()), float(COUNTS[2:].sum())]))[1]
    assert torch.allclose(whole, again, rtol=1e-6)
    order = torch.tensor([5, 2, 0, 4, 1, 3])
    assert torch.equal(merge(rows[order], LABELS[order], COUNTS[order])[0], merge(rows, LABELS, COUNTS)[0])
    assert torch.allclose(merge(rows[order], LABELS[order], COUNTS[order])[1], merge(rows, LABELS, COUNTS)[1])


def test_a_lone_row_stays_bit_for_bit() -> None:
    rows = draw(3, 4)
    assert torch.equal(merge(rows, torch.arange(3), torch.tensor([1.0, 9.0, 3.0]))[1], rows)


@pytest.mark.parametrize(
    ("rows", "labels", "weights"),
    [(draw(0, 2), torch.empty(0), torch.empty(0)), (draw(2, 2), torch.arange(3), torch.ones(2))],
)
def test_merge_says_what_does_not_fit(rows: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected rows"):
        merge(rows, labels, weights)
    with pytest.raises(ValueError, match="positive weights"):
        merge(draw(2, 2), torch.arange(2), torch.tensor([1.0, 0.0]))


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


def test_the_nearest_has_the_highest_score_and_an_absent_class_none() -> None:
    z, prototypes, labels = draw(50, 3), draw(3, 3, seed=2), torch.tensor([3, 0, 2])
    scores = nearest_prototype_scores(z, prototypes, labels, 5)
    distances = np.linalg.norm(z.numpy()[:, None] - prototypes.numpy()[None], axis=2)
    assert scores.argmax(1).tolist() == labels[distances.argmin(1)].tolist()
    assert -scores[:, labels].numpy() == pytest.approx(distances, rel=1e-5)
    assert (scores[:, [1, 4]] == -torch.inf).all()
    assert float(nearest_prototype_scores(prototypes[:1], prototypes, labels, 5)[0, 3]) == 0.0


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


def test_the_most_similar_has_the_highest_score_and_an_absent_class_none() -> None:
    z, prototypes, labels = draw(50, 3), draw(3, 3, seed=2), torch.tensor([3, 0, 2])
    scores = most_similar(z, prototypes, labels, 5)
    a, b = (t.double().numpy() / np.linalg.norm(t.double().numpy(), axis=1, keepdims=True) for t in (z, prototypes))
    assert scores[:, labels].numpy() == pytest.approx(a @ b.T, abs=1e-6)
    assert (scores[:, [1, 4]] == -torch.inf).all()
    long = torch.tensor([[100.0], [1.0], [1.0]]) * prototypes
    assert torch.equal(most_similar(z, long, labels, 5).argmax(1), scores.argmax(1))
    assert not torch.equal(nearest_prototype_scores(z, long, labels, 5).argmax(1), scores.argmax(1))


# the network behind trained prototypes ------------------------------------------------------------------------------


def apart(margin: float) -> prototype_network.Loss:
    return functools.partial(prototype_network.margin_loss, margin=margin)


def numpy_loss(weights: dict[str, np.ndarray], rows: np.ndarray, labels: np.ndarray, margin: float) -> float:
    hidden = np.maximum(weights["embedding"] @ weights["hidden.weight"].T + weights["hidden.bias"], 0)
    p = hidden @ weights["output.weight"].T + weights["output.bias"]
    d = np.linalg.norm(rows[:, None] - p[None], axis=2)
    d[np.arange(len(rows)), labels] += margin
    return float((d[np.arange(len(rows)), labels] + np.log(np.exp(-d).sum(1))).mean())


def test_a_step_of_the_fit_against_finite_differences() -> None:
    weights = prototype_network.init_network(3, 5, 4, torch.Generator().manual_seed(0))
    rows, labels = draw(4, 4), torch.tensor([0, 2, 0, 1], dtype=torch.int32)
    before = {name: t.clone() for name, t in weights.items()}
    new, loss = prototype_network.train_network(
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


def test_the_fit_brings_prototypes_to_their_means_and_apart() -> None:
    weights = prototype_network.init_network(3, 8, 4, torch.Generator().manual_seed(0))
    rows, labels = 2 * draw(3, 4), torch.arange(3)
    losses = {}
    for margin in (0.0, 3.0):
        start = float(prototype_network.margin_loss(prototype_network.prototypes(weights), rows, labels, margin))
        new, losses[margin] = prototype_network.train_network(
            weights, rows, labels, apart(margin), 300, 3, 0.05, torch.Generator().manual_seed(1)
        )
        assert losses[margin] < start / 2
        distances = torch.cdist(rows, prototype_network.prototypes(new))
        assert distances.argmin(1).tolist() == [0, 1, 2]
    assert losses[0.0] < losses[3.0]


def test_batches_and_rate_of_the_fit_matter() -> None:
    weights = prototype_network.init_network(3, 5, 4, torch.Generator().manual_seed(0))
    rows, labels = draw(5, 4), torch.tensor([0, 1, 2, 1, 0])

    def fit(batch: int, lr: float, seed: int = 1) -> torch.Tensor:
        draws = torch.Generator().manual_seed(seed)
        fitted, _ = prototype_network.train_network(weights, rows, labels, apart(1.0), 3, batch, lr, draws)
        return prototype_network.prototypes(fitted)

    assert not torch.equal(fit(5, 0.1), fit(2, 0.1))
    assert not torch.equal(fit(2, 0.1), fit(2, 0.1, seed=2))
    assert torch.equal(fit(2, 0.0), prototype_network.prototypes(weights))


def test_a_distance_of_zero_has_a_gradient() -> None:
    p = draw(2, 3).requires_grad_()
    value = prototype_network.margin_loss(p, p.detach()[:1].clone(), torch.tensor([0]), 0.5)
    assert torch.isfinite(torch.autograd.grad(value, p)[0]).all()


def test_the_margin_is_the_largest_gap_to_the_nearest() -> None:
    centers = draw(4, 3)
    d = np.linalg.norm(centers.numpy()[:, None] - centers.numpy()[None], axis=2) + np.diag([np.inf] * 4)
    assert prototype_network.margin(centers, 100.0) == pytest.approx(d.min(1).max(), rel=1e-6)
    assert prototype_network.margin(centers, 0.1) == 0.1
    assert prototype_network.margin(centers[:1], 100.0) == 100.0


def test_orthogonality_against_numpy_with_cosines_of_both_signs() -> None:
    p, rows, labels = draw(3, 4), draw(5, 4, seed=1), torch.tensor([0, 2, 1, 1, 0])
    a, b = (t.double().numpy() for t in (rows, p))
    cosines = np.array([[x @ y / np.linalg.norm(x) / np.linalg.norm(y) for y in b] for x in a])
    own = np.eye(3)[labels]
    assert (cosines[own == 0] < 0).any()
    assert (cosines[own == 0] > 0).any()
    for gamma in (0.0, 0.5, 2.0):
        expected = (1 - cosines)[own == 1].mean() + gamma * np.abs(cosines[own == 0]).mean()
        found = prototype_network.orthogonality(p, rows, labels, gamma)
        assert float(found) == pytest.approx(expected, rel=1e-6)


def test_the_fit_makes_prototypes_orthogonal_to_other_classes() -> None:
    weights = prototype_network.init_network(3, 8, 6, torch.Generator().manual_seed(0))
    rows, labels = draw(3, 6).abs(), torch.arange(3)  # in one corner, as representations after a ReLU

    def cosines(gamma: float) -> torch.Tensor:
        loss = functools.partial(prototype_network.orthogonality, gamma=gamma)
        draws = torch.Generator().manual_seed(1)
        new, _ = prototype_network.train_network(weights, rows, labels, loss, 500, 3, 0.1, draws)
        found = most_similar(rows, prototype_network.prototypes(new), labels, 3)
        return found[~torch.eye(3, dtype=torch.bool)].abs()

    assert cosines(0.0).mean() > 0.5
    assert cosines(5.0).mean() < 0.2


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
    found = prototype_network.margin_loss(prototypes, rows, labels, 0.5)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_the_networks_initial_weights_fill_their_range() -> None:
    found = prototype_network.init_network(50, 40, 9, torch.Generator().manual_seed(0))
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        "embedding": (50, 9),
        "hidden.weight": (40, 9),
        "hidden.bias": (40,),
        "output.weight": (9, 40),
        "output.bias": (9,),
    }
    for name, inputs in (("hidden.weight", 9), ("hidden.bias", 9), ("output.weight", 40), ("output.bias", 40)):
        scaled = found[name] * inputs**0.5
        assert -1 <= float(scaled.min()) < -0.5 < 0.5 < float(scaled.max()) <= 1
    assert float(found["embedding"].std()) == pytest.approx(1, abs=0.1)
