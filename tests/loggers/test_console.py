"""The live progress: on a terminal, on none, on bad ones."""

import io
import math
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from polyfed.loggers.console import Console

INFO: dict[str, Any] = {"method": "fedgh", "dataset": "digits", "clients": 10, "seed": 0, "out": "runs/a"}
INFO |= {"rounds": 5, "start_round": 1, "evaluation": {"stage": "personal"}}
RESULT = {"accuracy": 0.75, "bytes_up": 5120, "bytes_down": 10240, "seconds": 65.0}


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


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
        console.client_done(5, 10)  # too soon
        clock.now += seconds
        console.round(record(number), seconds * (5 - number))
    console.end(result)


def test_plain_lines_one_per_round() -> None:
    stream, clock = io.StringIO(), Clock()
    drive(Console(stream=stream, clock=clock), clock, seconds=2.0)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "fedgh on digits: 10 clients, 5 rounds, seed 0, accuracy of stage personal, into runs/a"
    assert lines[3] == "fedgh  round 3/5  accuracy 30.00 %  loss 0.5  4.0 s left"
    assert lines[5].startswith("fedgh  round 5/5  accuracy 50.00 %  loss 0.5")
    assert lines[-1] == "fedgh: done  accuracy 75.00 % (personal)  up 5.0 KiB  down 10.0 KiB  1 min 05 s"
    assert len(lines) == 7
    assert not {"\x1b", "\r"} & set(stream.getvalue())


def test_a_log_has_a_line_every_so_often_and_of_long_rounds_how_far_they_are() -> None:
    stream, clock = io.StringIO(), Clock()
    drive(Console(stream=stream, clock=clock), clock, seconds=0.4)
    assert re.findall(r"round (\d)/5", stream.getvalue()) == ["3"]
    stream, clock = io.StringIO(), Clock()
    drive(Console(stream=stream, clock=clock), clock, seconds=0.4, rounds=4, result=None)  # interrupted after round 4
    assert re.findall(r"round (\d)/5", stream.getvalue()) == ["3", "4"]
    assert "done" not in stream.getvalue()
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, clock=clock)
    console.start(INFO)
    for done in range(1, 5):
        clock.now += 20
        console.client_done(done, 10)
    assert re.findall(r"round 0/5  client (\d)/10", stream.getvalue()) == ["2", "4"]
    clock.now += 3600
    for number in range(1, 100):
        clock.now += 10
        console.round(record(number), 1.0)
    assert stream.getvalue().count("loss") == 17, "one a minute"


def test_the_last_score_stays_and_the_time_left_is_counted_down() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, clock=clock)
    console.start(INFO)
    clock.now += 60
    console.round(record(1), 240.0)
    clock.now += 60
    console.client_done(3, 10)
    console.round(record(2, accuracy={}, train_loss=None), math.inf)
    *_, first, within = stream.getvalue().splitlines()
    assert first == "fedgh  round 1/5  accuracy 10.00 %  loss 0.5  4 min 00 s left"
    assert within == "fedgh  round 1/5  client 3/10  accuracy 10.00 %  loss 0.5  3 min 00 s left"
    console.end(None)
    assert stream.getvalue().endswith("round 2/5  accuracy 10.00 % (round 1)\n")


def test_several_runs_share_the_line() -> None:
    stream, clock = Terminal(), Clock()
    shared = Console(stream=stream, clock=clock)
    runs = [shared.of_several(f"run {number} of 9: {name}, seed 0") for number, name in ((4, "a"), (5, "b"))]
    for run in runs:
        run.start({**INFO, "rounds": 2})
    assert "\nrun 5 of 9: b, seed 0 on digits: 10 clients, 2 rounds, accuracy" in stream.getvalue()
    for run in runs:
        clock.now += 10
        run.round(record(1), 7.0)
        assert "seed 0  round 1/2  accuracy 10.00 %  loss 0.5  7.0 s left" in stream.getvalue().rpartition("\r")[2]


@pytest.mark.parametrize("end", [RESULT, None])
def test_a_notebook_gets_one_output_that_is_updated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: dict[str, Any] | None
) -> None:
    outputs: list[str] = []

    def display(data: dict[str, str], raw: bool, display_id: bool) -> SimpleNamespace:
        outputs.append(data["text/plain"])
        return SimpleNamespace(update=lambda data, raw: outputs.__setitem__(-1, data["text/plain"]))

    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))  # type: ignore[arg-type]
    kernels = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(sys, "stderr", kernels)
    clock = Clock()
    console = Console(clock=clock)
    drive(console, clock, seconds=2.0, rounds=4, result=end)
    last = "fedgh: done  accuracy 75.00 %" if end else "fedgh  round 4/5  accuracy 40.00 %"
    assert len(outputs) == 1
    assert outputs[0].startswith(last)
    assert capsys.readouterr().out.count("\n") == 1
    assert kernels.getvalue() == ""
    drive(console, clock, seconds=2.0)
    assert len(outputs) == 2


def test_a_resumed_variant_goes_by_its_name_and_its_count_goes_on() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, clock=clock)
    console.start({**INFO, "label": "fedgh-alone", "start_round": 4})
    refused = [{"client": c, "reason": "loss is nan"} for c in (4, 0, 1, 2, 3, 5)]
    console.round(record(4, accuracy={}, refused=refused), 1.0)
    console.end(None)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("fedgh-alone on digits: 10 clients, 5 rounds, from round 4")
    assert lines[1] == "round 4: client 4 refused: loss is nan"
    assert lines[4:] == [
        "round 4: 3 more clients refused", "fedgh-alone  round 4/5  loss 0.5  1.0 s left",
    ]  # fmt: skip


def test_a_terminal_gets_a_line_that_is_rewritten() -> None:
    stream, clock = Terminal(), Clock()
    console = Console(stream=stream, clock=clock)
    drive(console, clock, seconds=2.0)
    start, rest = stream.getvalue().split("\n", 1)
    assert start.startswith("fedgh on digits")
    (*lines, done) = rest.split("\r")[1:]
    assert len(lines) == 5
    assert lines[2] == (  # without wrapping; what an earlier line had more is erased
        "\x1b[?7lfedgh  round 3/5  accuracy 30.00 %  loss 0.5  4.0 s left\x1b[K\x1b[?7h"
    )
    assert done == "\x1b[Kfedgh: done  accuracy 75.00 % (personal)  up 5.0 KiB  down 10.0 KiB  1 min 05 s\n"
    console.message("a message [in] two\nlines")
    assert stream.getvalue().endswith("\na message [in] two lines\n")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_any_encoding(encoding: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True)
    console = Console(stream=stream, clock=Clock())
    console.start({**INFO, "method": "föderiert→", "out": "läufe/日本"})
    console.round(record(1), 3.0)
    console.message("± …")
    console.end(None)
    assert b"round 1/5" in raw.getvalue()


def test_a_broken_stream_never_stops_a_run() -> None:
    class Broken(Terminal):
        def write(self, text: str) -> int:
            raise BrokenPipeError("hung up")

    for stream in (Broken(), io.StringIO()):
        console, clock = Console(stream=stream), Clock()
        console.start(INFO)
        stream.close()
        drive(console, clock, seconds=1.0)
        console.message("more")
