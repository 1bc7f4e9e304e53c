"""The pages for people who write Python: their code runs, and what they say of methods is what the methods say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyfed.registry import METHODS
from test_method_pages import check

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    *("python.md", "own-method.md", "own-plugin.md", "evaluation.md", "reproducibility.md", "uploads.md", "devices.md"),
    "federation-worth.md",
)
RESULTS = ("any-architecture.md", "shared-weights.md")


def read(*path: str) -> str:
    return ROOT.joinpath(*path).read_text(encoding="utf-8")


def code(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", read("docs", page), flags=re.DOTALL)


def rows(text: str) -> Iterator[list[str]]:
    """The cells of all tables' rows."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if page == "python.md":
        pytest.importorskip("pandas")
    names: dict[str, object] = {"__name__": page}
    for block in code(page):
        exec(compile(block, page, "exec", dont_inherit=True), names)


def test_the_method_of_the_tutorial_has_under_40_lines() -> None:
    (block,) = [block for block in code("own-method.md") if "class Echo" in block]
    assert len(block[block.index("@hyperparameters") :].strip().splitlines()) < 40


def test_every_method_can_be_chosen_by_each_of_the_three_questions() -> None:
    networks, sends, known = read("docs", "choosing.md").partition("## In a few words")[0].split("\n## ")[1:]
    for part in (networks, known):
        words = set(re.findall(r"[a-z0-9]+", part))
        assert set(METHODS) - words <= ({"local"} if part is networks else set())
    named = {cells[0]: cells for cells in rows(known) if cells[0] in METHODS}
    assert set(named) == set(METHODS)
    assert "| nothing | local |" in sends


def test_needs_and_late_answers_are_those_of_the_methods() -> None:
    text = read("docs", "choosing.md")
    for name, needs in ((cells[0], cells[1]) for cells in rows(text) if cells[0] in METHODS):
        asked = METHODS[name]().requirements
        assert bool(asked.split_model) == ("split" in needs), name
        assert bool(asked.public) == ("for all" in needs or "all may see" in needs), name
        assert asked.validation == ("validation" in needs), name
        assert asked.same_architecture == ("one network" in needs), name
        assert asked.twice_differentiable == ("second derivatives" in needs), name
    (line,) = (line for line in text.splitlines() if "take late answers" in line)
    assert {name for name in METHODS if METHODS[name]().accepts_stale_uploads} == set(
        re.findall(r"[a-z0-9]+", line)
    ) & set(METHODS)


def result_commands() -> list[str]:
    """The lines of the results' pages that call polyfed, continued lines joined."""
    pages = sorted((ROOT / "docs" / "results").rglob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages).replace("\\\n", " ")
    return sorted({" ".join(line.split()) for line in text.splitlines() if line.strip().startswith("polyfed ")})


@pytest.mark.parametrize("command", result_commands())
def test_the_commands_of_the_results_are_valid(command: str) -> None:
    check(shlex.split(command))


def test_figures_are_those_of_the_results() -> None:
    """Accuracy (as kept, or in round 8), bytes and cost, cell by cell."""
    measured = [cells for page in RESULTS for cells in rows(read("docs", "results", page))]
    known = {cells[0]: cells for cells in reversed(measured) if cells[0] in METHODS}  # Local stands on both pages
    for name, _, sent, accuracy, cost in (c for c in rows(read("docs", "choosing.md")) if c[0] in METHODS):
        if name == "fedhenn":
            continue
        if len(known[name]) == 8:  # shared weights; up and down stand apart
            expected = (f"{known[name][5]} / {known[name][6]}", known[name][3], known[name][7])
        else:
            expected = (known[name][4], known[name][2], known[name][6])
        assert (sent, accuracy[: len(expected[1])], cost) == expected, name
