"""How a run elsewhere gets on, read off its run folder while it grows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from polyfed.engine.run_folder import RunFolder
from polyfed.loggers.console import Console
from polyfed.results.fields import check_present, validated
from polyfed.results.read import parse_json
from polyfed.results.schema import RoundRecord
from polyfed.results.stored_files import NodeEvent

__all__ = ["RunProgress"]


class RunProgress:
    """Shows the rounds that a run folder gains, and what happens to its nodes, as a run's own progress is shown.

    A block of it ends with the result.

    Args:
        folder: the run folder; need not exist yet.
        facts: what is known of the run beforehand (`Federation.facts`).
        console: where to.
        resume: whether the rounds that the folder holds count.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any], console: Console, resume: bool) -> None:
        self._folder = folder
        self._rounds = _Lines(folder / "rounds.jsonl", _check_record)
        self._events = _Lines(folder / "nodes.jsonl", _check_event)
        self._console = console
        self._total = int(facts["rounds"])
        there = list(self._rounds.new())
        _ = list(self._events.new())
        before = there if resume else []
        self._seconds = [float(record["seconds"]) for record in before]
        spent = {way: sum(record[way] for record in before) for way in ("bytes_up", "bytes_down")}
        console.start({**facts, **spent, "start_round": len(before) + 1, "out": str(folder)})

    @property
    def done(self) -> int:
        """How many rounds are complete."""
        return len(self._seconds)

    def poll(self) -> None:
        """Show what is new."""
        for event in self._events.new():
            if text := _told(event):
                self._console.message(text)
        for record in self._rounds.new():
            if record["round"] > len(self._seconds):
                self._seconds.append(float(record["seconds"]))
                pace = sum(self._seconds) / len(self._seconds)
                self._console.round(record, pace * max(0, self._total - len(self._seconds)))

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self._console.end(None if failed else RunFolder(self._folder).read_result())


def _check_record(found: Any) -> None:
    """Whether progress can show it."""
    check_present(validated(RoundRecord, found), ("seconds", "bytes_up", "bytes_down"))


def _check_event(found: Any) -> None:
    validated(NodeEvent, found)


def _told(event: Mapping[str, Any]) -> str | None:
    """A line of nodes.jsonl in words; None for what went as it should."""
    if "reason" not in event:
        return None
    who = f"client {event['client']}" if event.get("client") is not None else "a node"
    when = f"round {event['round']}: " if event.get("round") else ""
    return f"{when}{who}, {event.get('event', 'lost')}: {event['reason']}"


class _Lines:
    """The whole lines that a file of JSON lines has gained since the last look."""

    def __init__(self, path: Path, check: Callable[[Any], None]) -> None:
        self._path, self._check = path, check
        self._read = 0

    def new(self) -> Iterator[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._read:  # it was cut off: a resumed run drops what came after its checkpoint
                    self._read = 0
                file.seek(self._read)
                gained = file.read()
        except OSError:  # not there, or not there any more
            self._read = 0
            return
        whole = gained[: gained.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.split(b"\n")[:-1]:
            with contextlib.suppress(ValueError):  # a damaged one, of which the run itself will tell
                found = parse_json(line)
                self._check(found)
                yield found
