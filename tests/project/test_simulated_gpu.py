"""The library on a GPU, which is simulated (`simulated_gpu/gpu.py`), in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1] / "simulated_gpu"
sys.path.append(str(HOME))

import gpu  # noqa: E402 - from the folder beside

FILES = sorted(path.name for path in HOME.glob("check_*.py"))
SHORT = ["check_device.py", "check_methods.py"]  # in one process, as each takes seconds to begin


def check(names: list[str], marks: str) -> None:
    """Run the tests of these files on the simulated device."""
    if reason := gpu.missing():
        pytest.skip(f"no simulated GPU: {reason}")
    command = ["-m", "pytest", "-q", "-x", "-p", "gpu_plugin", "-p", "no:cacheprovider", "-m", marks]
    command += [str(HOME / name) for name in names]
    places = [str(HOME), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    for unwanted in [variable for variable in environment if variable.startswith("PYTEST_")]:
        del environment[unwanted]
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False, cwd=HOME.parent.parent
    )
    assert done.returncode in (0, 5), done.stdout[-8000:] + done.stderr[-2000:]  # 5: there are none with these marks


def test_on_the_simulated_gpu() -> None:
    check(SHORT, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FILES if name not in SHORT])
def test_the_other_files_on_the_simulated_gpu(name: str) -> None:
    check([name], "not slow")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FILES)
def test_on_the_simulated_gpu_at_length(name: str) -> None:
    check([name], "slow")
