"""Epsilon of what clients have released, by the package dp-accounting; and every client's account, kept from records.

Releases of one client add up, each being free to depend on those before. Clients hold rows of their own, so that what
several clients release about a row is what its own client does. That only some clients take part in a round is no
protection against a server that knows who does, and is not counted as one.

Gaussian mechanisms about all rows are together one of noise (sum of 1 / z_i^2)^(-1/2), whose epsilon is exact. Where
rows are drawn, two accountants are at hand, both upper bounds. "rdp" adds up Renyi divergences of whole orders; for
rows drawn without replacement it is the bound of Wang, Balle and Kasiviswanathan (AISTATS 2019) for a row that becomes
another. "pld" composes privacy loss distributions numerically. Both count a release as one about all rows where that is
less.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from polyfed.core.releases import Release, Unit
from polyfed.core.settings import Accountant, Privacy
from polyfed.errors import ConfigError, MissingPackage

Releases = Sequence[Release]
UNITS: tuple[Unit, ...] = ("client", "sample")
_ORDERS = [*range(2, 33), *range(36, 65, 4), 80, 96, 128, 257, 512, 1024]  # whole ones: quick, and no warnings
_GAP = 1e-3  # between the values of a privacy loss
_LOUDEST = 2.0**20  # noise beyond which none is looked for
_TAIL = 1e-16  # delta beyond the largest of them
_COMPOSED = 2**20  # releases that "pld" composes at most, which takes seconds


# epsilon ----------------------------------------------------------------------------------------------------------


def compute_epsilon(releases: Iterable[Release], delta: float, accountant: Accountant = "rdp") -> float:
    """Epsilon of these releases of one client together, all of one unit, at this delta. Nothing has 0.

    Args:
        accountant: how it is bounded where rows are drawn. Of more than a million releases the bound is that of "rdp".

    Raises:
        ConfigError: dp-accounting is not installed.
    """
    counted = list(releases)
    if not counted:
        return 0.0
    plain = float(package().get_epsilon_gaussian(sum(one.times / one.noise**2 for one in counted) ** -0.5, delta))
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
        accounts = {frozenset(group_releases(each).items()) for each in released(noise)}
        return all(
            compute_epsilon(_listed(account), settings.delta, settings.accountant) <= settings.target_epsilon
            for account in accounts
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
    """Release of one time -> how often; once, of one with the same numbers each time."""
    found: Counter[Release] = Counter()
    for one in releases:
        single = replace(one, times=1)
        found[single] = 1 if one.once else found[single] + one.times
    return found


def _listed(account: Iterable[tuple[Release, int]]) -> list[Release]:
    return [replace(one, times=times) for one, times in account]


def package() -> Any:
    """The package dp-accounting, with its accountants.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        raise MissingPackage(
            "privacy: expected the package 'dp-accounting', which computes epsilon, got none; install it with: pip "
            "install 'polyfed[privacy]'"
        ) from None
    return dp_accounting


def _rdp_epsilon(releases: list[Release], delta: float) -> float:
    total = sum(one.times * _divergences(replace(one, times=1)) for one in releases)
    return float(package().rdp.compute_epsilon(_ORDERS, total, delta)[0])


@functools.cache
def _divergences(one: Release) -> Any:
    """Renyi divergences of a release of one time, an array over `_ORDERS`."""
    dp = package()
    event = dp.GaussianDpEvent(one.noise)
    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    if one.sampled and one.poisson:
        event = dp.PoissonSampledDpEvent(one.drawn / one.held, event)
    elif one.sampled:  # the noise is over what changes when a row becomes another, as this takes for granted
        event = dp.SampledWithoutReplacementDpEvent(one.held, one.drawn, event)
        relation = dp.NeighboringRelation.REPLACE_ONE
    return dp.rdp.RdpAccountant(_ORDERS, relation).compose(event).rdp


def _pld_epsilon(releases: list[Release], delta: float) -> float:
    composed = [_losses(one).self_compose(times) for one, times in group_releases(releases).items()]
    return float(functools.reduce(lambda a, b: a.compose(b), composed).get_epsilon_for_delta(delta))


@functools.cache
def _losses(one: Release) -> Any:
    """Privacy loss distribution of a release of one time.

    dp-accounting has none for rows drawn without replacement: theirs is made of the profile delta(epsilon') =
    q delta(epsilon), epsilon' = ln(1 + q (e^epsilon - 1)) (Balle, Barthe and Gaboardi, NeurIPS 2018).
    """
    pld = package().pld
    losses = pld.privacy_loss_distribution
    share = one.drawn / one.held if one.sampled else 1.0
    if one.poisson or not one.sampled:
        return losses.from_gaussian_mechanism(
            one.noise, value_discretization_interval=_GAP, sampling_prob=share, use_connect_dots=True
        )
    gaussian = pld.privacy_loss_mechanism.GaussianPrivacyLoss(one.noise)

    def hidden(epsilon: float) -> float:
        return share * float(gaussian.get_delta_for_epsilon(math.log1p(math.expm1(epsilon) / share)))

    places = 1
    while hidden(places * _GAP) > _TAIL:
        places *= 2
    above = [hidden(k * _GAP) for k in range(places + 1)]
    below = [-math.expm1(-k * _GAP) + math.exp(-k * _GAP) * above[k] for k in range(places, 0, -1)]
    falling = [min(pair) for pair in zip([*below, *above], [1.0, *below, *above], strict=False)]
    pmf = pld.pld_pmf.create_pmf_pessimistic_connect_dots(_GAP, range(-places, places + 1), falling)
    return losses.PrivacyLossDistribution(pmf)


