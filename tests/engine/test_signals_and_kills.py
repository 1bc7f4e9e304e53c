"""A run that a signal ends or a kill goes on with the same bits, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from polyfed.cli import app
from polyfed.signals import raise_on_termination
from tests.helpers.processes import alive, becomes_true, children, ended, started

RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "quickstart.toml")
SMALL = ["data.num_clients=2", "data.max_train_per_client=10", "data.max_test_per_client=10", "data.holdout=20"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")


def command(method: str, out: Path, *settings: str, executor: str = "processes") -> list[str]:
    words = ["run", RECIPE, "--method", method, "--quiet", "--out", str(out)]
    workers = ["run.workers=2"] if executor == "processes" else []
    for setting in [*SMALL, f"run.executor={executor}", *workers, *settings]:
        words += ["--set", setting]
    return words


def recorded(folder: Path) -> int:
    """How many rounds a run has recorded."""
    path = folder / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGHUP, signal.SIGINT))],
    ids=lambda number: number.name,
)
def test_a_signal_leaves_a_checkpoint_of_the_last_whole_round_and_no_orphans(
    number: signal.Signals, tmp_path: Path
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    process = started(command("local", out, "training.rounds=1000000", "run.checkpoint_every=1000"), log)
    assert becomes_true(lambda: recorded(out) >= 3, 60), log.read_text()
    workers = children(process)
    assert len(workers) == 2
    for each in (*workers, process):  # as a terminal does, or a service's manager
        os.kill(each, number)
    if not becomes_true(lambda: not alive(process), 60):
        os.kill(process, signal.SIGKILL)
    assert ended(process) == 128 + number
    assert becomes_true(lambda: not any(map(alive, workers)), 10)
    printed = log.read_text().splitlines()
    assert printed[-1].startswith("polyfed: interrupted; ")
    assert printed[-1].endswith(" --resume")
    assert "died" not in "".join(printed)
    (last,) = (int(path.name.removeprefix("round-")) for path in (out / "checkpoint").iterdir())
    lines = (out / "rounds.jsonl").read_text().splitlines()
    assert last in (len(lines), len(lines) - 1), "a line that is written before its round counts goes on resuming"
    assert [json.loads(line)["round"] for line in lines] == list(range(1, len(lines) + 1))


def test_a_run_that_is_killed_leaves_no_worker(tmp_path: Path) -> None:
    process = started(command("local", tmp_path / "run", "training.rounds=1000000"), tmp_path / "log")
    assert becomes_true(lambda: recorded(tmp_path / "run") >= 1, 60), (tmp_path / "log").read_text()
    workers = children(process)
    assert len(workers) == 2
    os.kill(process, signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL
    assert becomes_true(lambda: not any(map(alive, workers)), 10)


def test_a_second_ctrl_c_ends_at_once() -> None:
    child = os.fork()
    if child == 0:
        with raise_on_termination():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:  # a checkpoint is being written
                signal.raise_signal(signal.SIGTERM)  # changes nothing
                signal.raise_signal(signal.SIGINT)
                os._exit(0)
    assert ended(child) == -signal.SIGINT


def test_an_interruption_that_arrives_as_another_error_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def convert(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("what C code makes of it") from None

    monkeypatch.setattr(app, "parser", lambda: SimpleNamespace(main=convert))
    assert app.status(["run"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "polyfed: interrupted\n"
