"""Who is there in a round, who drops out of it, and what arrives late.

A joiner is absent before its first round: the server half does not see it. Drops and delays are drawn for each (round,
client) from a stream of its own, so that they depend on no other draw, on no method and on nobody else. So is whether a
simulated device is there: one that is not drops out before anything reaches it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polyfed.core.message import Message
from polyfed.core.randomness import generator
from polyfed.core.settings import Availability

_NOBODY: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Roll:
    """A round's attendance. present: in order of number; the others are some of them, whether or not they are asked.

    unreached: drop out before anything reaches them. unheard: nothing that they send leaves them. late: what they send
    arrives in a later round.
    """

    present: Sequence[int]
    unreached: Collection[int] = _NOBODY
    unheard: Collection[int] = _NOBODY
    late: Collection[int] = _NOBODY

    def reached(self, ids: Iterable[int]) -> list[int]:
        """Those of `ids` whom a message reaches."""
        return [i for i in ids if i not in self.unreached]

    def dropped(self, asked: Iterable[int]) -> list[int]:
        """Who of those asked dropped out."""
        return sorted(i for i in set(asked) if i in self.unreached or i in self.unheard)


class Attendance:
    """The rolls of a federation of so many clients: a function of the settings and the seed.

    Args:
        there: of each client, the probability that its device is there; empty: all are.
        left_out: who takes no part at all.
    """

    def __init__(
        self,
        availability: Availability,
        clients: int,
        seed: int,
        there: Sequence[float] = (),
        left_out: Collection[int] = _NOBODY,
    ) -> None:
        self._settings, self._clients, self._seed = availability, clients, seed
        self._there, self._left_out = there, left_out
        drawn = torch.randperm(clients, generator=generator(seed, "joiners"))[: availability.joiners]
        self._joiners = frozenset(drawn.tolist())

    def present(self, number: int) -> list[int]:
        """Who is there in round `number`, asked or not."""
        all_there = number >= self._settings.join_round
        return [i for i in range(self._clients) if (all_there or i not in self._joiners) and i not in self._left_out]

    def roll(self, number: int) -> Roll:
        """Everybody's attendance of round `number`."""
        present, settings = self.present(number), self._settings
        away = self._away(number, present)
        dropped = self._drawn("drop", settings.drop, number, present)
        late = self._drawn("late", settings.late, number, present) - dropped - away
        before = settings.drop_when == "before"
        return Roll(present, away | dropped if before else away, _NOBODY if before else dropped - away, late)

    def _away(self, number: int, present: Iterable[int]) -> frozenset[int]:
        """Whose device is not there."""
        doubtful = [i for i in present if self._there and self._there[i] < 1]
        draws = {i: torch.rand((), generator=generator(self._seed, "device", number, i)) for i in doubtful}
        return frozenset(i for i, value in draws.items() if float(value) >= self._there[i])

    def _drawn(self, purpose: str, probability: float, number: int, ids: Iterable[int]) -> frozenset[int]:
        """One draw for each client, from a stream of its own."""
        if not probability:
            return _NOBODY
        draws = {i: torch.rand((), generator=generator(self._seed, purpose, number, i)) for i in ids}
        return frozenset(i for i, value in draws.items() if float(value) < probability)


@dataclass(frozen=True, eq=False)
class LateUpload:
    """An upload under way. round: in which it was sent. message: tensors of its own."""

    client_id: int
    round: int
    exchange: str
    message: Message


class Post:
    """The uploads of one round, on their way from the clients to the server.

    Args:
        number: of the round. waiting: late uploads of earlier rounds.
        late_by: rounds that a late one needs. accepts: whether the method takes late ones.

    Attributes:
        waiting: what is still under way, due after this round. late: who sent something that is late. arrived,
        discarded: late uploads that were handed over, and those that count for nothing: at once where the method takes
        none; as soon as a fresh one of the same client is in time, which what is older would undo; on arrival where the
        round has no such exchange.
    """

    def __init__(self, number: int, waiting: Sequence[LateUpload], late_by: int, accepts: bool) -> None:
        self._number, self._accepts = number, accepts
        self._due = [upload for upload in waiting if upload.round + late_by <= number]
        self.waiting = [upload for upload in waiting if upload.round + late_by > number]
        self.late: set[int] = set()
        self.arrived: list[LateUpload] = []
        self.discarded: list[LateUpload] = []

    def deliver(self, exchange: str, sent: Mapping[int, Message], late: Collection[int]) -> dict[int, Message]:
        """What the server gets in an exchange, by number of client: what was `sent` in time, and what was due."""
        fresh = {i: message for i, message in sent.items() if i not in late}
        behind = [LateUpload(i, self._number, exchange, m) for i, m in sent.items() if i in late]
        self.late |= {upload.client_id for upload in behind}
        overtaken = [upload for upload in self.waiting if upload.exchange == exchange and upload.client_id in fresh]
        self.waiting = [upload for upload in self.waiting if upload not in overtaken]
        self.discarded.extend(overtaken)
        (self.waiting if self._accepts else self.discarded).extend(behind)
        uploads = dict(fresh)
        for upload in [upload for upload in self._due if upload.exchange == exchange]:
            self._due.remove(upload)
            (self.discarded if upload.client_id in fresh else self.arrived).append(upload)
            uploads.setdefault(upload.client_id, upload.message)
        return dict(sorted(uploads.items()))

    def record(self) -> dict[str, Any]:
        """The round's part of `rounds.jsonl`, when all its exchanges are over."""
        return {
            "late": sorted(self.late),
            "arrived": [{"client": u.client_id, "from": u.round} for u in self.arrived],
            "discarded": [{"client": u.client_id, "from": u.round} for u in [*self.discarded, *self._due]],
        }
