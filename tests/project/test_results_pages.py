"""The site makes its pages of results when it is built: all that is stored is shown, and links lead somewhere."""

from __future__ import annotations

import json
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.report.html_report import save_command
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


def test_a_sentence_for_a_client_is_one_of_a_stored_table() -> None:
    page = (ROOT / "docs" / "federation-worth.md").read_text(encoding="utf-8")
    table = json.loads((ROOT / "docs/results/tables/unlike-columns-heart.json").read_text(encoding="utf-8"))
    sentences = {line for line in table["notes"] if line.startswith("client 3 (")}
    assert {line for line in page.splitlines() if line.startswith("client 3 (")} == sentences


def test_a_comparison_is_stored_whole(tmp_path: Path) -> None:
    settings = {"data": {"dataset": "digits", "num_clients": 2, "limit_train": 60}, "training": {"rounds": 1}}
    recipe = Recipe.from_dict(settings | {"models": {"architectures": ["digits-cnn1"]}, "method": {"name": "local"}})
    for seed in (0, 1):
        pf.run(recipe, seed=seed, out=tmp_path / f"seed-{seed}")
    with pytest.raises(ValueError, match="expected a comparison made with --out"):
        list(RESULTS.read_comparison(tmp_path))
    save_command(tmp_path, "polyfed compare recipes/a.toml --out runs/one/two")
    ((name, one),) = RESULTS.read_comparison(tmp_path)
    assert (name, one.title, one.seeds) == ("one-two", "one/two: digits, 2 clients", 2)
    assert [line.split()[0] for line in one.about] == ["digits", "Models:", "Run"]
    assert one.tables[0].rows[0][:2] == ["method", "accuracy"]
    scores = pf.results(tmp_path).query(
        "metric == 'accuracy' and stage == 'personal' and round.isna() and client.isna()"
    )
    assert float(one.cell("local", "accuracy").split()[0]) == pytest.approx(100 * scores["value"].mean(), abs=0.01)


def test_a_row_is_run_again_by_its_own_settings() -> None:
    again = runpy.run_path(str(ROOT / "scripts" / "rerun_row.py"))["recipe_of"]
    setting = RESULTS.settings("rows")["rows-25"]
    rows = {row.name: row for row in setting.rows}
    for name in ("fedgh", "fedgh-alone"):
        recipe = again(setting, rows[name])
        own = rows[name].hyperparameters
        assert recipe.training.lr == own["training.lr"] != setting.recipe["training"]["lr"]
        assert recipe.data.max_rows_per_client == 25
        assert recipe.method.header_lr == own["header_lr"]
        assert getattr(recipe.method, "alone", False) == (name == "fedgh-alone")
