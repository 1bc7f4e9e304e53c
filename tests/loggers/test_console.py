"""The live progress: on a terminal, on none, on bad ones."""

import io
import re
from typing import Any

import pytest

from polyfed.loggers.console import Console
from polyfed.units import human_bytes, human_seconds

INFO = {
    "method": "fedgh",
    "dataset": "digits",
    "clients": 10,
    "rounds": 5,
    "start_round": 1,
    "seed": 0,
    "evaluation": {"stage": "personal"},
    "out": "runs/a",
}
RESULT = {"accuracy": 0.75, "bytes_up": 5120, "bytes_down": 10240, "seconds": 65.0}


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def record(number: int, **more: Any) -> dict[str, Any]:
    accuracy = {"personal": {"mean": number / 10, "std": 0.1}}
    return {"round": number, "bytes_up": 1024, "bytes_down": 2048, "train_loss": 0.5, "accuracy": accuracy, **more}


def drive(
    console: Console, clock: Clock, seconds: float, rounds: int = 5, result: dict[str, Any] | None = RESULT
) -> None:
    console.start(INFO)
    for number in range(1, rounds + 1):
        console.client_done(5, 10)
        clock.now += seconds
        console.round(record(number), seconds * (5 - number))
    console.end(result)


def test_a_control_or_a_variant_goes_by_the_name_of_its_row() -> None:
    stream = io.StringIO()
    console = Console(stream=stream)
    console.start({**INFO, "label": "fedgh-alone"})
    console.round(record(5), 0.0)
    console.end(RESULT)
    assert [line.split()[0].strip(":") for line in stream.getvalue().splitlines()] == ["fedgh-alone"] * 3


def test_plain_lines_one_per_round() -> None:
    stream, clock = io.StringIO(), Clock()
    drive(Console(stream=stream, clock=clock), clock, seconds=2.0)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "fedgh on digits: 10 clients, 5 rounds, seed 0, accuracy of stage personal, into runs/a"
    assert lines[3] == "fedgh  round 3/5  accuracy 30.00 %  4.0 s left  up 3.0 KiB  down 6.0 KiB  loss 0.5000"
    assert lines[-1] == "fedgh: done  accuracy 75.00 % (personal)  up 5.0 KiB  down 10.0 KiB  1 min 05 s"
    assert len(lines) == 7
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_quick_rounds_are_thinned_out_but_the_last_is_told() -> None:
    stream, clock = io.StringIO(), Clock()
    drive(Console(stream=stream, clock=clock), clock, seconds=0.3)
    assert re.findall(r"round (\d)/5", stream.getvalue()) == ["1", "5"]
    stream, clock = io.StringIO(), Clock()
    drive(Console(stream=stream, clock=clock), clock, seconds=0.3, rounds=3, result=None)  # interrupted after round 3
    assert re.findall(r"round (\d)/5", stream.getvalue()) == ["1", "3"]
    assert "done" not in stream.getvalue()


def test_a_long_round_tells_how_far_it_is() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, clock=clock)
    console.start(INFO)
    for done in range(1, 5):
        clock.now += 20
        console.client_done(done, 10)
    assert re.findall(r"(\d) of 10 clients", stream.getvalue()) == ["2", "4"]


def test_on_resume_the_count_goes_on() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, clock=clock)
    console.start({**INFO, "start_round": 4, "bytes_up": 3072, "bytes_down": 0})
    console.round(record(4, accuracy={}), 1.0)
    assert "from round 4" in stream.getvalue()
    assert "round 4/5  1.0 s left  up 4.0 KiB  down 2.0 KiB" in stream.getvalue()


def test_refusals_are_told_each_time() -> None:
    stream = io.StringIO()
    console = Console(stream=stream, clock=Clock())
    console.start(INFO)
    console.round(record(1, refused=[{"client": 4, "reason": "loss is nan"}]), 1.0)
    console.round(record(2, refused=[{"client": c, "reason": "loss is nan"} for c in range(6)]), 1.0)
    assert "round 1: client 4 refused: loss is nan" in stream.getvalue()
    assert "round 2: 3 more clients refused" in stream.getvalue()


