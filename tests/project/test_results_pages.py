"""The site makes its pages of results when it is built: all that is stored is shown, and links lead somewhere."""

from __future__ import annotations

import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.project.test_pages import check

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


@pytest.mark.parametrize(
    "command",
    sorted({line for one in RESULTS.measurements().values() for line in one.commands if line[:7] == "polyfed"}),
)
def test_the_commands_of_the_results_are_valid(command: str) -> None:
    check(shlex.split(command))


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
