"""docs/clusters.md: its scripts run, with stand-ins for Slurm and polyfed; their commands are valid."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.project.test_method_pages import check

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8"), re.DOTALL)
SCRIPTS = {re.findall("--job-name=(.*)", block)[0]: block for block in BLOCKS if block.startswith("#!")}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the page's scripts are for Linux")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a script, in which `srun` runs and `polyfed` prints its words; gives the lines printed."""
    monkeypatch.chdir(tmp_path)
    Path("bin").mkdir()
    for name, line in {"srun": 'exec "$@"', "polyfed": 'echo "polyfed $*"'}.items():
        Path("bin", name).write_text(f"#!/bin/sh\n{line}\n")
        Path("bin", name).chmod(0o755)

    def run(script: str, **variables: str) -> list[str]:
        environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **variables}
        done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_the_first_commands_are_valid(run: Callable[..., list[str]]) -> None:
    commands = run(BLOCKS[0])
    assert len(commands) == 2
    for command in commands:
        check(shlex.split(command))


@pytest.mark.parametrize("name", SCRIPTS)
def test_tasks_of_an_array_run_polyfed(run: Callable[..., list[str]], tmp_path: Path, name: str) -> None:
    lines = SCRIPTS[name].splitlines()
    asked = [line for line in lines if line.startswith("#SBATCH ")]
    assert lines[1 : len(asked) + 1] == asked, "Slurm reads none after the first command"
    task, command = run(SCRIPTS[name], SLURM_ARRAY_TASK_ID="1", SLURM_SUBMIT_DIR=str(tmp_path))
    assert task == "task 1"
    check(shlex.split(command))


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock here")
def test_the_check_of_a_disk_tells_who_holds_a_lock(run: Callable[..., list[str]]) -> None:
    Path("runs").mkdir()
    first, second = (block for block in BLOCKS if "flock" in block)
    run(first.replace("sleep 60", "true"))
    assert run(second) == ["not shared"]
    with Path("runs/check").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run(second) == ["shared"]