@pytest.mark.parametrize("forced", [True, None])
def test_a_terminal_gets_a_line_that_is_redrawn(monkeypatch: pytest.MonkeyPatch, forced: bool | None) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream, clock = Terminal() if forced is None else io.StringIO(), Clock()
    drive(Console(stream=stream, terminal=forced, clock=clock), clock, seconds=2.0)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "\x1b[" in stream.getvalue()
    assert "round 3/5  accuracy 30.00 %  4.0 s left  up 3.0 KiB  down 6.0 KiB" in text
    assert "fedgh  [" in text
    assert "client 5/10" in text
    assert text.count("\n") == 3  # the line before, the one after, and the progress once: rich erases that one again
    assert "fedgh: done" in text
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")  # the cursor is back


def test_the_bar_is_kept_before_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, terminal=True, clock=clock)
    console.start(INFO)
    console.round(record(2), 1.0)
    clock.now += 1
    console.client_done(5, 10)
    console.end(None)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).rstrip().split("\r")[-1]
    assert last.startswith("fedgh  [======       ]  round 2/5  accuracy 20.00 %")  # 2.5 of 5 rounds, 6.5 of 13


def test_messages_stand_above_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    console = Console(stream=stream, terminal=True, clock=Clock())
    console.start(INFO)
    console.message("checkpoint [written] to\nruns/a")
    console.end(None)
    console.end(None)
    assert "checkpoint [written] to runs/a" in stream.getvalue()


@pytest.mark.parametrize("width", ["1", "2", "7", "20", "45", "300"])
@pytest.mark.parametrize("terminal", [True, False])
def test_any_width(monkeypatch: pytest.MonkeyPatch, width: str, terminal: bool) -> None:
    monkeypatch.setenv("COLUMNS", width)
    stream, clock = io.StringIO(), Clock()
    drive(Console(stream=stream, terminal=terminal, clock=clock), clock, seconds=2.0)
    assert "round 5/5" in stream.getvalue() or int(width) < 20
    if terminal:
        drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).split("\n")[1].split("\r")
        assert max(map(len, drawn[:-1])) < max(int(width), 2)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_any_encoding(encoding: str, terminal: bool) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True)
    console = Console(stream=stream, terminal=terminal, clock=Clock())
    console.start({**INFO, "method": "föderiert→", "out": "läufe/日本"})
    console.round(record(1), 3.0)
    console.message("± …")
    console.end(RESULT)
    assert b"round 1/5" in raw.getvalue()
    if encoding == "ascii":
        assert b"+/- ..." in raw.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_broken_stream_never_stops_a_run(terminal: bool) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError("hung up")

    for stream in (Broken(), io.StringIO()):
        console, clock = Console(stream=stream, terminal=terminal), Clock()
        console.start(INFO)
        stream.close()
        drive(console, clock, seconds=1.0)
        console.message("more")


def test_dumb_terminals_get_plain_lines_and_quiet_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream, clock = Terminal(), Clock()
    drive(Console(stream=stream, clock=clock), clock, seconds=2.0)
    assert "\x1b" not in stream.getvalue()
    for terminal in (True, False):
        stream = Terminal()
        console = Console(quiet=True, stream=stream, terminal=terminal)
        drive(console, clock, seconds=2.0)
        console.message("hello")
        assert stream.getvalue() == ""


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    drive(Console(clock=clock), clock, seconds=2.0)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fedgh: done" in captured.err


def test_units_at_their_edges() -> None:
    assert human_bytes(1024**2 - 1) == "1.0 MiB"
    assert human_bytes(2**70) == "1048576.0 PiB"
    assert human_bytes(1023.7) == "1.0 KiB"
    assert human_bytes(float("nan")) == human_seconds(float("inf")) == human_seconds(-1) == "?"
    assert human_seconds(3600 * 24 - 1) == "1 d 00 h"
