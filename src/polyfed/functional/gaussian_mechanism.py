"""The Gaussian mechanism: how much noise makes a release (epsilon, delta) differentially private.

The release is a vector of sensitivity Delta (L2: the most it can change when one record does) plus N(0, sigma^2) on
every entry, independent of the data. These functions are for a bound fixed beforehand; the noise of FedIN+Noise is
scaled by the features' own standard deviation, and its features have no bound, so it carries no such guarantee (with
`feature_clip` they have one).
"""

from __future__ import annotations

import math
import warnings

_ASYMPTOTIC = 25.0  # from here on erfc comes near the smallest numbers, and its series is exact to rounding
_NEAR = 1e-3  # a below which the two terms of delta are nearly equal, and their difference is an integral


def classic_sigma(sensitivity: float, epsilon: float, delta: float, *, beyond: bool = False) -> float:
    """The classic bound: sigma = Delta sqrt(2 ln(1.25 / delta)) / epsilon. It is proved for epsilon < 1 only.

    Args:
        sensitivity: Delta, above 0. For vectors clipped to norm C it is 2 C.
        epsilon: above 0, and below 1 unless `beyond`. delta: above 0, below 1.
        beyond: give the formula's value for epsilon >= 1 too, where it may be too small (then delta is not met) or
            larger than needed; for comparison with papers that use it there.

    Raises:
        ValueError: a number outside its range.

    Source: Dwork and Roth, 2014, theorem A.1; FedIN, eq. 22 and 23.

    >>> round(classic_sigma(0.2, 0.5, 1e-6), 3)
    2.12
    """
    _check(sensitivity=sensitivity, epsilon=epsilon, delta=delta)
    if epsilon >= 1 and not beyond:
        raise ValueError(f"expected epsilon below 1, where this formula is proved (or analytic_sigma), got {epsilon}")
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def gaussian_delta(sigma: float, sensitivity: float, epsilon: float) -> float:
    """The smallest delta for which noise of standard deviation sigma is (epsilon, delta) differentially private; exact.

    delta = Phi(a - c) - e^epsilon Phi(-a - c) with a = Delta / (2 sigma), c = epsilon sigma / Delta. As
    2 a c = epsilon, the second term is exp(-(a - c)^2 / 2) erfcx((a + c) / sqrt 2) / 2, in which nothing overflows. The
    first is the same with erfcx((c - a) / sqrt 2); where a is small, the difference is the integral of -erfcx'.

    Raises:
        ValueError: a number is not positive and finite.

    Source: Balle and Wang, ICML 2018, theorem 8.

    >>> f"{gaussian_delta(0.127, 0.2, 10.0):.1e}"
    '2.8e-09'
    """
    _check(sigma=sigma, sensitivity=sensitivity, epsilon=epsilon)
    a = sensitivity / sigma / 2
    c = epsilon * (sigma / sensitivity)
    common = math.exp(-(a - c) * (a - c) / 2) / 2
    if a < _NEAR:
        return common * _erfcx_fall(c / math.sqrt(2), a / math.sqrt(2))
    first = math.erfc((c - a) / math.sqrt(2)) / 2
    second = common * _erfcx((a + c) / math.sqrt(2))
    return min(1.0, max(0.0, first - second))


def analytic_sigma(sensitivity: float, epsilon: float, delta: float) -> float:
    """The smallest sigma that is (epsilon, delta) differentially private, for any epsilon: `gaussian_delta` inverted.

    Found by bisection; of the last two ends, the private one.

    Raises:
        ValueError: a number outside its range (epsilon above 0, delta between 0 and 1, sensitivity above 0).

    Source: Balle and Wang, ICML 2018, algorithm 1 (the analytic Gaussian mechanism).

    >>> round(analytic_sigma(0.2, 10.0, 1e-6), 5), round(analytic_sigma(0.2, 1.0, 1e-6), 3)
    (0.10822, 0.845)
    """
    _check(sensitivity=sensitivity, epsilon=epsilon, delta=delta)
    high = 1.0  # in units of the sensitivity; delta falls as sigma grows
    while gaussian_delta(high, 1.0, epsilon) > delta:
        high *= 2
    low = high / 2
    while gaussian_delta(low, 1.0, epsilon) <= delta:
        low, high = low / 2, low
    while high / low > 1 + 1e-12:
        middle = (low + high) / 2
        if gaussian_delta(middle, 1.0, epsilon) > delta:
            low = middle
        else:
            high = middle
    return sensitivity * high


