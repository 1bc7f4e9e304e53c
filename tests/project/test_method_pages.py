"""Every method has a page, docs/methods/<name>.md, made after one template; its hyperparameter table is the method's.

Its commands are valid, and the papers' numbers on it are those of published.csv, ours those of docs/results.

In the section "Hyperparameters" the first table's first two columns are name and default: the name as a recipe has it,
without a trailing underscore; the default as TOML, bare or in backticks, or a dash where nothing is set.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from polyfed.cli import app as cli
from polyfed.config.recipe import Recipe
from polyfed.core.settings import Training
from polyfed.engine.uploads import has_upload
from polyfed.experiments.method_facts import list_hyperparameters
from polyfed.experiments.sweep import parse
from polyfed.registry import METHODS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "methods"
UNSET = {"", "-", "–", "—", "none", "not set", "unset"}


def page(name: str) -> str:
    """The method's page."""
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def hyperparameter_table(text: str) -> dict[str, str]:
    """Name -> default, as the page has them."""
    section = re.search(r"^## Hyperparameters\b.*?\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    assert section, "expected a section '## Hyperparameters'"
    table = re.search(r"(?:^\|.*\n)+", section[1] + "\n", flags=re.MULTILINE)
    assert table, "expected a table below '## Hyperparameters'"
    rows = [re.split(r"(?<!\\)\|", line.strip().strip("|")) for line in table[0].splitlines()[2:]]
    found = [(row[0].strip().strip("`"), row[1].strip().strip("`")) for row in rows]
    assert len({name for name, _ in found}) == len(found), "a hyperparameter is listed twice"
    return dict(found)


def read(default: str) -> Any:
    """A default as the page has it -> its value."""
    if default.lower() in UNSET:
        return None
    try:
        return tomllib.loads(f"value = {default}")["value"]
    except tomllib.TOMLDecodeError:
        return default


def commands(text: str) -> list[list[str]]:
    """The lines of the page's bash blocks that call polyfed, continued lines joined, comments left out."""
    blocks = re.findall(r"```(?:bash|sh|shell|console)\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line.strip().removeprefix("$ "), comments=True) for line in lines]
    return [one for one in words if one[:1] == ["polyfed"]]


def check(words: list[str]) -> None:
    """Parse the command as the program would, read its recipe and make its methods; write nothing."""
    group = cli.parser()
    assert words[1] in group.commands, f"expected a command of polyfed, got '{words[1]}'"
    command, rest = group.commands[words[1]], words[2:]
    if words[1] == "audit":
        command, rest = command.commands[words[2]], words[3:]
    given = command.make_context(words[1], rest).params
    if "recipe" not in given:
        return
    path = ROOT / given["recipe"]
    settings = given.get("overrides") or ()
    if words[1] == "sweep":  # the first of each setting's values
        settings = [f"{key}={json.dumps(values[0])}" for key, values in parse(given["grid"] or ()).items()]
    asked = given.get("methods")
    for name in [given.get("method")] if asked in (None, "all") else ["local", *asked.split(",")]:
        Recipe.load(path, settings, method=name, preset=given.get("preset"))


@pytest.fixture(scope="module")
def beside() -> dict[str, Any]:
    """The script that writes the pages' section "Published results", and what it finds measured."""
    script = runpy.run_path(str(ROOT / "scripts" / "beside_papers.py"))
    return {**script, "measured": script["ours"]()}


def test_the_privacy_section_is_true() -> None:
    for name in METHODS:
        told = " ".join(re.findall(r"^## Privacy\n\n(.*?)\n\n", page(name), flags=re.DOTALL | re.MULTILINE)[0].split())
        method = METHODS[name]()
        variants = ("outputs", "uploads", "aggregation")  # hyperparameters with which more can be clipped
        bounded = has_upload(method) and (not method.fixed_entries or any(v in told for v in variants))
        assert ("`upload_clip_norm` clips" in told) == bounded, name
        phases = method.phases(Training())
        by_row = method.supports_dp_sgd and all(phase.data == "train" and phase.rows is None for phase in phases)
        assert ("`max_grad_norm` is not supported" in told) == (not by_row and "`mu = 0`" not in told), name
        assert has_upload(method) == ("Not protected:" in told), name


def test_what_stands_beside_the_papers_is_published_and_measured(beside: dict[str, Any]) -> None:
    for name in METHODS:
        expected = beside["with_section"](page(name), name, beside["measured"])
        assert page(name) == expected, "write it anew: python scripts/beside_papers.py"


def test_the_notes_on_published_figures_are_all_there(beside: dict[str, Any]) -> None:
    assert beside["NOTES"].read_text(encoding="utf-8") == beside["notes_page"](beside["measured"]), (
        "python scripts/beside_papers.py"
    )


def test_the_tables_of_other_papers_are_those_of_the_file(beside: dict[str, Any]) -> None:
    text = beside["OTHER_PAPERS"].read_text(encoding="utf-8")
    assert text == beside["with_tables"](text), "python scripts/beside_papers.py"
    assert text == beside["with_tables"](text.replace("90.02", "90.03").replace("44.94", "44.95"))


def test_the_hyperparameter_table_is_the_methods() -> None:
    for name in METHODS:
        shown = hyperparameter_table(page(name))
        fields = {one.name: one.default for one in list_hyperparameters(METHODS[name])}
        assert list(shown) == list(fields), name
        for hyperparameter, default in shown.items():
            value, expected = read(default), fields[hyperparameter]
            assert value == expected, (
                f"{name}: the default of '{hyperparameter}' is {expected!r}, the page says {default}"
            )
            assert isinstance(value, bool) == isinstance(expected, bool), name


@pytest.mark.parametrize("name", METHODS)
def test_the_commands_are_valid(name: str) -> None:
    found = commands(page(name))
    assert found, "expected a command that runs the method"
    for words in found:
        check(words)


# the checks themselves


def test_wrong_commands_are_seen() -> None:
    text = "```bash\n# polyfed old\npolyfed run recipes/quickstart.toml \\\n    --seed 1  # as it was\n```"
    assert commands(text) == [["polyfed", "run", "recipes/quickstart.toml", "--seed", "1"]]
    check(commands(text)[0])
    for wrong in (
        "polyfed rum recipes/quickstart.toml",
        "polyfed run recipes/nowhere.toml",
        "polyfed run recipes/quickstart.toml --no-such-option 1",
        "polyfed run recipes/quickstart.toml --method fedin --set method.nois=1",
        "polyfed compare recipes/quickstart.toml --methods fedin,nobody",
    ):
        with pytest.raises(Exception):  # noqa: B017, PT011  (the parser's own, ours, or an assertion)
            check(shlex.split(wrong))
