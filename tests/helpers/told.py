"""A logger for tests: it keeps the messages, and calls a function after every round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Told:
    """`messages`: in order. `progress`: (done, of how many jobs). `each` is called with every record."""

    def __init__(self, each: Callable[[Mapping[str, Any]], None] = lambda _: None) -> None:
        self.messages: list[str] = []
        self.progress: list[tuple[int, int]] = []
        self._each = each

    def message(self, text: str) -> None:
        self.messages.append(text)

    def client_done(self, done: int, total: int) -> None:
        self.progress.append((done, total))

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        self._each(record)

    def start(self, info: Any) -> None: ...
    def end(self, result: Any) -> None: ...
