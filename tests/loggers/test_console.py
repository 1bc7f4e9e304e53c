"""The live progress: on a terminal, on none, on bad ones."""

import io
import re
from typing import Any

import pytest

from polyfed.loggers.console import Console

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


def test_plain_lines_one_per_round() -> None:
    stream, clock = io.StringIO(), Clock()
    drive(Console(stream=stream, clock=clock), clock, seconds=2.0)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "fedgh on digits: 10 clients, 5 rounds, seed 0, accuracy of stage personal, into runs/a"
    assert lines[3] == "fedgh  round 3/5  accuracy 30.00 %  4.0 s left  up 3.0 KiB  down 6.0 KiB  loss 0.5"
    assert lines[-1] == "fedgh: done  accuracy 75.00 % (personal)  up 5.0 KiB  down 10.0 KiB  1 min 05 s"
    assert len(lines) == 7
    assert not {"\x1b", "\r"} & set(stream.getvalue())


def test_quick_rounds_are_thinned_out_and_long_ones_say_how_far_they_are() -> None:
    stream, clock = io.StringIO(), Clock()
    drive(Console(stream=stream, clock=clock), clock, seconds=0.3)
    assert re.findall(r"round (\d)/5", stream.getvalue()) == ["1", "5"]
    stream, clock = io.StringIO(), Clock()
    drive(Console(stream=stream, clock=clock), clock, seconds=0.3, rounds=3, result=None)  # interrupted after round 3
    assert re.findall(r"round (\d)/5", stream.getvalue()) == ["1", "3"]
    assert "done" not in stream.getvalue()
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, clock=clock)
    console.start(INFO)
    for done in range(1, 5):
        clock.now += 20
        console.client_done(done, 10)
    assert re.findall(r"(\d) of 10 clients", stream.getvalue()) == ["2", "4"]


def test_a_resumed_variant_goes_by_its_name_and_its_count_goes_on() -> None:
    stream = io.StringIO()
    console = Console(stream=stream, clock=Clock())
    console.start({**INFO, "label": "fedgh-alone", "start_round": 4, "bytes_up": 3072, "bytes_down": 0})
    refused = [{"client": c, "reason": "loss is nan"} for c in (4, 0, 1, 2, 3, 5)]
    console.round(record(4, accuracy={}, refused=refused), 1.0)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("fedgh-alone on digits: 10 clients, 5 rounds, from round 4")
    assert lines[1] == "round 4: client 4 refused: loss is nan"
    assert lines[4:] == [
        "round 4: 3 more clients refused", "fedgh-alone  round 4/5  1.0 s left  up 4.0 KiB  down 2.0 KiB  loss 0.5",
    ]  # fmt: skip


def drawn(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


@pytest.mark.parametrize("forced", [True, None])
def test_a_terminal_gets_a_bar_that_is_redrawn(monkeypatch: pytest.MonkeyPatch, forced: bool | None) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream, clock = Terminal() if forced is None else io.StringIO(), Clock()
    console = Console(stream=stream, terminal=forced, clock=clock)
    drive(console, clock, seconds=2.0)
    console.message("a message [in] two\nlines")
    text = drawn(stream)
    assert "\x1b[" in stream.getvalue()
    assert "fedgh  round 3/5  accuracy 30.00 %  4.0 s left  up 3.0 KiB  down 6.0 KiB" in text
    assert "client 5/10" in text
    assert text.count("\n") == 4  # the lines before and after, the bar once, which rich erases again, and the message
    assert "fedgh: done" in text
    assert text.endswith("a message [in] two lines\n")
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")  # the cursor is back


@pytest.mark.parametrize("width", ["1", "20", "300"])
def test_any_width(monkeypatch: pytest.MonkeyPatch, width: str) -> None:
    monkeypatch.setenv("COLUMNS", width)
    stream, clock = io.StringIO(), Clock()
    drive(Console(stream=stream, terminal=True, clock=clock), clock, seconds=2.0)
    assert "fedgh: done" in drawn(stream)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
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


def test_dumb_terminals_get_plain_lines_and_standard_error_is_the_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream, clock = Terminal(), Clock()
    drive(Console(stream=stream, clock=clock), clock, seconds=2.0)
    assert "\x1b" not in stream.getvalue()
    drive(Console(clock=clock), clock, seconds=2.0)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fedgh: done" in captured.err
