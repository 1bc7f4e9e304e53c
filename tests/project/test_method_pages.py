"""Every method has a page, docs/methods/<name>.md, made after one template, and the page's commands are valid."""

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
SECTIONS = ["How it works", "Communication", "When to use it", "Usage", "Hyperparameters", "Results"]
DEVIATIONS = "Deviations from the paper"
CODE = re.compile(r"```.*?```", re.DOTALL)
LONGER = {"fedgh", "fedhenn", "fedin"}


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


def faults_of(text: str, *, longer: bool = False, from_paper: bool = True) -> list[str]:
    """The rules of the template that a page breaks.

    Args:
        text: of the page. longer: whether it may have 800 words, not 450, beside its code. from_paper: whether a paper
            has the method.
    """
    headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    sections = dict(zip(headings, re.split(r"^## .+\n", text, flags=re.MULTILINE)[1:], strict=True))
    most = 800 if longer else 450
    fulfilled = {
        "sections in order": [one for one in headings if one in SECTIONS] == SECTIONS,
        "deviations last": headings[-1] == DEVIATIONS or not from_paper,
        "marker of deviations": "{{ deviations }}" in sections.get(DEVIATIONS, "") or not from_paper,
        "marker of hyperparameters": sections.get("Hyperparameters", "").strip() == "{{ hyperparameters }}",
        "marker of results": sections.get("Results", "").strip() == "{{ results }}",
        "width of code": max(len(line) for block in CODE.findall(text) for line in block.splitlines()) <= 100,
        "a command": bool(commands(sections.get("Usage", ""))),
        "words": len(re.findall(r"\S*\w\S*", CODE.sub("", text))) <= most,
    }
    return [rule for rule, holds in fulfilled.items() if not holds]


@pytest.mark.parametrize("name", METHODS)
def test_the_page_follows_the_template(name: str) -> None:
    from_paper = not METHODS[name].card.paper.startswith("none")
    assert faults_of(page(name), longer=name in LONGER, from_paper=from_paper) == []


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


def test_pages_that_break_the_template_are_seen() -> None:
    text = page("fedgh")
    for old, new, rule in (
        ("## Usage", "## Commands", "sections in order"),
        ("## Deviations from the paper", "## Differences", "deviations last"),
        ("{{ deviations }}", "1. One.", "marker of deviations"),
        ("{{ hyperparameters }}", "| `header_lr` |", "marker of hyperparameters"),
        ("{{ results }}", "{{ results }} and more", "marker of results"),
        ("\nserver: ", f"\nserver: {100 * ' '}", "width of code"),
        ("\npolyfed ", "\npython ", "a command"),
        ("## Usage", "word " * 800 + "\n\n## Usage", "words"),
    ):
        assert rule in faults_of(text.replace(old, new), longer=True), rule
