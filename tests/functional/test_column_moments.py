"""Moments of pairs of columns: against loops over rows, and where all is there against the closed form of all rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.functional import class_statistics, closed_forms, column_moments
from polyfed.functional.column_moments import THRESHOLDS

WIDTHS = [0, 2, 0]
MADE = column_moments.make_features(WIDTHS)
COLUMN = MADE["column"]


def draw(rows: int, seed: int = 0, missing: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Values (N, J), whether they are there, and classes."""
    draws = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, 3, generator=draws, dtype=torch.float64)
    z[:, 1] = torch.randint(1, 3, (rows,), generator=draws)
    has = torch.rand(rows, 3, generator=draws) >= missing
    return z, has, torch.randint(3, (rows,), generator=draws)


def sums_of(z: Tensor, has: Tensor, y: Tensor, classes: int = 3) -> dict[str, Tensor]:
    return column_moments.sum_rows(column_moments.find_features(MADE, z), has, COLUMN, y, classes)


def test_features_of_a_row_by_hand() -> None:
    z = torch.tensor([[0.5, 2.0, -2.0]], dtype=torch.float64)
    hinges = [max(0.5 - t, 0.0) for t in THRESHOLDS]
    expected = [0.5, *hinges, 0.0, 1.0, -2.0, 0.0, 0.0, 0.0, 0.0]
    assert column_moments.find_features(MADE, z)[0].tolist() == pytest.approx(expected)


def test_moments_are_those_of_the_rows_that_have_both() -> None:
    z, has, y = draw(40, missing=0.6)
    found = column_moments.marginal(sums_of(z, has, y), COLUMN, torch.tensor([0, 2]))
    phi = column_moments.find_features(MADE, z).numpy()
    kept = [d for d in range(len(COLUMN)) if COLUMN[d] != 1]
    expected = np.zeros((len(kept), len(kept)))
    for a, f in enumerate(kept):
        for b, g in enumerate(kept):
            both = (has[:, COLUMN[f]] & has[:, COLUMN[g]]).numpy()
            parts = [phi[both & (y == c).numpy()][:, [f, g]] for c in range(3)]
            spread = [(part - part.mean(axis=0)).prod(axis=1).sum() for part in parts]
            expected[a, b] = sum(spread) / both.sum()
    assert np.linalg.eigvalsh(expected)[0] < 0  # so that it must be repaired
    values, vectors = np.linalg.eigh(expected)
    np.testing.assert_allclose(found["covariance"], (vectors * values.clip(0)) @ vectors.T, atol=1e-10)
    assert float(found["repaired"]) == pytest.approx(-values.clip(max=0).sum() / np.trace(expected))
    means = [[phi[(has[:, COLUMN[f]] & (y == c)).numpy(), f].mean() for f in kept] for c in range(3)]
    np.testing.assert_allclose(found["mean"], means, atol=1e-12)


@pytest.mark.parametrize("classes", [3, 0])
def test_all_columns_give_the_closed_form_of_all_rows(classes: int) -> None:
    z, has, y = draw(60)
    labels = y if classes else z[:, 0] * 2 - z[:, 2]
    gaussian = column_moments.marginal(
        sums_of(z, has, labels, classes),
        COLUMN if classes else torch.cat([COLUMN, torch.tensor([3])]),
        torch.arange(3 if classes else 4),
    )
    phi = column_moments.find_features(MADE, z)
    rows = class_statistics.sum_rows(phi, labels, classes)
    mean, covariance = gaussian["mean"], gaussian["covariance"]
    if classes:
        found = closed_forms.discriminant_of(mean, covariance, gaussian["rows"] > 0, 0.2)
        expected = closed_forms.discriminant(rows, 0.2)
    else:
        found = closed_forms.ridge_of(mean[0], covariance, 0.2)
        expected = closed_forms.ridge(rows, 0.2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert float(gaussian["repaired"]) == 0


def test_sums_of_parts_add_up_wherever_their_columns_lie() -> None:
    z, has, y = draw(30, missing=0.2)
    has[:15, 1] = False  # the first fifteen rows are a client's without column 1
    own = torch.tensor([0, 2])
    features = torch.isin(COLUMN, own).nonzero().flatten()
    made = column_moments.make_features([0, 0])
    phi = column_moments.find_features(made, z[:15, own])
    first = column_moments.sum_rows(phi, has[:15, own], made["column"], y[:15], 3)
    spread = column_moments.spread(first, own, features, 3, len(COLUMN))
    whole = class_statistics.add(spread, sums_of(z[15:], has[15:], y[15:]))
    for name, tensor in sums_of(z, has, y).items():
        torch.testing.assert_close(whole[name], tensor)
    assert column_moments.are_possible(spread, 15, own, COLUMN)
    assert not column_moments.are_possible(spread, 8, own, COLUMN)
    assert not column_moments.are_possible(spread, 15, torch.tensor([0, 1]), COLUMN)
    assert not column_moments.are_possible({**spread, "sums": 1e3 * spread["sums"]}, 15, own, COLUMN)
    worse = {**spread, "products": -spread["products"]}
    assert not column_moments.are_possible(worse, 15, own, COLUMN)


def test_a_pair_that_nobody_has_counts_as_uncorrelated_and_an_unseen_class_as_all_others() -> None:
    z, has, y = draw(40)
    has[:20, 0] = False
    has[20:, 2] = False
    y[:20] = y[:20].clamp(max=1)  # no row of class 2 has column 2
    found = column_moments.marginal(sums_of(z, has, y), COLUMN, torch.tensor([0, 2]))
    assert bool((found["covariance"][:5, 5:] == 0).all())
    torch.testing.assert_close(found["mean"][2, 5], z[:20, 2].mean())
