"""The library on a GPU, which is simulated (`simulated_gpu/gpu.py`), in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1] / "simulated_gpu"
sys.path.append(str(HOME))

import gpu  # noqa: E402 - from the folder beside


@pytest.mark.parametrize(
    "marks", ["not slow", pytest.param("slow", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_on_the_simulated_gpu(marks: str) -> None:
    if reason := gpu.missing():
        pytest.skip(f"no simulated GPU: {reason}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        marks,
        *map(str, sorted(HOME.glob("check_*.py"))),
    ]
    places = [str(HOME), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join(places)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=HOME.parent.parent)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