def gaussian_epsilon(sigma: float, sensitivity: float, delta: float) -> float:
    """The smallest epsilon for which noise of standard deviation sigma is (epsilon, delta) private: `gaussian_delta`
    inverted, by bisection; of the last two ends, the private one. 0 where delta covers the whole difference.

    Several releases of multipliers z_i = sigma_i / Delta_i are together one of multiplier (sum of 1 / z_i^2)^(-1/2),
    also where each depends on those before: the answer is exact for them, too.

    Raises:
        ValueError: a number outside its range (sigma, sensitivity above 0, delta between 0 and 1).

    Source: Balle and Wang, ICML 2018, theorem 8; Dong, Roth and Su, JRSS B 2022, corollary 3.3 (composition).

    >>> round(gaussian_epsilon(0.10822, 0.2, 1e-6), 2), gaussian_epsilon(1e9, 1.0, 1e-6)
    (10.0, 0.0)
    """
    _check(sigma=sigma, sensitivity=sensitivity, delta=delta)
    low, high = 0.0, 1.0
    if math.erf(sensitivity / sigma / math.sqrt(8)) <= delta:  # delta at epsilon = 0
        return 0.0
    while gaussian_delta(sigma, sensitivity, high) > delta:
        low = high
        high = 2 * high
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        if gaussian_delta(sigma, sensitivity, middle) > delta:
            low = middle
        else:
            high = middle
    return high


def classic_epsilon(sigma: float, sensitivity: float, delta: float) -> float:
    """`classic_sigma` inverted: epsilon = Delta sqrt(2 ln(1.25 / delta)) / sigma, of one release.

    Above 1 the formula is not proved, and a `UserWarning` says so.

    Raises:
        ValueError: a number outside its range.

    Source: as of `classic_sigma`.

    >>> round(classic_epsilon(2.12, 0.2, 1e-6), 3)
    0.5
    """
    _check(sigma=sigma, sensitivity=sensitivity, delta=delta)
    epsilon = sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / sigma
    if epsilon > 1:
        warnings.warn(f"the classic formula is proved for epsilon below 1, got {epsilon:.4g}", stacklevel=2)
    return epsilon


def _erfcx(x: float) -> float:
    """exp(x^2) erfc(x) for x >= 0."""
    if x < _ASYMPTOTIC:
        return math.exp(x * x) * math.erfc(x)
    return (1 + _series(x)) / (x * math.sqrt(math.pi))


def _erfcx_fall(x: float, half: float) -> float:
    """erfcx(x - half) - erfcx(x + half) for a small half > 0: -erfcx' by Gauss's rule of two points."""
    return half * sum(_erfcx_slope(x + side * half / math.sqrt(3)) for side in (-1, 1))


def _erfcx_slope(x: float) -> float:
    """-erfcx'(x) = 2 / sqrt(pi) - 2 x erfcx(x)."""
    rest = -_series(x) if x >= _ASYMPTOTIC else 1 - math.sqrt(math.pi) * x * _erfcx(x)
    return 2 / math.sqrt(math.pi) * rest


def _series(x: float) -> float:
    """sqrt(pi) x erfcx(x) - 1 for large x, by the asymptotic series."""
    term, total = 1.0, 0.0
    for k in range(1, 7):
        term *= -(2 * k - 1) / (2 * x) / x
        total += term
    return total


def _check(**numbers: float) -> None:
    """Positive and finite, and delta below 1."""
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ValueError(f"expected {name} above 0 and finite, got {value}")
    if not numbers.get("delta", 0.5) < 1:
        raise ValueError(f"expected delta below 1, got {numbers['delta']}")
