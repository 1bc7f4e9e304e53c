"""`polyfed new`: what it writes runs, and passes its own tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from polyfed.cli import app as cli
from tests.helpers.processes import forked
from tests.helpers.quick import others_slow

PROPERTIES = ["missing_upload_is_not_zero", ""]  # of the conformance kit; "": all


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "first"
    assert cli.status(["new", str(folder)]) == 0
    return folder


def test_a_folder_with_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert cli.status(["new", str(tmp_path)]) == 2
    assert "expected a new or empty folder" in capsys.readouterr().err
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("README.md", "mine")]
    assert cli.status(["new", str(tmp_path / "README.md")]) == 2
    assert "expected a place for" in capsys.readouterr().err


@pytest.mark.usefixtures("unrendered")
def test_the_commands_of_its_readme_run(project: Path, tmp_path: Path) -> None:
    commands = re.findall(r"`polyfed ([^`]+)`", (project / "README.md").read_text())
    assert [command.split()[0] for command in commands] == ["check", "run", "compare", "recipe", "methods"]
    for words in map(str.split, commands):
        short = ["--out", str(tmp_path / words[0]), "--set", "training.rounds=2", "-q"]
        done = forked([*words, *(short if words[0] in {"run", "compare"} else [])], project)
        assert done.status == 0, done.stderr


@pytest.mark.parametrize("chosen", others_slow(PROPERTIES, quick=PROPERTIES[:1]))
def test_its_own_tests_pass(project: Path, chosen: str) -> None:
    named = f"not conformance or {chosen}" if chosen else ""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", named]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "\n2 passed" not in done.stdout
