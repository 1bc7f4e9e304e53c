"""The Gaussian mechanism against numerical integration of its definition, and against SciPy's normal distribution."""

from __future__ import annotations

import math
import re
import warnings

import numpy as np
import pytest
from scipy import optimize, special

from polyfed.functional.gaussian_mechanism import (
    analytic_sigma,
    classic_epsilon,
    classic_sigma,
    gaussian_delta,
    gaussian_epsilon,
)


def integrated(sigma: float, sensitivity: float, epsilon: float) -> float:
    """The integral of max(0, p - e^epsilon q) over the densities p = N(Delta, sigma^2) and q = N(0, sigma^2)."""
    edge = sigma**2 * epsilon / sensitivity + sensitivity / 2  # where p = e^epsilon q; beyond it p is larger
    top = max(edge, sensitivity) + 12 * sigma
    x = np.linspace(edge, top, 40_001)
    log_p, log_q = (-((x - mean) ** 2) / (2 * sigma**2) for mean in (sensitivity, 0.0))
    gap = np.exp(log_p) * -np.expm1(np.minimum(epsilon + log_q - log_p, 0.0)) / (sigma * math.sqrt(2 * math.pi))
    return float(np.sum((gap[1:] + gap[:-1]) / 2) * (x[1] - x[0]))


def with_scipy(sigma: float, sensitivity: float, epsilon: float) -> float:
    """Theorem 8 in logarithms."""
    a, c = sensitivity / (2 * sigma), epsilon * sigma / sensitivity
    return float(np.exp(special.log_ndtr(a - c)) - np.exp(epsilon + special.log_ndtr(-a - c)))


GRID = [
    (d, e, s * d) for d in (0.2, 1.0, 30.0) for e in (0.01, 0.5, 1.0, 4.0, 10.0, 60.0) for s in (0.1, 0.4, 1.0, 5.0)
]


@pytest.mark.parametrize(("sensitivity", "epsilon", "sigma"), GRID)
def test_delta_is_the_integral_of_the_definition(sensitivity: float, epsilon: float, sigma: float) -> None:
    found = gaussian_delta(sigma, sensitivity, epsilon)
    assert found == pytest.approx(integrated(sigma, sensitivity, epsilon), rel=1e-6, abs=1e-15)
    assert found == pytest.approx(with_scipy(sigma, sensitivity, epsilon), rel=1e-8, abs=1e-15)


@pytest.mark.parametrize("epsilon", [0.001, 0.1, 1.0, 10.0, 100.0, 2000.0])
@pytest.mark.parametrize("delta", [1e-10, 1e-6, 1e-2, 0.4])
def test_the_analytic_sigma_meets_delta_and_no_smaller_one_does(epsilon: float, delta: float) -> None:
    sigma = analytic_sigma(0.2, epsilon, delta)
    assert gaussian_delta(sigma, 0.2, epsilon) <= delta * (1 + 1e-9)
    assert gaussian_delta(sigma * (1 - 1e-6), 0.2, epsilon) > delta
    assert gaussian_delta(analytic_sigma(1.0, epsilon, delta), 1.0, epsilon) <= delta  # to the last digit
    if epsilon <= 100:
        root = optimize.brentq(lambda s: math.log(with_scipy(s, 0.2, epsilon) / delta), sigma / 1.5, sigma * 1.5)
        assert sigma == pytest.approx(root, rel=1e-6)


def shifted(sigma: float, sensitivity: float, epsilon: float) -> float:
    """The integral of the definition from the edge on, in units of sigma; no term is near another."""
    step, edge = sensitivity / sigma, epsilon * sigma / sensitivity - sensitivity / (2 * sigma)
    u = np.linspace(0, 40 / max(1.0, edge), 40_001)
    gap = np.exp(-((edge + u) ** 2) / 2) * -np.expm1(-step * u) / math.sqrt(2 * math.pi)
    return float(np.sum((gap[1:] + gap[:-1]) / 2) * (u[1] - u[0]))


@pytest.mark.parametrize("epsilon", [1e-20, 1e-14, 1e-9, 1e-4, 1.0])
@pytest.mark.parametrize("delta", [1e-280, 1e-100, 1e-20, 1e-9])
def test_tiny_numbers_lose_no_digits(epsilon: float, delta: float) -> None:
    """Where sigma is large the two terms of delta are nearly equal; their plain difference would promise too much."""
    sigma = analytic_sigma(3.0, epsilon, delta)
    assert shifted(sigma, 3.0, epsilon) == pytest.approx(delta, rel=1e-5, abs=0)
    assert gaussian_delta(0.9 * sigma, 3.0, epsilon) == pytest.approx(
        shifted(0.9 * sigma, 3.0, epsilon), rel=1e-5, abs=0
    )


@pytest.mark.parametrize("epsilon", [1e-5, 1e-3, 0.1, 2.0])
def test_both_ways_to_delta_meet(epsilon: float) -> None:
    below, above = (gaussian_delta(500 * scale, 1.0, epsilon) for scale in (1 + 1e-9, 1 - 1e-9))  # a = 0.001
    assert below == pytest.approx(above, rel=1e-6, abs=0)


def test_known_values() -> None:
    """Features of norm 0.1, so Delta = 0.2; delta = 1e-6. A base-2 logarithm in the classic formula gives 0.127."""
    assert classic_sigma(0.2, 10, 1e-6, beyond=True) == pytest.approx(0.10598, abs=5e-6)
    assert classic_sigma(0.2, 1, 1e-6, beyond=True) == pytest.approx(1.060, abs=5e-4)
    assert analytic_sigma(0.2, 10, 1e-6) == pytest.approx(0.10822, abs=5e-6)
    assert analytic_sigma(0.2, 1, 1e-6) == pytest.approx(0.845, abs=5e-4)
    assert gaussian_delta(0.1060, 0.2, 10) == pytest.approx(1.9e-6, rel=0.02)
    assert gaussian_delta(0.127, 0.2, 10) == pytest.approx(2.8e-9, rel=0.02)
    assert 0.2 * math.sqrt(2 * math.log2(1.25e6)) / 10 == pytest.approx(0.127, abs=5e-4)


