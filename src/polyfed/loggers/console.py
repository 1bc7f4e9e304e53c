"""Live progress: one line that is rewritten in a terminal and in a notebook, and a line every so often in a log.

Progress is a courtesy: nothing here may stop a run. A stream that is closed or full is given up silently, and
characters that it cannot encode are replaced.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from polyfed.escaping import client_text, visible
from polyfed.records.main_score import main_score_of
from polyfed.units import human_bytes, human_seconds

__all__ = ["Console"]

_REWRITE = 0.2  # seconds before a line is rewritten, at least
_PAUSES = (1.0, 60.0)  # seconds between two lines of a log, from a run's first seconds to its hours
_PATIENCE = 30.0  # seconds without a line after which a long round says in a log how far it is
_REFUSALS = 3  # refused clients that are named per round; the rest is counted
# closed, full, hung up; None under pythonw; of an encoding that Python does not know
_BROKEN = (OSError, ValueError, AttributeError, LookupError)


class Console:
    """Shows how a run gets on.

    Args:
        stream: where to; by default standard error, so that standard output stays free for results, and in a notebook
            the cell's output. One line is rewritten in a terminal; else a line is written every so often.
        clock: seconds, monotonic (tests hand in their own).
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._line = _Line(stream, clock)
        self._title = ""  # in place of a run's own name
        self._begin({})

    def _begin(self, info: Mapping[str, Any]) -> None:
        self._info = dict(info)
        self._row = self._title or visible(str(info.get("label") or info.get("method", "?")))
        self._rounds = int(info.get("rounds") or 0)
        self._done = max(0, int(info.get("start_round") or 1) - 1)
        self._number = f"round {self._done}/{self._rounds}"
        self._score = self._loss = ""
        self._scored = self._done  # the round of the score
        self._ends = math.nan  # when the run will be over

    def of_several(self, title: str) -> Console:
        """For one of several runs, which share the line."""
        other = copy.copy(self)
        other._title = visible(title)
        return other

    def start(self, info: Mapping[str, Any]) -> None:
        """A run begins.

        Args:
            info: method, label (in its place, of a variant or a control), dataset, clients, rounds, start_round (the
                first to be done), seed, evaluation, out.
        """
        self._begin(info)
        score = main_score_of(str(info.get("score")).split())
        begin = f", from round {self._done + 1}" if self._done else ""
        where = f", into {info['out']}" if info.get("out") else ""
        seed = "" if self._title else f", seed {info.get('seed', '?')}"
        self.message(
            f"{self._row} on {info.get('dataset', '?')}: {info.get('clients', '?')} clients, {self._rounds} rounds"
            f"{begin}{seed}, {score.title} of stage {self._stage()}{where}"
        )

    def client_done(self, done: int, total: int) -> None:
        """A client of the running round has finished: ``done`` of ``total``."""
        if self._line.is_due(_PATIENCE):
            self._line.show(self._text(f"client {done}/{total}"))

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        """A round is complete.

        Args:
            record: the line of ``rounds.jsonl``.
            remaining_seconds: the engine's estimate for the rest of the run.
        """
        self._done = int(record.get("round") or self._done + 1)
        self._show_refused(record)
        self._ends = self._clock() + remaining_seconds if remaining_seconds > 0 else math.nan
        score = main_score_of(record)
        mean = ((record.get(score.name) or {}).get(self._stage()) or {}).get("mean")
        loss = record.get("train_loss")
        self._number = "final round" if record.get("final_round") else f"round {self._done}/{self._rounds}"
        if mean is not None:
            self._score = f"{score.title} {score.text(mean)}{score.unit}"
            self._scored = self._done
        self._loss = "" if loss is None else f"loss {loss:.4g}"
        self._line.show(self._text())

    def message(self, text: str) -> None:
        """Something the user should know, above the progress."""
        self._line.message(visible(" ".join(str(text).splitlines())))

    def end(self, result: Mapping[str, Any] | None) -> None:
        """The run is over; ``result`` is None when it was interrupted or failed. May be called more than once."""
        last = ""
        if result is not None:
            score = main_score_of(result)
            value = result.get(score.name)
            parts = [
                f"{self._row}: {'nothing was learnt' if result.get('nothing_learnt') else 'done'}",
                "" if value is None else f"{score.title} {score.text(value)}{score.unit} ({self._stage()})",
                f"up {human_bytes(result.get('bytes_up') or 0)}  down {human_bytes(result.get('bytes_down') or 0)}",
                human_seconds(result.get("seconds") or math.nan),
            ]
            last = visible("  ".join(filter(None, parts)))
        self._line.end(last)

    def _text(self, client: str = "") -> str:
        left = self._ends - self._clock()
        time_left = f"{human_seconds(max(0.0, left))} left" if math.isfinite(left) else ""
        score = self._score
        if score and self._scored < self._done:
            score += f" (round {self._scored})"
        return "  ".join(filter(None, [self._row, self._number, client, score, self._loss, time_left]))

    def _stage(self) -> str:
        return visible(str((self._info.get("evaluation") or {}).get("stage", "?")))

    def _show_refused(self, record: Mapping[str, Any]) -> None:
        names = self._info.get("client_names") or ()
        refused = list(record.get("refused") or [])
        for entry in refused[:_REFUSALS]:
            client = entry.get("client")
            name = names[client] if isinstance(client, int) and client < len(names) else ""
            self.message(f"round {self._done}: {client_text(client, name)} refused: {entry.get('reason')}")
        if len(refused) > _REFUSALS:
            self.message(f"round {self._done}: {len(refused) - _REFUSALS} more clients refused")


