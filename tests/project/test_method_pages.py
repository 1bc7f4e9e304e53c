"""Every method has a page, docs/methods/<name>.md, whose commands are valid and whose claims on privacy are true."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from polyfed.cli import app as cli
from polyfed.config.recipe import Recipe
from polyfed.core.settings import Training
from polyfed.engine.uploads import has_upload
from polyfed.experiments.sweep import parse
from polyfed.registry import METHODS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "methods"


def page(name: str) -> str:
    """The method's page."""
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("name", METHODS)
def test_what_the_page_says_of_privacy_is_true(name: str) -> None:
    (told,) = re.findall(r"^\*\*Privacy\.\*\* (.*?)\n\n", page(name), flags=re.DOTALL | re.MULTILINE)
    told = " ".join(told.split())
    method = METHODS[name]()
    variants = ("outputs", "uploads", "aggregation")  # hyperparameters with which more can be clipped
    bounded = has_upload(method) and (not method.fixed_entries or any(v in told for v in variants))
    assert ("`upload_clip_norm` clips" in told) == bounded
    phases = method.phases(Training())
    by_row = method.supports_dp_sgd and all(phase.data == "train" and phase.rows is None for phase in phases)
    assert ("`max_grad_norm` is not supported" in told) == (not by_row and "`mu = 0`" not in told)
    assert ("Not protected:" in told) == has_upload(method)


@pytest.mark.parametrize("name", METHODS)
def test_the_commands_are_valid(name: str) -> None:
    found = commands(page(name))
    assert found, "expected a command that runs the method"
    for words in found:
        check(words)
