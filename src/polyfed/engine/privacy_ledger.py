"""Epsilon of what clients have released, by the package dp-accounting; and every client's account, kept from records.

Releases of one client add up, each being free to depend on those before. Clients hold rows of their own, so that what
several clients release about a row is what its own client does. That only some clients take part in a round is no
protection against a server that knows who does, and is not counted as one.

Gaussian mechanisms about all rows are together one of noise (sum of 1 / z_i^2)^(-1/2), whose epsilon is exact. Where
rows are drawn, epsilon is an upper bound: Renyi divergences of whole orders are added up; for rows drawn without
replacement it is the bound of Wang, Balle and Kasiviswanathan (AISTATS 2019) for a row that becomes another. A release
counts as one about all rows where that is less.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from polyfed.core.releases import Release, Unit
from polyfed.core.settings import Privacy
from polyfed.errors import ConfigError, MissingPackage

Releases = Sequence[Release]
UNITS: tuple[Unit, ...] = ("client", "sample")
_ORDERS = [*range(2, 33), *range(36, 65, 4), 80, 96, 128, 257, 512, 1024]  # whole ones: quick, and no warnings
_LOUDEST = 2.0**20  # noise beyond which none is looked for


# epsilon ----------------------------------------------------------------------------------------------------------


def compute_epsilon(releases: Iterable[Release], delta: float) -> float:
    """Epsilon of these releases of one client together, all of one unit, at this delta. Nothing has 0.

    Raises:
        ConfigError: dp-accounting is not installed.
    """
    counted = list(releases)
    if not counted:
        return 0.0
    plain = float(package().get_epsilon_gaussian(sum(one.times / one.noise**2 for one in counted) ** -0.5, delta))
    if not any(one.sampled for one in counted):
        return plain
    total = sum(one.times * _divergences(replace(one, times=1)) for one in counted)
    return min(plain, float(package().rdp.compute_epsilon(_ORDERS, total, delta)[0]))


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
        return all(compute_epsilon(_listed(account), settings.delta) <= settings.target_epsilon for account in accounts)

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
        import dp_accounting.rdp
    except ImportError:
        raise MissingPackage(
            "privacy: expected the package 'dp-accounting', which computes epsilon, got none; install it with: pip "
            "install 'polyfed[privacy]'"
        ) from None
    return dp_accounting


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
        delta: at which epsilon is reported.
    """

    def __init__(self, delta: float) -> None:
        self._delta = delta
        self._clear()

    def _clear(self) -> None:
        self._read = 0
        self._accounts: dict[int, Counter[Release]] = {}
        self._known: dict[tuple[frozenset[tuple[Release, int]], Unit], float] = {}

    def update(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Read the records that are new; all of them, if there are fewer than before."""
        if len(records) < self._read:
            self._clear()
        for record in records[self._read :]:
            self._accounts = self._with(from_record(record.get("releases", ())))
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

    def _of(self, account: frozenset[tuple[Release, int]], unit: Unit) -> float:
        if (account, unit) not in self._known:
            releases = [one for one in _listed(account) if one.unit == unit]
            self._known[account, unit] = compute_epsilon(releases, self._delta)
        return self._known[account, unit]
