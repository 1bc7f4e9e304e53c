"""The executor `flower-sim` with Flower's engine and Ray: minutes on a busy machine, most of them for Ray's start."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.nearby import recipe_of
from polyfed.experiments.run import run

pytest.importorskip("flwr", reason="the extra 'flower-sim' is not installed")
pytest.importorskip("ray", reason="the extra 'flower-sim' is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PATIENCE = 900.0  # seconds


class Caller:
    """`polyfed run --executor flower-sim` in a process of its own, whose offspring bear a mark."""

    def __init__(self, recipe: Path, out: Path) -> None:
        self._mark = f"POLYFED_TEST_MARK={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        words = ["run", str(recipe), "--out", str(out), "--executor", "flower-sim", "--workers", "2"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "polyfed", *words],
            env={**os.environ, name: value},
            stderr=subprocess.PIPE,
            text=True,
        )

    def offspring(self) -> Iterator[str]:
        """Command lines of all that it has started and that still runs."""
        for place in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self._mark.encode() in place.read_bytes().split(b"\0"):
                    words = place.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if words.strip():
                        yield words
            except OSError:
                continue


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_of("fedgh", training={"rounds": 200}).dumps())
    return path


def records(out: Path) -> list[dict[str, Any]]:
    """The records that are whole, without their times."""
    try:
        lines = (out / "rounds.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{key: value for key, value in record.items() if key not in ("seconds", "seal")} for record in found]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_who_is_ended_leaves_whole_rounds_and_no_process(recipe: Path, tmp_path: Path, number: int) -> None:
    """What was done is what one process does, bit for bit; and one process goes on with it."""
    out, until = tmp_path / "run", time.monotonic() + PATIENCE
    caller = Caller(recipe, out)
    try:
        while len(records(out)) < 6:  # the checkpoint of round 5 is there
            assert caller.process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        started = list(caller.offspring())
        assert any("raylet" in words for words in started)
    finally:
        caller.process.send_signal(number)
        _, said = caller.process.communicate(timeout=PATIENCE)
    if number == signal.SIGINT:
        assert caller.process.returncode == 130
        assert "whole rounds" in said.splitlines()[-1]
    else:
        until = time.monotonic() + 60
        while list(caller.offspring()) and time.monotonic() < until:
            time.sleep(0.2)
    assert list(caller.offspring()) == []
    before = len(records(out))
    short = [f"training.rounds={before + 1}"]
    alone = run(recipe, out=tmp_path / "alone", overrides=[*short, "run.executor=serial"])
    assert records(out) == records(tmp_path / "alone")[:before]
    stored = out / "recipe.toml"
    stored.write_text(stored.read_text().replace("rounds = 200", f"rounds = {before + 1}"))
    resumed = run(recipe, out=out, overrides=[*short, "run.executor=serial"], resume=True)
    assert records(out) == records(tmp_path / "alone")
    assert resumed.result["accuracy"] == alone.result["accuracy"]
