"""What a federation spends of its clients' privacy: noise for a target, the releases of a round, a budget kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from polyfed.core.method import Exchange, Method
from polyfed.core.releases import Release
from polyfed.core.settings import Privacy, Training
from polyfed.core.uploads import sends
from polyfed.engine import accounting
from polyfed.engine.dp_sgd import releases as of_training
from polyfed.engine.privacy_ledger import Ledger, told
from polyfed.errors import RequestError
from polyfed.functional.gaussian_mechanism import analytic_sigma

Records = Sequence[Mapping[str, Any]]


class OverBudget(Exception):
    """A round would be beyond `privacy.budget`."""


class Spending:
    """The account of a run, read off its records.

    Args:
        settings: as asked for. method, training: of the run. rows: how many each client trains on, by number.
        asked: who is to take part in a round, as far as nobody drops out.

    Attributes:
        settings: with the noise that a target asks for. hides: whether anything that clients give away is hidden.
    """

    def __init__(
        self,
        settings: Privacy,
        method: Method,
        training: Training,
        rows: Sequence[int],
        asked: Callable[[int], Sequence[int]],
    ) -> None:
        self._method, self._training, self._rows, self._asked = method, training, rows, asked
        self.settings = self._with_noise(settings)
        self._ledger = Ledger(self.settings, self._expected)
        self.hides = any(self._expected(client) for client in range(len(rows)))

    def check(self) -> None:
        """Whether what is released can be accounted for, and a budget kept.

        Raises:
            RequestError: it cannot.
        """
        accounting.require(release for client in range(len(self._rows)) for release in self._expected(client))
        budget = self.settings.budget
        if budget and (sends(self._method) or self.settings.sgd_clip) and not self.hides:
            raise RequestError(
                f"privacy.budget: expected noise, without which there is no epsilon, came {budget:g} alone"
            )
        if budget and self.would_exceed([], self._asked(1)):
            raise self._too_little(self._ledger.next_of(self._asked(1)))

    def releases(self, client: int, entries: int | None, exchange: Exchange) -> list[Release]:
        """What a client gives away in an exchange.

        Args:
            entries: that are bounded, of what it uploads; None: nothing left it.
        """
        return self._given(client, entries, self.settings, exchange)

    def record(self, records: Records, released: Mapping[int, Sequence[Release]]) -> dict[str, Any]:
        """The part of a round's record about what has been released, in this round and in all.

        Args:
            records: of the rounds before. released: by client, in this one.

        Raises:
            OverBudget: that is more than the budget. RequestError: already in the first round.
        """
        if not self.hides:
            return {}
        self._ledger.follow(records)
        if self._ledger.exceeded(released):
            raise OverBudget if records else self._too_little(released)
        return {"epsilon": self._ledger.epsilon(released), "delta": self.settings.delta, "releases": told(released)}

    def would_exceed(self, records: Records, clients: Sequence[int]) -> bool:
        """Whether the budget would not last if these clients released what they did last."""
        if not self.settings.budget or not self.hides:
            return False
        self._ledger.follow(records)
        return self._ledger.exceeded(self._ledger.next_of(clients))

    def _too_little(self, released: Mapping[int, Sequence[Release]]) -> RequestError:
        least = max(self._ledger.epsilon(released).values())
        return RequestError(
            f"privacy.budget: expected at least {least:.4g}, what the first round comes to, came "
            f"{self.settings.budget:g}"
        )

    def _given(self, client: int, entries: int | None, settings: Privacy, exchange: Exchange) -> list[Release]:
        found = []
        if exchange.trains:
            phases = self._method.phases(self._training) if exchange.phases is None else exchange.phases
            found += of_training(settings, self._training, phases, self._rows[client])
        if entries is not None and sends(self._method):
            found += self._method.releases(self._training, self._rows[client])
            if settings.noise and entries:
                found.append(Release("upload", "client", settings.hidden(entries) / math.sqrt(entries)))
        return found

    def _expected(self, client: int) -> list[Release]:
        """What a client's first round gives away, each of its uploads having one bounded entry."""
        return [release for one in self._method.exchanges(1) for release in self.releases(client, 1, one)]

    def _with_noise(self, settings: Privacy) -> Privacy:
        """The settings, with the noise that a target asks for, for who is to take part most often."""
        if not settings.target:
            return settings
        turns: list[list[Exchange]] = [[] for _ in self._rows]
        for number in range(1, self._training.rounds + 1):
            for client in self._asked(number):
                turns[client].extend(self._method.exchanges(number))
        for own in turns:
            own.extend(self._method.closing())
        made = {}
        if settings.clip and sends(self._method):
            made["noise"] = analytic_sigma(1.0, settings.target, settings.delta) * math.sqrt(max(map(len, turns)))
        if settings.sgd_clip:

            def released(noise: float) -> Iterator[list[Release]]:
                tried = settings.model_copy(update={"sgd_noise": noise})
                for client, own in enumerate(turns):
                    yield [r for e in own for r in self._given(client, 0, tried, e)]

            made["sgd_noise"] = accounting.least_noise(released, settings)
        return settings.model_copy(update=made)
