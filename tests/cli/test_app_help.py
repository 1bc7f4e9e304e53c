"""What the command line says of itself: help, examples that run, completion, lists and a method's page."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from polyfed.cli import app as cli
from tests.helpers.processes import forked
from tests.project.test_pages import check

ROOT = Path(__file__).resolve().parents[2]
TOP = cli.parser()
COMMANDS = {
    **{name: command for name, command in TOP.commands.items() if not hasattr(command, "commands")},
    **{f"{group} {name}": one for group in ("audit", "deploy") for name, one in TOP.commands[group].commands.items()},
}


def said(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert cli.status(words) == 0
    return capsys.readouterr().out


def examples(name: str) -> list[list[str]]:
    lines = [line.strip() for line in (COMMANDS[name].help or "").splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("polyfed ")]


EXAMPLES = [example for name in COMMANDS for example in examples(name)]


# help ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_whole(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out = said(*name.split(), "--help", capsys=capsys)
    assert "\\" not in out
    assert max(map(len, out.splitlines())) <= 120
    text = " ".join(out.split())
    for parameter in COMMANDS[name].params:
        told = parameter.help if parameter.param_type_name == "option" else parameter.metavar.strip("[]")
        assert " ".join(told.split()) in text


# examples -----------------------------------------------------------------------------------------------------------


def test_an_example_names_recipes_that_are_there() -> None:
    for words in EXAMPLES:
        named = [word for word in words if word.endswith(".toml") and word != "mine.toml"]
        assert all((ROOT / word).is_file() for word in named), words
        if words[1] != "deploy" and "mine.toml" not in words:
            check(words)


# lists --------------------------------------------------------------------------------------------------------------


def test_a_terminal_that_knows_no_lines_gets_hyphens(tmp_path: Path) -> None:
    done = forked(["models"], tmp_path, encoding="ascii")
    assert done.status == 0, done.stderr
    assert "-----" in done.stdout
    assert "?" not in done.stdout
