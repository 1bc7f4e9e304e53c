"""Who watches a run: a whole logger, an object with some of its methods, or a function of a round's record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Protocol

from polyfed.errors import ConfigError

_EVENTS = ("start", "client_done", "round", "message", "end")


class Logger(Protocol):
    """Somebody who watches a run: progress on a terminal, curves elsewhere."""

    def start(self, info: Mapping[str, Any]) -> None:
        """A run begins; `info` holds its facts, its first round and the bytes spent before."""

    def client_done(self, done: int, total: int) -> None:
        """So many of a round's clients are through."""

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        """A round is through; `record` is its line in `rounds.jsonl`."""

    def message(self, text: str) -> None:
        """Something worth a line."""

    def end(self, result: Mapping[str, Any] | None) -> None:
        """The run is over; None: it failed or was interrupted."""


def as_logger(given: Any) -> Any:
    """The object itself, or one that calls a function after every round.

    Args:
        given: an object with at least one of `Logger`'s methods, or a function of a round's record.

    Raises:
        ConfigError: neither.
    """
    if isinstance(given, type):
        raise ConfigError(f"loggers: expected an object, got the class {given.__name__}; write {given.__name__}()")
    if any(callable(getattr(given, event, None)) for event in _EVENTS):
        return given
    if callable(given):
        return SimpleNamespace(round=lambda record, remaining_seconds: given(record))
    raise ConfigError(
        f"loggers: expected a function of a round's record or an object with one of {', '.join(_EVENTS)}, got "
        f"{type(given).__name__}"
    )


def notify(loggers: Iterable[Any], event: str, *what: Any) -> None:
    """Call the method named `event` of the loggers that have it. what: its arguments."""
    for logger in loggers:
        method = getattr(logger, event, None)
        if callable(method):
            method(*what)
