"""Every command and every block of code that the documentation shows is run, or checked as far as it can be here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from polyfed.cli import main
from polyfed.recipe import Recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


def test_the_readme_opens_with_the_two_commands() -> None:
    assert commands()[:2] == [["make", "demo"], ["make", "test"]]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"\n{target}:" in makefile for _, target in commands()[:2])


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_blocks_run(number: int, tmp_path: Path) -> None:
    code = blocks("python")[number]
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_recipe_is_valid_and_complete(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(blocks("toml")[0], encoding="utf-8")
    recipe = Recipe.load(tmp_path / "mine.toml")
    assert recipe.build_method().name == "fedgh"


@pytest.mark.parametrize("command", [c for c in commands() if c[0] == "polyfed"], ids=" ".join)
def test_shell_commands_run(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """As they stand, on the README's recipe cut down to a few rows."""
    if "mine.toml" in command:
        root = request.getfixturevalue("data_root")
        settings = tomllib.loads(blocks("toml")[0])
        settings["data"] |= {"root": str(root), "max_rows": 1000, "max_test_rows": 400}
        settings["data"] |= {"clients": 5, "max_train": 10, "max_test": 5}
        settings["training"] |= {"rounds": 1}
        (tmp_path / "mine.toml").write_text(Recipe.from_dict(settings).dumps(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(command[1:])
    assert end.value.code == 0


def test_the_example_of_client_similarity_runs(tmp_path: Path) -> None:
    words = ["run", str(ROOT / "recipes" / "quickstart.toml"), "--method", "local", "--set", "training.rounds=1"]
    with pytest.raises(SystemExit) as end:
        main([*words, "--out", str(tmp_path / "run")])
    assert end.value.code == 0
    example = [sys.executable, str(ROOT / "examples" / "client_similarity.py"), "--images", "100"]
    done = subprocess.run([*example, str(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    everybody, alike, others = (float(word) for word in done.stdout.splitlines()[1].split()[-3:])
    assert 0 < min(everybody, alike, others) <= max(everybody, alike, others) < 1
    wrong = subprocess.run([*example, str(tmp_path)], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "expected the folder of a finished run" in wrong.stderr
