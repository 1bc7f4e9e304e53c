"""What the command line says of itself: help, examples that run, completion, lists and a method's page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from polyfed.cli import app as cli
from tests.helpers.processes import forked
from tests.helpers.quick import others_slow
from tests.project.test_method_pages import check

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


@pytest.mark.parametrize("columns", others_slow(["80", "120"], quick=["80"]))
def test_tables_of_models_and_data_sets(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = said("models", capsys=capsys)
    assert max(map(len, out.splitlines())) <= int(columns)
    for row in json.loads(said("models", "--json", capsys=capsys)):
        assert re.search(
            rf"^{re.escape(row['name'])} +{row['parameters']:,} +{row['feature_dim']:,}$", out, re.MULTILINE
        )
        assert row["paper"] in " ".join(out.split())
    assert "sizes with images of 3 x 32 x 32 and 10 classes" in " ".join(out.split())
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    out = said("datasets", capsys=capsys)
    assert max(map(len, out.splitlines())) <= int(columns)
    assert re.search(r"^digits +yes +The 1797", out, re.MULTILINE)
    assert re.search(r"^cifar10 +no +CIFAR-10", out, re.MULTILINE)
    assert re.search(r"^parquet +- +Any images", out, re.MULTILINE)


def test_pages_of_models_and_data_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("POLYFED_DATA", str(tmp_path))
    out = " ".join(said("models", "digits-cnn1", capsys=capsys).split())
    assert "digits-cnn1: conv 16, FC 64." in out
    assert "17,258 (extractor 160, intermediate 16,448, head 650)" in out
    assert "images of 1 x 8 x 8 and 10 classes" in out
    rows = json.loads(said("models", "--json", capsys=capsys))
    page = json.loads(said("models", rows[0]["name"], "--json", capsys=capsys))
    assert {key: page[key] for key in rows[0]} == rows[0]
    out = said("datasets", "svhn", capsys=capsys)
    assert max(map(len, out.splitlines())) <= 80
    assert "here no The folder may be a copy of the Hub's, of which cropped_digits is read." in " ".join(out.split())
    assert "Raises" not in said("datasets", "digits", capsys=capsys)


@pytest.mark.parametrize("name", ["local", "fedgh", "fedhenn"])
def test_the_page_of_a_method_says_all_that_is_said_of_it(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    out = said("methods", name, capsys=capsys)
    assert max(map(len, out.splitlines())) <= 90
    page = json.loads(said("methods", name, "--json", capsys=capsys))
    text = " ".join(out.split())
    assert text.startswith(f"{name}: {page['summary']} paper {page['paper']} may differ {page['differs']} down ")
    for key in page["hyperparameters"]:
        assert re.search(rf"^{re.escape(key['name'])} +\S", out, re.MULTILINE)
        assert key["type"]
    numbered = re.findall(r"\((\d+)\) ", page["deviations"])
    assert len(numbered) >= (name != "local")
    for number in numbered:
        assert f"({number}) " in text


def test_a_terminal_that_knows_no_lines_gets_hyphens(tmp_path: Path) -> None:
    done = forked(["models"], tmp_path, encoding="ascii")
    assert done.status == 0, done.stderr
    assert "-----" in done.stdout
    assert "?" not in done.stdout
