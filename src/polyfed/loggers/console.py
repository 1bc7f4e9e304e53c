"""Live progress in the terminal: a bar that is redrawn, or plain lines where the output is no terminal.

Progress is a courtesy: nothing here may stop a run. A stream that is closed or full is given up silently, and
characters that it cannot encode are replaced.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from polyfed.escaping import client_text, visible
from polyfed.results.main_score import main_score_of
from polyfed.units import human_bytes, human_seconds

__all__ = ["Console"]

_PAUSE = 1.0  # seconds between plain lines, at least
_PATIENCE = 30.0  # seconds without a plain line after which a long round says how far it is
_REFUSALS = 3  # that are named per round; the rest is counted
_BROKEN = (OSError, ValueError, AttributeError)  # closed, full, hung up; None under pythonw
_ASCII = str.maketrans({"±": "+/-", "…": "...", "━": "-", "╸": "-", "╺": "-", "–": "-", "—": "-", "→": "->"})


class Console:
    """Shows how a run gets on.

    Args:
        stream: where to; standard error by default, so that standard output stays free for results.
        terminal: draw a bar (True) or plain lines (False); by default the stream is asked.
        clock: seconds, monotonic (tests hand in their own).
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = _SafeStream(sys.stderr if stream is None else stream)
        self._terminal = self._stream.isatty() if terminal is None else terminal
        self._clock = clock
        self._title = ""  # in place of a run's own name
        self._progress: Any = None  # rich's, while a run is shown on a terminal
        self._begin({})

    def _begin(self, info: Mapping[str, Any]) -> None:
        self._info = dict(info)
        self._row = self._title or visible(str(info.get("label") or info.get("method", "?")))
        self._rounds = int(info.get("rounds") or 0)
        self._done = max(0, int(info.get("start_round") or 1) - 1)
        self._state = f"round {self._done}/{self._rounds}"
        self._sent = {way: float(info.get(f"bytes_{way}") or 0) for way in ("up", "down")}
        self._began = self._shown = self._clock()  # when the last plain line was
        self._pending: str | None = None  # a plain line held back because it was too soon

    def beside(self, title: str) -> Console:
        """For one of several runs at the same time: plain lines, by a title."""
        other = Console(self._stream, terminal=False, clock=self._clock)  # type: ignore[arg-type]
        other._title = visible(title)
        return other

    def start(self, info: Mapping[str, Any]) -> None:
        """A run begins.

        Args:
            info: method, label (in its place, of a variant or a control), dataset, clients, rounds, start_round (the
                first to be done), seed, evaluation, out; on resume also bytes_up and bytes_down spent so far.
        """
        self._stop()
        self._begin(info)
        score = main_score_of(str(info.get("score")).split())
        begin = f", from round {self._done + 1}" if self._done else ""
        where = f", into {info['out']}" if info.get("out") else ""
        self.message(
            f"{self._row} on {info.get('dataset', '?')}: {info.get('clients', '?')} clients, {self._rounds} rounds"
            f"{begin}, seed {info.get('seed', '?')}, {score.title} of stage {self._stage()}{where}"
        )
        if self._terminal:
            self._draw()
        self._shown = -math.inf

    def client_done(self, done: int, total: int) -> None:
        """A client of the running round has finished: ``done`` of ``total``."""
        if self._progress is not None:
            self._update(self._done + done / total, f"{self._state}  client {done}/{total}")
        elif self._clock() - max(self._shown, self._began) >= _PATIENCE:
            self._line(f"{self._row}  round {self._done + 1}/{self._rounds}: {done} of {total} clients done")

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        """A round is complete.

        Args:
            record: the line of ``rounds.jsonl``.
            remaining_seconds: the engine's estimate for the rest of the run.
        """
        self._done = int(record.get("round") or self._done + 1)
        for way in self._sent:
            self._sent[way] += record.get(f"bytes_{way}") or 0
        self._show_refused(record)
        score = main_score_of(record)
        mean = ((record.get(score.name) or {}).get(self._stage()) or {}).get("mean")
        loss = record.get("train_loss")
        known = remaining_seconds > 0 and math.isfinite(remaining_seconds)
        parts = [
            "final round" if record.get("final_round") else f"round {self._done}/{self._rounds}",
            "" if mean is None else f"{score.title} {score.text(mean)}{score.unit}",
            f"{human_seconds(remaining_seconds)} left" if known else "",
            f"up {human_bytes(self._sent['up'])}  down {human_bytes(self._sent['down'])}",
            "" if loss is None else f"loss {loss:.4g}",
        ]
        self._state = "  ".join(filter(None, parts))
        if self._progress is not None:
            self._update(self._done, self._state)
        elif self._clock() - self._shown < _PAUSE and self._done < self._rounds:
            self._pending = f"{self._row}  {self._state}"
        else:
            self._line(f"{self._row}  {self._state}")

    def message(self, text: str) -> None:
        """Something the user should know, above the progress."""
        line = visible(" ".join(str(text).splitlines()))
        if self._progress is not None:
            self._guard(lambda: self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True))
        else:
            self._stream.write(line + "\n")
            self._stream.flush()

    def end(self, result: Mapping[str, Any] | None) -> None:
        """The run is over; ``result`` is None when it was interrupted or failed. May be called more than once."""
        self._stop()
        if self._pending is not None:
            self._line(self._pending)
        if result is not None:
            score = main_score_of(result)
            value = result.get(score.name)
            parts = [
                f"{self._row}: {'nothing was learnt' if result.get('nothing_learnt') else 'done'}",
                "" if value is None else f"{score.title} {score.text(value)}{score.unit} ({self._stage()})",
                f"up {human_bytes(result.get('bytes_up') or self._sent['up'])}",
                f"down {human_bytes(result.get('bytes_down') or self._sent['down'])}",
                human_seconds(result.get("seconds") or self._clock() - self._began),
            ]
            self.message("  ".join(filter(None, parts)))

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

    def _line(self, line: str) -> None:
        self.message(line)
        self._shown = self._clock()
        self._pending = None

    # the bar ----------------------------------------------------------------------------------------------------
    def _draw(self) -> None:
        def begin() -> None:
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            # Whether it is a terminal is decided already. No thread redraws: workers may be forked at any time.
            console = RichConsole(file=self._stream, force_terminal=True, legacy_windows=False)  # type: ignore[arg-type]
            state = TextColumn(
                "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
            )
            bar = BarColumn(bar_width=20)
            progress = Progress(bar, state, console=console, auto_refresh=False, transient=True, expand=True)
            progress.add_task(f"{self._row}  {self._state}", total=self._rounds or None, completed=self._done)
            progress.start()
            console.show_cursor(True)  # a run may be killed at any time: never leave the user without a cursor
            self._progress = progress

        self._guard(begin)

    def _update(self, completed: float, state: str) -> None:
        text = f"{self._row}  {state}"
        self._guard(lambda: self._progress.update(0, completed=completed, description=text, refresh=True))

    def _stop(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            self._guard(progress.stop)

    def _guard(self, act: Callable[[], None]) -> None:
        """Does it; if drawing fails for any reason, goes on with plain lines."""
        try:
            act()
        except Exception:
            self._terminal = False
            self._progress = None


class _SafeStream:
    """A text stream that replaces what it cannot encode and falls silent when it breaks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether a line can be redrawn there."""
        try:
            return self._stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        except _BROKEN:
            return False

    def write(self, text: str) -> int:
        try:
            text.encode(self.encoding)
        except (UnicodeEncodeError, LookupError):  # an encoding that Python does not know
            text = text.translate(_ASCII).encode("ascii", "replace").decode("ascii")
        with contextlib.suppress(*_BROKEN):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(*_BROKEN):
            self._stream.flush()
