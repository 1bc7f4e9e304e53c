"""The site makes its pages of results when it is built: all that is stored is shown, and links lead somewhere."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.project.test_method_pages import check

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "documentation.py")))
RESULTS: Any = sys.modules["results_pages"]
PAGES = {page.place: page.text for page in SITE.generated().values()}


def test_everything_that_is_stored_is_shown() -> None:
    stored = {*(DOCS / "results").rglob("*.json")}
    assert stored == {path for path in SITE.generated() if path.suffix == ".json"}
    for name, one in RESULTS.measurements().items():
        page = PAGES[f"results/tables/{name}.md"]
        assert all(table.to_markdown() in page and table.caption in page for table in one.tables), name
        assert f"(tables/{name}.md)" in PAGES["results/tables.md"]
    for suite in RESULTS.SUITES:
        page = PAGES[f"results/benchmark-{suite}.md"]
        assert all(f"\n| {row.name} | " in page for one in RESULTS.settings(suite).values() for row in one.rows), suite


def test_rows_of_tables_are_complete() -> None:
    for name, one in RESULTS.measurements().items():
        for table in one.tables:
            assert {len(row) for row in [table.alignment, *table.rows]} == {len(table.rows[0])}, name


def test_links_of_generated_pages_lead_somewhere() -> None:
    headings = {place: re.findall(r"^#+ (.+)$", text, re.MULTILINE) for place, text in PAGES.items()}
    for place, text in PAGES.items():
        for link, anchor in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)", text):
            target = (DOCS / place).parent / link if link else DOCS / place
            inside = target.resolve().relative_to(DOCS).as_posix()
            assert inside in PAGES or target.is_file(), f"{place}: nothing at '{link}'"
            slugs = [heading.lower().replace(" ", "-") for heading in headings.get(inside, [])]
            assert not anchor or inside not in PAGES or anchor in slugs, f"{place}: no heading '{anchor}'"


def test_published_figures_stand_beside_ours() -> None:
    page = PAGES["results/published.md"]
    beside, _, printed = page.partition("## As printed")
    assert (
        beside.count("\nfedgh/table3, num_clients=10, classes_per_client=2: bytes per client and round [KiB], cifar10:")
        == 1
    )
    assert (
        "\n| fedproto | 7.81 ± 0.00 | 7.81 | scaled down | [fedgh/table3-small](tables/fedgh-table3-small.md) |"
        in beside
    )
    assert re.search(r"\n\| fedtgp \| 90\.02 ± [\d.]+ \[\d+\] \|", printed)
    numbers = {int(number) for marks in re.findall(r"\d \[([\d, ]+)\]", printed) for number in marks.split(", ")}
    assert numbers <= {int(number) for number in re.findall(r"^(\d+)\. ", page, re.MULTILINE)}


@pytest.mark.parametrize(
    "command",
    sorted({line for one in RESULTS.measurements().values() for line in one.commands if line[:7] == "polyfed"}),
)
def test_the_commands_of_the_results_are_valid(command: str) -> None:
    check(shlex.split(command))


def test_a_link_to_a_stored_file_leads_to_its_page() -> None:
    page = DOCS / "methods" / "own.md"
    text = "[a](../results/tables/worth-few.json) [b](../results/benchmark-small#digits) [c](../results/tables)"
    assert SITE.turned(text, page) == (
        "[a](../results/tables/worth-few.md) [b](../results/benchmark-small.md#digits) [c](../results/tables.md)"
    )
    assert SITE.turned("[a](../../src/polyfed/results/published.csv)", page) == "[a](../results/published.md)"
    assert SITE.place(DOCS / "results" / "benchmark-worth" / "digits.json") == "results/benchmark-worth.md"


def test_a_report_s_page_is_stored_whole() -> None:
    page = """# Results

## fedgh/table3: cifar10, 10 clients

cifar10 (classes), 10 clients, 2 rounds, seeds 0, 1. Scored so.
Models: cnn.
Run on 2026-11-01 with polyfed 0.1.0.

    polyfed compare recipes/a.toml --out runs/fedgh/table3

| method | accuracy |
| :-- | --: |
| local | 80.00 |

Another:

| method | **more** |
| :-- | --: |
| local | **1.00** |

- two seeds: no interval
- kept as it is
"""
    ((name, one),) = RESULTS.read_page(page).items()
    assert (name, one.title, one.seeds) == ("fedgh-table3", "fedgh/table3: cifar10, 10 clients", 2)
    assert one.commands == ["polyfed compare recipes/a.toml --out runs/fedgh/table3"]
    assert [line.split()[0] for line in one.about] == ["cifar10", "Models:", "Run"]
    assert [(table.caption, len(table.rows)) for table in one.tables] == [("", 2), ("Another:", 2)]
    assert one.cell("local", "accuracy") == "80.00"
    assert one.notes == ["kept as it is"]
    with pytest.raises(ValueError, match="expected 'PLACE: DATASET, N clients' and a command"):
        RESULTS.read_page(page.replace("--out", "--in"))
