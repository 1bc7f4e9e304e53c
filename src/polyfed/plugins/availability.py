"""Who is there in a round, and who drops out of it: ``[availability]``.

A joiner is absent before its first round: the server half does not see it. Drops are drawn for each (round,
client) from a stream of its own, so that they depend on no other draw, on no method and on nobody else.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from polyfed.core.randomness import generator
from polyfed.engine.plugin import Plugin, Setup
from polyfed.engine.round_state import Round
from polyfed.errors import ConfigError
from polyfed.plugins.settings import Availability


class ClientAvailability(Plugin):
    """Clients that join late, or drop out."""

    name = "availability"
    settings_class = Availability

    def __init__(self, settings: Availability | None = None) -> None:
        super().__init__(settings)
        self._seed = 0
        self._joiners: frozenset[int] = frozenset()

    def validate(self, setup: Setup) -> None:
        """Draw the joiners."""
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

    def absent(self, number: int) -> Collection[int]:
        """The joiners, before their first round."""
        return () if number >= self.settings.join_round else self._joiners

    def select(self, round: Round) -> None:
        """Draw who drops out, each from a stream of its own; nobody does in a final round."""
        settings = self.settings
        if round.final or not settings.dropout_rate:
            return
        draws = {i: torch.rand((), generator=generator(self._seed, "drop", round.number, i)) for i in round.present}
        dropped = {i for i, value in draws.items() if float(value) < settings.dropout_rate}
        if settings.dropout_stage == "before":
            round.unreachable |= dropped
        else:
            round.silenced |= dropped

    def record(self, round: Round) -> dict[str, Any]:
        """Who dropped out."""
        return {"dropped": round.dropped()}