class _Line:
    """Where progress is shown: a line that is rewritten, or lines of a log."""

    def __init__(self, stream: TextIO | None, clock: Callable[[], float]) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._in_notebook = type(self._stream).__module__ == "ipykernel.iostream"
        if self._in_notebook:
            self._stream = sys.stdout  # the other one is shown in red
        self._is_terminal = False
        with contextlib.suppress(*_BROKEN):
            self._is_terminal = self._stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        self._clock = clock
        self._created = self._shown = clock()
        self._text = ""  # what stands in the line
        self._held = ""  # a line of a log held back because it was too soon
        self._handle: Any = None  # the display of the line in a notebook

    def is_due(self, least: float = 0.0) -> bool:
        """Whether enough time has passed since the last line. least: seconds between two lines of a log."""
        now = self._clock()
        pause = _REWRITE
        if not (self._is_terminal or self._in_notebook):
            shortest, longest = _PAUSES
            pause = max(least, min(max((now - self._created) / 50, shortest), longest))
        return now - self._shown >= pause

    def show(self, text: str) -> None:
        """Have the line say this; or, where it is too soon, if nothing comes after it."""
        if self.is_due():
            self._rewrite(text)
        else:
            self._held = text

    def message(self, text: str) -> None:
        """A line of its own, above."""
        current = self._text
        self._write_whole(text)
        if current:
            self._rewrite(self._held or current)

    def end(self, text: str) -> None:
        """Have the line be this for good; "" what it last was to be."""
        last = text or self._held
        if self._in_notebook and last:
            self._rewrite(last)
        elif last:
            self._write_whole(last)
        elif self._text:
            self._write("\n")
        self._text = self._held = ""
        self._handle = None

    def _rewrite(self, text: str) -> None:
        self._shown = self._clock()
        self._held = ""
        if self._in_notebook:
            self._display(text)
        elif self._is_terminal:
            self._text = text
            self._write(f"\r\x1b[?7l{text}\x1b[K\x1b[?7h")  # what is longer than the terminal is wide is cut by it
        else:
            self._write(f"{text}\n")

    def _write_whole(self, text: str) -> None:
        self._shown = self._clock()
        erase = "\r\x1b[K" if self._text else ""
        self._text = ""
        self._write(f"{erase}{text}\n")

    def _display(self, text: str) -> None:
        from IPython.display import display

        plain = {"text/plain": text}
        if self._handle is None:
            self._handle = display(plain, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(plain, raw=True)

    def _write(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with contextlib.suppress(*_BROKEN):
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