@pytest.mark.parametrize("epsilon", [0.01, 0.3, 0.99])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_where_it_is_proved_the_classic_sigma_is_enough_and_more(epsilon: float, delta: float) -> None:
    sigma = classic_sigma(3.0, epsilon, delta)
    assert sigma == pytest.approx(3.0 * math.sqrt(2 * math.log(1.25 / delta)) / epsilon)
    assert gaussian_delta(sigma, 3.0, epsilon) < delta
    assert analytic_sigma(3.0, epsilon, delta) < sigma


def test_beyond_its_proof_the_classic_sigma_is_refused_for_it_may_be_too_small() -> None:
    for epsilon in (1, 10.0):
        with pytest.raises(ValueError, match=re.escape("expected epsilon below 1, where this formula is proved")):
            classic_sigma(0.2, epsilon, 1e-6)
    sigma = classic_sigma(0.2, 10, 1e-6, beyond=True)
    assert gaussian_delta(sigma, 0.2, 10) > 1.8e-6


def test_what_follows_from_scaling_and_order() -> None:
    for function in (lambda d, e, p: classic_sigma(d, e, p, beyond=True), analytic_sigma):
        one = function(1.0, 0.7, 1e-5)
        assert function(6.0, 0.7, 1e-5) == pytest.approx(6 * one)
        assert function(1.0, 0.6, 1e-5) > one
        assert function(1.0, 0.7, 1e-6) > one
    assert gaussian_delta(3.0, 6.0, 0.7) == pytest.approx(gaussian_delta(0.5, 1.0, 0.7))


def test_nothing_overflows() -> None:
    assert gaussian_delta(1e-200, 1.0, 1.0) == 1.0
    assert gaussian_delta(1e200, 1.0, 1.0) == 0.0
    assert gaussian_delta(1.0, 1.0, 5000.0) == 0.0
    assert analytic_sigma(1.0, 1e6, 1e-6) == pytest.approx(1 / math.sqrt(2e6), rel=0.05)
    assert 0 < analytic_sigma(1e-150, 1.0, 1e-6) < 1e-148


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0.0, 0.5, 1e-5), "expected sensitivity above 0 and finite, got 0.0"),
        ((-1.0, 0.5, 1e-5), "expected sensitivity above 0 and finite, got -1.0"),
        ((math.inf, 0.5, 1e-5), "expected sensitivity above 0 and finite, got inf"),
        ((1.0, 0.0, 1e-5), "expected epsilon above 0 and finite, got 0.0"),
        ((1.0, math.nan, 1e-5), "expected epsilon above 0 and finite, got nan"),
        ((1.0, 0.5, 0.0), "expected delta above 0 and finite, got 0.0"),
        ((1.0, 0.5, 1.0), "expected delta below 1, got 1.0"),
    ],
)
def test_ranges_are_checked(given: tuple[float, float, float], said: str) -> None:
    for function in (classic_sigma, analytic_sigma):
        with pytest.raises(ValueError, match=re.escape(said)):
            function(*given)


@pytest.mark.parametrize("given", [(0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, 0.0)])
def test_delta_is_of_positive_numbers(given: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="above 0 and finite"):
        gaussian_delta(*given)


def test_sigma_is_checked() -> None:
    with pytest.raises(ValueError, match="expected sigma above 0 and finite, got 0"):
        gaussian_delta(0.0, 1.0, 1.0)


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.1])
def test_epsilon_is_sigma_the_other_way_round(epsilon: float, delta: float) -> None:
    sigma = analytic_sigma(0.2, epsilon, delta)
    assert gaussian_epsilon(sigma, 0.2, delta) == pytest.approx(epsilon, rel=1e-6)
    assert gaussian_delta(sigma, 0.2, gaussian_epsilon(sigma, 0.2, delta)) <= delta
    assert gaussian_epsilon(1e10, 0.2, delta) == 0.0  # such noise hides all but delta


def test_the_classic_epsilon_warns_where_it_is_not_proved() -> None:
    assert classic_epsilon(classic_sigma(0.2, 0.5, 1e-6), 0.2, 1e-6) == pytest.approx(0.5)
    with pytest.warns(UserWarning, match="proved for epsilon below 1, got 10"):
        assert classic_epsilon(classic_sigma(0.2, 10, 1e-6, beyond=True), 0.2, 1e-6) == pytest.approx(10)
    for wrong in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="expected"):
            gaussian_epsilon(wrong, 1.0, 1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1])
def test_a_delta_out_of_range_has_no_classic_epsilon(delta: float) -> None:
    with pytest.raises(ValueError, match="expected delta"):
        classic_epsilon(1.0, 1.0, delta)


@pytest.mark.parametrize("sensitivity", [0.0, -1.0, math.inf])
def test_a_sensitivity_out_of_range_has_no_epsilon(sensitivity: float) -> None:
    for epsilon in (gaussian_epsilon, classic_epsilon):
        with pytest.raises(ValueError, match="expected sensitivity"):
            epsilon(1.0, sensitivity, 1e-5)


@pytest.mark.parametrize("epsilon", [0.9, 1.5])
def test_the_classic_epsilon_warns_from_1_on(epsilon: float) -> None:
    sigma = classic_sigma(1.0, epsilon, 1e-5, beyond=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert classic_epsilon(sigma, 1.0, 1e-5) == pytest.approx(epsilon)
    assert len(caught) == (epsilon > 1)
