"""A run that a signal ends or a kill goes on with the same bits, and leaves no process behind."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors

from tests.helpers.processes import alive, becomes_true, children, ended, started

RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "quickstart.toml")
TIMES = {"seconds", "processor_seconds", "samples_per_second", "seal"}
SMALL = ["data.num_clients=2", "data.max_train_per_client=10", "data.max_test_per_client=10", "data.holdout=20"]
LATE = ["availability.delay_rate=0.4", "availability.delay_rounds=2", "availability.dropout_rate=0.2"]

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
    assert printed[-1].startswith("polyfed: interrupted ")
    assert printed[-1].endswith("go on with --resume")
    assert "died" not in "".join(printed)
    (last,) = (int(path.name.removeprefix("round-")) for path in (out / "checkpoint").iterdir())
    lines = (out / "rounds.jsonl").read_text().splitlines()
    assert last in (len(lines), len(lines) - 1), "a line that is written before its round counts goes on resuming"
    assert [json.loads(line)["round"] for line in lines] == list(range(1, len(lines) + 1))


def content(folder: Path) -> dict[str, Any]:
    """What a finished run has left, without times."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in (folder / "models").iterdir()}
    for path in sorted((folder / "checkpoint").glob("round-*"))[-1].glob("*.safetensors"):
        found[path.name] = dict(safetensors.deserialize(path.read_bytes()))
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_bytes().splitlines()]
    records.append(json.loads((folder / "result.json").read_bytes()))
    found["records"] = [{key: value for key, value in record.items() if key not in TIMES} for record in records]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "processes"])
@pytest.mark.parametrize("late", [[], LATE], ids=["whole", "late"])
def test_killed_at_random_moments_it_ends_with_the_same_bits(late: list[str], executor: str, tmp_path: Path) -> None:
    settings = ["training.rounds=24", "run.checkpoint_every=3", *late]
    log, out = tmp_path / "log", tmp_path / "killed"
    assert ended(started(command("fedgh", tmp_path / "straight", *settings, executor=executor), log)) == 0
    words = [*command("fedgh", out, *settings, executor=executor), "--resume"]
    for moment in sorted(random.Random(0).sample(range(24), 4)):
        process = started(words, log)
        becomes_true(lambda least=moment, running=process: recorded(out) >= least or not alive(running), 120)
        workers = children(process)
        if alive(process):
            os.kill(process, signal.SIGKILL)
        assert ended(process) in (-signal.SIGKILL, 0), log.read_text()
        assert becomes_true(lambda left=workers: not any(map(alive, left)), 10)
    assert ended(started(words, log)) == 0, log.read_text()
    assert content(out) == content(tmp_path / "straight")
