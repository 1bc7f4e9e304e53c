"""Live progress in the terminal: one line that is redrawn, or plain lines where the output is no terminal.

Progress is a courtesy: nothing here may stop a run. A stream that is closed or full is given up silently, characters
that it cannot encode are replaced, and on a narrow terminal the line drops its less important parts.
No thread is started (worker processes may be forked at any time), so the line is redrawn when something happens.
"""

from __future__ import annotations

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

_PLAIN_PAUSE = 1.0  # seconds between plain lines, at least
_PATIENCE = 30.0  # seconds without a plain line after which a long round tells how far it is
_REDRAW_PAUSE = 0.1  # seconds between redrawings of the live line, at least
_BAR = (8, 30)  # characters, at least and at most
_HUGE = 1e6  # losses from here on are shown in powers of ten
_REFUSALS_TOLD = 3  # per round; the rest is counted
_ASCII = str.maketrans({"±": "+/-", "…": "...", "━": "-", "╸": "-", "╺": "-", "–": "-", "—": "-", "→": "->"})


class Console:
    """Shows how a run gets on; the engine calls the five verbs below.

    Args:
        quiet: show nothing at all.
        stream: where to; standard error by default, so that standard output stays free for results.
        terminal: overwrite the live line (True) or plain lines (False); by default the stream is asked.
        clock: seconds, monotonic (tests hand in their own).
    """

    def __init__(
        self,
        quiet: bool = False,
        stream: TextIO | None = None,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quiet = quiet
        self._stream = SafeStream(sys.stderr if stream is None else stream)
        self._terminal = self._stream.is_terminal() if terminal is None else terminal
        self._clock = clock
        self._live: Any = None
        self._reset({})

    def _reset(self, info: Mapping[str, Any]) -> None:
        self._info = dict(info)
        self._row = visible(str(info.get("label") or info.get("method", "?")))
        self._rounds = int(info.get("rounds") or 0)
        self._done = max(0, int(info.get("start_round") or 1) - 1)
        self._is_final = False
        self._clients: tuple[int, int] = (0, 0)
        self._accuracy = ""
        self._up = float(info.get("bytes_up") or 0)
        self._down = float(info.get("bytes_down") or 0)
        self._remaining = math.nan
        self._began = self._clock()
        self._said: float | None = None  # when the last plain line or redrawing was
        self._drawn: float | None = None  # when a round was last drawn on the live line
        self._pending: str | None = None  # a plain line held back because it came too soon

    # what the engine calls --------------------------------------------------------------------------------------
    def start(self, info: Mapping[str, Any]) -> None:
        """A run begins.

        Args:
            info: method, label (in its place, of a variant or a control), dataset, clients, rounds, start_round (the
                first to be done), seed, evaluation, out; on resume also bytes_up and bytes_down spent so far.
        """
        self._stop_live()
        self._reset(info)
        if self._quiet:
            return
        score = main_score_of(str(info.get("score")).split())
        begin = f", from round {self._done + 1}" if self._done else ""
        where = f", into {info['out']}" if info.get("out") else ""
        self._print(
            f"{self._row} on {info.get('dataset', '?')}: {info.get('clients', '?')} clients, {self._rounds} rounds"
            f"{begin}, seed {info.get('seed', '?')}, {score.title} of stage {self._stage()}{where}"
        )
        if self._terminal:
            self._start_live()
        self._said = None

    def client_done(self, done: int, total: int) -> None:
        """A client of the running round has finished: ``done`` of ``total``."""
        if self._quiet:
            return
        self._clients = (done, total)
        if self._live is not None:
            self._redraw()
        elif not self._terminal and self._clock() - (self._began if self._said is None else self._said) >= _PATIENCE:
            self._say(f"{self._row}  round {self._done + 1}/{self._rounds}: {done} of {total} clients done")

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        """A round is complete.

        Args:
            record: the line of ``rounds.jsonl``.
            remaining_seconds: the engine's estimate for the rest of the run.
        """
        if self._quiet:
            return
        self._done = int(record.get("round") or self._done + 1)
        self._is_final = bool(record.get("final_round"))
        self._clients = (0, 0)
        self._up += record.get("bytes_up") or 0
        self._down += record.get("bytes_down") or 0
        self._remaining = remaining_seconds
        score = main_score_of(record)
        mean = ((record.get(score.name) or {}).get(self._stage()) or {}).get("mean")
        if mean is not None:
            self._accuracy = f"{score.title} {score.text(mean)}{score.unit}"
        self._tell_refused(record)
        if self._live is not None:
            if self._drawn is None or self._done >= self._rounds or self._clock() - self._drawn >= _REDRAW_PAUSE:
                self._drawn = self._clock()
                self._redraw(now=True)
            return
        line = "  ".join(part for part in (self._row, *self._parts(record)) if part)
        soon = self._said is not None and self._clock() - self._said < _PLAIN_PAUSE
        if soon and self._done < self._rounds:
            self._pending = line
        else:
            self._say(line)

    def message(self, text: str) -> None:
        """Something the user should know, above the progress."""
        if not self._quiet:
            self._print(str(text))

    def end(self, result: Mapping[str, Any] | None) -> None:
        """The run is over; ``result`` is None when it was interrupted or failed. May be called more than once."""
        self._stop_live()
        if self._quiet:
            return
        if self._pending is not None:
            self._say(self._pending)
        if result is not None:
            score = main_score_of(result)
            accuracy = result.get(score.name)
            parts = [
                f"{self._row}: {'nothing was learnt' if result.get('nothing_learnt') else 'done'}",
                "" if accuracy is None else f"{score.title} {score.text(accuracy)}{score.unit} ({self._stage()})",
                f"up {human_bytes(result.get('bytes_up') or self._up)}",
                f"down {human_bytes(result.get('bytes_down') or self._down)}",
                human_seconds(result.get("seconds") or self._clock() - self._began),
            ]
            self._print("  ".join(part for part in parts if part))

    # words ------------------------------------------------------------------------------------------------------
    def _stage(self) -> str:
        return visible(str((self._info.get("evaluation") or {}).get("stage", "?")))

    def _parts(self, record: Mapping[str, Any] | None = None) -> list[str]:
        """What the line says, the most important first."""
        loss = None if record is None else record.get("train_loss")
        return [
            "final round" if self._is_final else f"round {self._done}/{self._rounds}",
            self._accuracy,
            f"{human_seconds(self._remaining)} left" if self._remaining > 0 and math.isfinite(self._remaining) else "",
            f"up {human_bytes(self._up)}  down {human_bytes(self._down)}",
            _loss_text(loss),
            f"client {self._clients[0]}/{self._clients[1]}" if self._clients[1] else "",
        ]

    def _title(self, client: Any) -> str:
        names = self._info.get("client_names") or ()
        return client_text(client, names[client] if isinstance(client, int) and client < len(names) else "")

    def _tell_refused(self, record: Mapping[str, Any]) -> None:
        refused = list(record.get("refused") or [])
        for entry in refused[:_REFUSALS_TOLD]:
            self.message(f"round {self._done}: {self._title(entry.get('client'))} refused: {entry.get('reason')}")
        if len(refused) > _REFUSALS_TOLD:
            self.message(f"round {self._done}: {len(refused) - _REFUSALS_TOLD} more clients refused")

    # plain lines ------------------------------------------------------------------------------------------------
    def _say(self, line: str) -> None:
        self._print(line)
        self._said = self._clock()
        self._pending = None

    def _print(self, text: str) -> None:
        line = visible(" ".join(text.splitlines()))
        if self._live is not None:
            self._guard(lambda: self._live.console.print(line, markup=False, highlight=False, soft_wrap=True))
        else:
            self._stream.write(line + "\n")
            self._stream.flush()

    # the live line ----------------------------------------------------------------------------------------------
    def _start_live(self) -> None:
        def begin() -> None:
            from rich.console import Console as RichConsole
            from rich.live import Live

            # The stream is ours already, so whether it is a terminal is not rich's question any more.
            console = RichConsole(file=self._stream, force_terminal=True, legacy_windows=False)  # type: ignore[arg-type]
            live = Live(_Line(self), console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
            live.start(refresh=True)
            console.show_cursor(True)  # a run may be killed at any time: never leave the user without a cursor
            self._live = live

        self._guard(begin)

    def _redraw(self, now: bool = False) -> None:
        if now or self._said is None or self._clock() - self._said >= _REDRAW_PAUSE:
            self._said = self._clock()
            self._guard(lambda: self._live.refresh())

    def _stop_live(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            self._guard(live.stop)

    def _guard(self, act: Callable[[], None]) -> None:
        """Does it; if drawing fails for any reason, goes on with plain lines."""
        try:
            act()
        except Exception:
            live = self._live
            self._live = None
            self._terminal = False
            if live is not None:
                try:
                    live.stop()
                except Exception:
                    self._stream.give_up()


class _Line:
    """What rich draws: one line made for the width that there is."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __rich_console__(self, rich_console: Any, options: Any) -> Any:
        from rich.text import Text

        yield Text(self.text(options.max_width - 1), no_wrap=True, overflow="crop", end="")

    def text(self, width: int) -> str:
        """The parts that fit, a bar where there is room left, the method's name in front."""
        console = self._console
        round_, accuracy, left, sent, _, client = console._parts()
        bar = "[" + " " * _BAR[0] + "]"
        order = [console._row, bar, round_, accuracy, left, sent, client]  # as shown
        shown: set[str] = set()
        for part in (round_, accuracy, left, console._row, sent, bar, client):  # by importance
            if part and len("  ".join([*shown, part])) <= width:
                shown.add(part)
        line = "  ".join(part for part in order if part in shown)
        if bar in shown:
            room = min(_BAR[1], _BAR[0] + width - len(line))
            line = line.replace(bar, _bar(console._done, console._rounds, console._clients, room), 1)
        return line[: max(width, 0)]


def _bar(done: int, rounds: int, clients: tuple[int, int], width: int) -> str:
    part = clients[0] / clients[1] if clients[1] else 0.0
    share = min(1.0, (done + part) / rounds) if rounds else 0.0
    full = round(share * width)
    return f"[{'=' * full}{' ' * (width - full)}]"


class SafeStream:
    """A text stream that replaces what it cannot encode and falls silent when it breaks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._broken = False
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def is_terminal(self) -> bool:
        """Whether a line can be redrawn there."""
        try:
            return self._stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        except (AttributeError, OSError, ValueError):
            return False

    def isatty(self) -> bool:
        return self.is_terminal()

    def fileno(self) -> int:
        return self._stream.fileno()

    def give_up(self) -> None:
        self._broken = True

    def write(self, text: str) -> int:
        if not self._broken:
            try:
                self._stream.write(self._encodable(text))
            except (OSError, ValueError, AttributeError):  # closed, full, hung up; None under pythonw
                self._broken = True
        return len(text)

    def flush(self) -> None:
        if not self._broken:
            try:
                self._stream.flush()
            except (OSError, ValueError, AttributeError):
                self._broken = True

    def _encodable(self, text: str) -> str:
        try:
            text.encode(self.encoding)
            return text
        except UnicodeEncodeError:
            return text.translate(_ASCII).encode(self.encoding, "replace").decode(self.encoding)
        except LookupError:  # an encoding that Python does not know
            return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def _loss_text(loss: float | None) -> str:
    """A training loss; nothing where nothing was trained."""
    if loss is None:
        return ""
    return f"loss {loss:.4f}" if loss < _HUGE else f"loss {loss:.3g}"
