"""Ranks over settings, against a published example."""

from __future__ import annotations

import pytest
from scipy.stats import chi2

from polyfed.report.benchmark_ranks import rank

# Table 6 of Demsar (JMLR 2006): AUC of four classifiers on 14 data sets
NAMES = ("C4.5", "C4.5+m", "C4.5+cf", "C4.5+m+cf")
SCORES = [
    (0.763, 0.768, 0.771, 0.798),
    (0.599, 0.591, 0.590, 0.569),
    (0.954, 0.971, 0.968, 0.967),
    (0.628, 0.661, 0.654, 0.657),
    (0.882, 0.888, 0.886, 0.898),
    (0.936, 0.931, 0.916, 0.931),
    (0.661, 0.668, 0.609, 0.685),
    (0.583, 0.583, 0.563, 0.625),
    (0.775, 0.838, 0.866, 0.875),
    (1.000, 1.000, 1.000, 1.000),
    (0.940, 0.962, 0.965, 0.962),
    (0.619, 0.666, 0.614, 0.669),
    (0.972, 0.981, 0.9751, 0.975),
    (0.957, 0.978, 0.946, 0.970),
]


def test_the_published_example_comes_out() -> None:
    ranking = rank({str(at): dict(zip(NAMES, row, strict=True)) for at, row in enumerate(SCORES)})
    assert [round(ranking.mean(name), 3) for name in NAMES] == [3.143, 2.0, 2.893, 1.964]
    assert list(ranking.ranks) == ["C4.5+m+cf", "C4.5+m", "C4.5+cf", "C4.5"]
    assert ranking.critical_difference == pytest.approx(1.25, abs=0.01)  # as printed there
    # its chi square, 9.28, is not corrected for ties: some pairs, and a row of four equals
    pairs = sum(len(set(row)) == 3 for row in SCORES)
    ties = 1 - (pairs * (2**3 - 2) + (4**3 - 4)) / (14 * (4**3 - 4))
    assert ranking.p_value == pytest.approx(chi2.sf(9.28 / ties, 3), abs=2e-4)


def test_a_method_that_a_setting_lacks_is_left_out() -> None:
    ranking = rank({"one": {"a": 0.1, "b": 0.2, "c": 0.3}, "two": {"a": 0.5, "b": 0.4}})
    assert ranking.ranks == {"a": (2.0, 1.0), "b": (1.0, 2.0)}
    assert ranking.unranked == {"c": ("two",)}
    assert ranking.p_value is None
    assert ranking.critical_difference is None


def test_a_setting_with_less_than_half_of_the_methods_is_left_out() -> None:
    full = {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4}
    ranking = rank({"one": full, "begun": {"a": 0.5}, "two": {"a": 0.4, "b": 0.2}})
    assert ranking.settings == ("one", "two")
    assert ranking.left_out == ("begun",)
    assert ranking.ranks == {"b": (1.0, 2.0), "a": (2.0, 1.0)}
    assert ranking.unranked == {"c": ("two",), "d": ("two",)}


def test_methods_that_are_all_equal_have_equal_ranks() -> None:
    ranking = rank({name: {"a": 0.5, "b": 0.5, "c": 0.5} for name in ("one", "two")})
    assert set(ranking.ranks.values()) == {(2.0, 2.0)}
    assert ranking.p_value is None
