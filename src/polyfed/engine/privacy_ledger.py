"""What every client has released in a run, read off its records: epsilon, and what another round would make of it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from polyfed.core.releases import Release, Unit
from polyfed.core.settings import Privacy
from polyfed.engine.accounting import compute_epsilon, group_releases
from polyfed.errors import ConfigError

Releases = Sequence[Release]
UNITS: tuple[Unit, ...] = ("client", "sample")


def to_record(released: Mapping[int, Releases]) -> list[dict[str, Any]]:
    """What clients, by number, released in a round, as a record has it: who has the same stands together."""
    found: dict[Release, list[int]] = {}
    for client in sorted(released):
        for one, times in group_releases(released[client]).items():
            found.setdefault(dataclasses.replace(one, times=times), []).append(client)
    return [{**dataclasses.asdict(one), "clients": clients} for one, clients in found.items()]


def from_record(entries: Iterable[Mapping[str, Any]]) -> dict[int, list[Release]]:
    """The inverse of `to_record`, of entries of the shape `recorded.RECORD`.

    Raises:
        ConfigError: rows are drawn, and none of them.
    """
    names = [field.name for field in dataclasses.fields(Release)]
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
        return self._accounts | {i: self._accounts.get(i, Counter()) + group_releases(each) for i, each in more.items()}

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
            dataclasses.replace(one, noise=min([one.noise, *seen])) if one.what == "upload" else one
            for one in self._expected(client)
        ]

    def _of(self, account: frozenset[tuple[Release, int]], unit: Unit) -> float:
        if (account, unit) not in self._known:
            releases = [dataclasses.replace(one, times=times) for one, times in account if one.unit == unit]
            self._known[account, unit] = compute_epsilon(releases, self._settings.delta, self._settings.accountant)
        return self._known[account, unit]
