"""What docs/clusters.md says: its scripts and commands run, with stand-ins for Slurm's own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polyfed.results.read import parse_json
from tests.experiments.test_planned_runs import RECIPE, place
from tests.helpers.processes import ended, started

__all__ = ["place"]
ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8"), re.DOTALL)
SCRIPTS = {re.findall("--job-name=(.*)", block)[0]: block for block in BLOCKS if block.startswith("#!")}
PROTOCOL = """
title = "Tiny"
methods = ["fedavg"]
seeds = [0]
[settings.one]
recipe = "recipe.toml"
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a cluster's")


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a script in a folder with small files of the names that the page has; `polyfed` and srun only print."""
    for name in ("recipes/quickstart.toml", "suites/digits/recipe.toml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(RECIPE)
    Path("suites/digits/protocol.toml").write_text(PROTOCOL)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **options: None)
    Path("bin").mkdir()
    for name, line in {"srun": 'exec "$@"', "polyfed": 'echo "polyfed $*"'}.items():
        (place / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (place / "bin" / name).chmod(0o755)

    def run(script: str, **variables: str) -> str:
        environment = {**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}", **variables}
        done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def start_all(commands: list[str]) -> None:
    """All at a time; each ends well."""
    processes = [started(shlex.split(command)[1:], Path("log")) for command in commands]
    assert [ended(process) for process in processes] == [0] * len(processes), Path("log").read_text()


def test_the_first_commands_share_a_folder(run: Callable[..., str]) -> None:
    commands = run(BLOCKS[0]).splitlines()
    assert len(commands) == 2
    start_all(commands)
    assert len(list(Path("runs/shared").glob("*/seed-*/result.json"))) == 9
    assert Path("runs/shared/comparison.md").exists()


@pytest.mark.parametrize("name", ["compare", "benchmark"])
def test_tasks_of_an_array_share_a_folder(run: Callable[..., str], name: str) -> None:
    lines = SCRIPTS[name].splitlines()
    asked = [line for line in lines if line.startswith("#SBATCH ")]
    assert lines[1 : len(asked) + 1] == asked, "Slurm reads none after the first command"
    subprocess.run(["bash", "-n"], input=SCRIPTS[name], text=True, check=True)
    assert f"sbatch {name}.sbatch" in BLOCKS[BLOCKS.index(SCRIPTS["benchmark"]) + 1].splitlines()
    printed = [run(SCRIPTS[name], SLURM_ARRAY_TASK_ID=task, SLURM_SUBMIT_DIR=str(Path.cwd())) for task in "01"]
    assert [text.splitlines()[0] for text in printed] == ["task 0", "task 1"]
    start_all([text.splitlines()[1] for text in printed])
    made = {"compare": "runs/array/compare.json", "benchmark": "runs/digits/results/one.json"}
    assert parse_json(Path(made[name]).read_bytes())
    assert len(list(Path("runs").glob("*/*/**/result.json"))) == {"compare": 9, "benchmark": 2}[name]


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock here")
def test_the_check_of_a_disk_tells_who_holds_a_lock(run: Callable[..., str]) -> None:
    import fcntl

    first, second = (block for block in BLOCKS if "flock" in block)
    run(first.replace("sleep 60", "true"))
    assert run(second) == "not shared\n"
    with Path("runs/check").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run(second) == "shared\n"
