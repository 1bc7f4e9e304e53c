"""Epsilon of all that was released: exact for releases about all rows, by dp-accounting where rows are drawn.

Releases of one client add up, each being free to depend on those before. Clients hold rows of their own, so that what
several clients release about a row is what its own client does. That only some clients take part in a round is no
protection against a server that knows who does, and is not counted as one.

Where rows are drawn, two accountants are at hand. "rdp" adds up Renyi divergences of whole orders; for rows drawn
without replacement it is the bound of Wang, Balle and Kasiviswanathan (AISTATS 2019) for a row that becomes another.
"pld" composes privacy loss distributions numerically; for rows drawn without replacement, of the profile
delta(epsilon') = q delta(epsilon), epsilon' = ln(1 + q (e^epsilon - 1)) (Balle, Barthe and Gaboardi, NeurIPS 2018).
Both are upper bounds, made in different ways; both take as well what holds without any drawing, where that is less.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from polyfed.core.releases import Release
from polyfed.core.settings import Accountant, Privacy
from polyfed.errors import ConfigError, MissingPackage
from polyfed.functional.gaussian_mechanism import gaussian_delta, gaussian_epsilon

_ORDERS = [*range(2, 33), *range(36, 65, 4), 80, 96, 128, 257, 512, 1024]  # whole ones: quick, and no warnings
_GAP = 1e-3  # between the values of a privacy loss
_LOUDEST = 2.0**20  # noise beyond which none is looked for
_TAIL = 1e-16  # delta beyond the largest of them
_COMPOSED = 2**20  # releases that "pld" composes at most, which takes seconds


def compute_epsilon(releases: Iterable[Release], delta: float, accountant: Accountant = "rdp") -> float:
    """Epsilon of these releases of one client together, all of one unit, at this delta. Nothing has 0.

    Args:
        accountant: how it is bounded where rows are drawn; without that there is one exact answer. Of more than a
            million releases the bound is that of "rdp".

    Raises:
        ConfigError: rows are drawn, and dp-accounting is not installed.
    """
    counted = list(releases)
    if not counted:
        return 0.0
    plain = gaussian_epsilon(sum(one.times / one.noise**2 for one in counted) ** -0.5, 1.0, delta)
    if not any(one.sampled for one in counted):
        return plain
    few = sum(one.times for one in counted) <= _COMPOSED
    bound = _pld_epsilon if accountant == "pld" and few else _rdp_epsilon
    return min(plain, bound(counted, delta))


def calibrate_noise(released: Callable[[float], Iterable[Iterable[Release]]], settings: Privacy) -> float:
    """The smallest noise for which no client's epsilon is above the settings' target, to a thousandth of it.

    Args:
        released: noise -> what each client releases in all.

    Raises:
        ConfigError: what else they release is too much already.
    """

    @functools.cache
    def fits(noise: float) -> bool:
        distinct = {frozenset(group_releases(each).items()) for each in released(noise)}
        accounts = [[replace(one, times=times) for one, times in account] for account in distinct]
        return all(
            compute_epsilon(each, settings.delta, settings.accountant) <= settings.target_epsilon for each in accounts
        )

    high = 1.0
    while not fits(high):
        high *= 2
        if high > _LOUDEST:
            raise ConfigError(
                f"privacy.target_epsilon: expected one that noise can reach, got {settings.target_epsilon:g}"
            )
    low = high / 2
    while low > 1 / _LOUDEST and fits(low):
        low, high = low / 2, low
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def group_releases(releases: Iterable[Release]) -> Counter[Release]:
    """Release of one time -> how often."""
    found: Counter[Release] = Counter()
    for one in releases:
        found[replace(one, times=1)] += one.times
    return found


def require_packages(releases: Iterable[Release]) -> None:
    """Whether these can be accounted for here.

    Raises:
        ConfigError: rows are drawn, and dp-accounting is not installed.
    """
    if any(one.sampled for one in releases):
        _package()


def _package() -> Any:
    """The package, with its accountants."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        raise MissingPackage(
            "privacy: expected the package 'dp-accounting', which counts what drawn rows give away, got none; install "
            "it with: pip install 'polyfed[privacy]'"
        ) from None
    return dp_accounting


def _rdp_epsilon(releases: list[Release], delta: float) -> float:
    total = sum(one.times * _divergences(replace(one, times=1)) for one in releases)
    return float(_package().rdp.compute_epsilon(_ORDERS, total, delta)[0])


@functools.cache
def _divergences(one: Release) -> Any:
    """Renyi divergences of a release of one time, an array over `_ORDERS`."""
    dp = _package()
    gaussian = _package().GaussianDpEvent(one.noise)
    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    if not one.sampled:
        event = gaussian
    elif one.poisson:
        event = dp.PoissonSampledDpEvent(one.drawn / one.held, gaussian)
    else:  # the noise is over what changes when a row becomes another, as this takes for granted
        event = dp.SampledWithoutReplacementDpEvent(one.held, one.drawn, gaussian)
        relation = dp.NeighboringRelation.REPLACE_ONE
    return dp.rdp.RdpAccountant(_ORDERS, relation).compose(event).rdp


def _pld_epsilon(releases: list[Release], delta: float) -> float:
    composed = [_losses(one).self_compose(times) for one, times in group_releases(releases).items()]
    return float(functools.reduce(lambda a, b: a.compose(b), composed).get_epsilon_for_delta(delta))


@functools.cache
def _losses(one: Release) -> Any:
    """Privacy loss distribution of a release of one time."""
    losses = _package().pld.privacy_loss_distribution
    if one.poisson or not one.sampled:
        rate = one.drawn / one.held if one.sampled else 1.0
        return losses.from_gaussian_mechanism(
            one.noise, value_discretization_interval=_GAP, sampling_prob=rate, use_connect_dots=True
        )
    share = one.drawn / one.held
    places = 1
    while share * _delta(one.noise, _base(places * _GAP, share)) > _TAIL:
        places *= 2
    above = [share * _delta(one.noise, _base(k * _GAP, share)) for k in range(places + 1)]
    below = [-math.expm1(-k * _GAP) + math.exp(-k * _GAP) * above[k] for k in range(places, 0, -1)]
    falling = [min(pair) for pair in zip([*below, *above], [1.0, *below, *above], strict=False)]
    pmf = _package().pld.pld_pmf.create_pmf_pessimistic_connect_dots(_GAP, range(-places, places + 1), falling)
    return losses.PrivacyLossDistribution(pmf)


def _base(epsilon: float, share: float) -> float:
    """The epsilon of which drawing that share of the rows makes `epsilon`."""
    return math.log1p(math.expm1(epsilon) / share)


def _delta(noise: float, epsilon: float) -> float:
    return gaussian_delta(noise, 1.0, epsilon) if epsilon > 0 else math.erf(1 / noise / math.sqrt(8))