# the clients' accounts --------------------------------------------------------------------------------------------


def to_record(released: Mapping[int, Releases]) -> list[dict[str, Any]]:
    """What clients, by number, released in a round, as a record has it: who has the same stands together."""
    found: dict[Release, list[int]] = {}
    for client in sorted(released):
        for one in _listed(group_releases(released[client]).items()):
            found.setdefault(one, []).append(client)
    return [{**asdict(one), "clients": clients} for one, clients in found.items()]


def from_record(entries: Iterable[Mapping[str, Any]]) -> dict[int, list[Release]]:
    """The inverse of `to_record`, of entries of the shape `recorded.RECORD`.

    Raises:
        ConfigError: rows are drawn, and none of them.
    """
    names = [field.name for field in fields(Release)]
    found = dict[int, list[Release]]()
    for entry in entries:
        one = Release(**{name: entry[name] for name in names})
        if one.sampled and one.drawn < 1:
            raise ConfigError(f"expected releases about one row or more, got one about {one.drawn} of {one.held}")
        for client in entry["clients"]:
            found.setdefault(client, []).append(one)
    return found


class PrivacyLedger:
    """The accounts of all clients.

    Args:
        settings: at which delta, by which accountant.
        expected: what a client that has not released anything yet is going to, in a round.
    """

    def __init__(self, settings: Privacy, expected: Callable[[int], Releases]) -> None:
        self._settings, self._expected = settings, expected
        self._clear()

    def _clear(self) -> None:
        self._read = 0
        self._accounts: dict[int, Counter[Release]] = {}
        self._last: dict[int, Releases] = {}  # of the last round in which a client released anything
        self._known: dict[tuple[frozenset[tuple[Release, int]], Unit], float] = {}

    def update(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Read the records that are new; all of them, if there are fewer than before."""
        if len(records) < self._read:
            self._clear()
        for record in records[self._read :]:
            fresh = from_record(record.get("releases", ()))
            self._accounts = self._with(fresh)
            self._last |= fresh
            self._known.clear()
        self._read = len(records)

    def _with(self, more: Mapping[int, Releases]) -> dict[int, Counter[Release]]:
        """The accounts, and what is released beside them."""
        before = {i: _listed(self._accounts.get(i, Counter()).items()) for i in more}
        return self._accounts | {i: group_releases([*before[i], *each]) for i, each in more.items()}

    def epsilon(self, more: Mapping[int, Releases] | None = None) -> dict[str, float]:
        """The largest epsilon over the clients by unit, of those units that anything was released of.

        more: client -> what it is to release beside what it has.
        """
        accounts = self._with(more or {})
        distinct = {frozenset(account.items()) for account in accounts.values()}
        used = {release.unit for account in accounts.values() for release in account}
        return {unit: max(self._of(account, unit) for account in distinct) for unit in UNITS if unit in used}

    def exceeded(self, more: Mapping[int, Releases] | None = None) -> bool:
        """Whether that is beyond the budget, in any unit; never, where there is none."""
        budget = self._settings.max_epsilon
        return budget > 0 and any(epsilon > budget for epsilon in self.epsilon(more).values())

    def predict_next(self, clients: Iterable[int]) -> dict[int, list[Release]]:
        """What these clients would release in another round: what each did in its last one.

        Who is named twice does so twice.
        """
        found: dict[int, list[Release]] = {}
        for client in clients:
            found.setdefault(client, []).extend(self._last.get(client) or self._like_others(client))
        return found

    def _like_others(self, client: int) -> Releases:
        """As it is expected; of uploads with as many entries as others' have had."""
        seen = [one.noise for releases in self._last.values() for one in releases if one.what == "upload"]
        return [
            replace(one, noise=min([one.noise, *seen])) if one.what == "upload" else one
            for one in self._expected(client)
        ]

    def _of(self, account: frozenset[tuple[Release, int]], unit: Unit) -> float:
        if (account, unit) not in self._known:
            releases = [one for one in _listed(account) if one.unit == unit]
            self._known[account, unit] = compute_epsilon(releases, self._settings.delta, self._settings.accountant)
        return self._known[account, unit]
