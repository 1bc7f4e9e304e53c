"""The structure among class means against NumPy, and what it must not see."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from polyfed.functional.class_prototypes import batch_class_means, structure_loss

COMMON = torch.tensor([True, False, True, True, False, True])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


def test_turned_and_moved_means_have_the_same_structure() -> None:
    turn = torch.linalg.qr(draw(4, 4, seed=2))[0]
    other = TARGETS @ turn + draw(4, seed=3)
    torch.testing.assert_close(structure_loss(MEANS, other, COMMON), structure_loss(MEANS, TARGETS, COMMON))
    assert float(structure_loss(MEANS @ turn + 5, MEANS, COMMON)) == pytest.approx(0, abs=1e-6)


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
