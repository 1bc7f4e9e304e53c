"""Ctrl-C at a place of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Interrupt:
    """A logger that presses Ctrl-C after a round, or within one when its first client is through."""

    def __init__(self, after: int = 0, within: int = 0) -> None:
        self.after, self.within, self.done = after, within, 0

    def start(self, info: Mapping[str, Any]) -> None:
        self.done = info["start_round"] - 1

    def client_done(self, done: int, total: int) -> None:
        if self.done + 1 == self.within:
            raise KeyboardInterrupt

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        self.done = record["round"]
        assert remaining_seconds >= 0
        if self.done == self.after:
            raise KeyboardInterrupt
