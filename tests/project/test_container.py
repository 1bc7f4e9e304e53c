"""The Dockerfile: good manners, and what its steps run, with stand-ins for pip and useradd."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
STEPS = [re.split(r"\s+", step, maxsplit=1) for step in re.sub(r"\\\n", "", TEXT).strip().splitlines() if step]


def of(kind: str) -> list[str]:
    return [rest for name, rest in STEPS if name == kind]


def test_it_has_good_manners() -> None:
    """Those of hadolint's rules that matter here; hadolint itself where it is installed."""
    assert of("FROM") == ["python:3.12-slim"], "a version, not the latest"
    assert not of("ADD")
    names = [name for name, _ in STEPS]
    assert of("USER") == ["1000"], "by number, not root"
    assert names.index("USER") > max(number for number, name in enumerate(names) if name == "RUN")
    assert all("--no-cache-dir" in call and "--constraint" in call for call in re.findall(r"pip install [^;|]*", TEXT))
    assert of("ENTRYPOINT") == ['["polyfed"]'], "as a list, so that signals reach it"
    assert "polyfed" in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    if hadolint := shutil.which("hadolint"):
        subprocess.run([hadolint, ROOT / "Dockerfile"], check=True)


def test_nothing_but_what_is_copied_reaches_the_build() -> None:
    first, *let_in = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert first == "*"
    (copied,) = of("COPY")
    assert [name.replace("polyfed-", "") for name in copied.split()[:-1]] == [name[1:] for name in let_in]


@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        ({}, ["pip {options} {wheel}"]),
        ({"EXTRAS": "[ray]"}, ["pip {options} {wheel}[ray]"]),
        ({"TORCH_INDEX": "own"}, ["pip {options} --no-deps --index-url own torch", "pip {options} {wheel}"]),
    ],
)
def test_its_steps_install_the_wheel(tmp_path: Path, arguments: dict[str, str], calls: list[str]) -> None:
    place = tmp_path / "wheel"
    (tmp_path / "bin").mkdir()
    place.mkdir()
    wheel = place / "polyfed-9.9-py3-none-any.whl"
    wheel.touch()
    for name in ("pip", "useradd", "mkdir", "chown"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho "{name} $*"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    given = dict(argument.replace('"', "").split("=") for argument in of("ARG"))
    environment = {**given, **arguments, "PATH": f"{tmp_path / 'bin'}:{os.defpath}"}
    script = "\n".join(of("RUN")).replace("/wheel/", f"{place}/")
    done = subprocess.run(
        ["sh", "-e"], input=script, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    options = f"install --no-cache-dir --constraint {place}/constraints.txt"
    user = ["useradd --create-home --uid 1000 polyfed", "mkdir /work", "chown polyfed /work"]
    assert done.stdout.splitlines() == [*(call.format(options=options, wheel=wheel) for call in calls), *user]


def test_a_wheel_that_cannot_be_installed_ends_the_build(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"polyfed-{name}.whl").touch()
    (tmp_path / "pip").write_text('#!/bin/sh\ncase "$*" in *-a.whl*) exit 1;; esac\n')
    (tmp_path / "pip").chmod(0o755)
    script = of("RUN")[0].replace("/wheel/", f"{tmp_path}/")
    environment = {"PATH": f"{tmp_path}:{os.defpath}", "TORCH_INDEX": "", "EXTRAS": ""}
    assert subprocess.run(["sh", "-c", script], env=environment, check=False).returncode == 1
