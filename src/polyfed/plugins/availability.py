"""Who is there in a round, who drops out of it, and what arrives late: ``[availability]``.

A joiner is absent before its first round: the server half does not see it. Drops and delays are drawn for each (round,
client) from a stream of its own, so that they depend on no other draw, on no method and on nobody else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from polyfed.core.message import Message
from polyfed.core.randomness import generator
from polyfed.engine.plugin import Plugin, Setup
from polyfed.engine.round_state import Round
from polyfed.engine.work_in_flight import UploadQueue
from polyfed.errors import ConfigError
from polyfed.plugins.settings import Availability


class ClientAvailability(Plugin):
    """Clients that join late, drop out, or whose uploads are late.

    Attributes:
        has_deadline: whether somebody may also be late because a simulated device is slow.
    """

    name = "availability"
    settings_class = Availability
    holds_uploads = True

    def __init__(self, settings: Availability | None = None) -> None:
        super().__init__(settings)
        self.has_deadline = False
        self._seed = 0
        self._joiners: frozenset[int] = frozenset()
        self._queue = UploadQueue(0, (), 1, accepts=False)

    def validate(self, setup: Setup) -> None:
        """Draw the joiners."""
        if setup.method.card.alone and self.settings.delay_rate:
            raise ConfigError(
                f"{setup.method.name}, alone: expected no availability.delay_rate, as nothing crosses that could be "
                f"late, got {self.settings.delay_rate:g}"
            )
        joiners = self.settings.late_joiners
        rounds = setup.training.rounds
        count = len(setup.clients) - len(setup.held_out)
        if joiners >= count:
            raise ConfigError(
                f"availability.late_joiners: expected fewer than the {count} clients, as one at least is there from "
                f"round 1, got {joiners}"
            )
        if joiners and self.settings.join_round > rounds:
            raise ConfigError(
                f"availability.join_round: expected at most training.rounds = {rounds}, got {self.settings.join_round}"
            )
        self._seed = setup.seed
        order = torch.randperm(len(setup.clients), generator=generator(setup.seed, "joiners")).tolist()
        training = [client for client in order if client not in setup.held_out]
        self._joiners = frozenset(training[:joiners])

    def facts(self) -> dict[str, Any]:
        """The settings; `delay_rounds` also says how late those are that miss a deadline."""
        active = self.settings.effective()
        if self.has_deadline:
            active["delay_rounds"] = self.settings.delay_rounds
        return {self.name: active} if active else {}

    def absent(self, number: int) -> Collection[int]:
        """The joiners, before their first round."""
        return () if number >= self.settings.join_round else self._joiners

    def select(self, round: Round) -> None:
        """Draw who drops out and who is late; a final round knows neither, and waits for nothing."""
        settings = self.settings
        waiting = list(self.late_uploads)
        if round.final:
            waiting = []
        self._queue = UploadQueue(round.number, waiting, settings.delay_rounds, round.method.accepts_stale_uploads)
        if round.final:
            return
        dropped = self._drawn("drop", settings.dropout_rate, round)
        if settings.dropout_stage == "before":
            round.unreachable |= dropped
        else:
            round.silenced |= dropped
        round.late |= self._drawn("late", settings.delay_rate, round) - dropped

    def _drawn(self, purpose: str, probability: float, round: Round) -> set[int]:
        """One draw for each client, from a stream of its own."""
        if not probability:
            return set()
        draws = {i: torch.rand((), generator=generator(self._seed, purpose, round.number, i)) for i in round.present}
        return {i for i, value in draws.items() if float(value) < probability}

    def deliver(self, round: Round, uploads: Mapping[int, Message]) -> Mapping[int, Message]:
        """The uploads without those that are late now, with those that were due."""
        return self._queue.collect(round.exchange.name, uploads, round.late)

    def record(self, round: Round) -> dict[str, Any]:
        """Who dropped out; what is late, has arrived, and was discarded."""
        self.late_uploads = self._queue.waiting
        return {"dropped": round.dropped(), **self._queue.record()}
