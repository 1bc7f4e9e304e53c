"""Runs that predict numbers from a recipe: tables, files and the page name the RMSE, never an accuracy; predictions."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.report.comparison import compare_runs
from polyfed.report.comparison_tables import Table, to_csv, to_markdown, to_text
from polyfed.report.figures import draw
from polyfed.report.frames import curve_frame
from polyfed.report.html_report import page
from polyfed.report.run_records import RunRecord, load_runs
from polyfed.report.sweeps import SweepCell, build_table
from tests.helpers import regression

RECIPE = """
[data]
dataset = "csv:costs.csv"
label_column = "cost"
task = "regression"
feature_columns = ["a", "b", "c"]
partition = "by_group"
group_by = "site"
split = "6:2:2"
[models]
architectures = ["mlp-64-32"]
[method]
name = "fedavg"
[training]
rounds = 3
batch_size = 6
lr = 0.05
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    folder = tmp_path_factory.mktemp("regression")
    regression.write_table(folder / "costs.csv")
    (folder / "costs.toml").write_text(RECIPE.replace("csv:costs.csv", f"csv:{folder}/costs.csv"))
    for method in ("local", "fedavg"):
        for seed in range(3):
            recipe = Recipe.load(folder / "costs.toml", method=method, seed=seed)
            pf.run(recipe.with_run(executor="serial"), out=folder / "runs" / f"{method}-{seed}")
    return load_runs(folder / "runs")


@pytest.fixture(scope="module")
def table(runs: list[RunRecord]) -> Table:
    return compare_runs(runs)


def test_no_table_speaks_of_accuracies(runs: list[RunRecord], table: Table) -> None:
    shown = [to_text(table), to_markdown(table), to_csv(table)]
    for text in [*shown, page(table).partition("Recipe of")[0]]:  # recipes name all keys
        assert "ccuracy" not in text
        assert "percentage points" not in text
    assert "RMSE" in shown[0]
    assert "R2" in shown[0]
    assert "MAE" in shown[0]
    for run in runs:
        for name in ("result.json", "rounds.jsonl"):
            assert "accuracy" not in (run.path / name).read_text()


def test_the_numbers_are_those_of_the_runs(runs: list[RunRecord], table: Table) -> None:
    (section,) = table.sections
    rows = {row["name"]: row for row in section.rows.to_dict("records")}
    for name in ("local", "fedavg"):
        results = [json.loads((run.path / "result.json").read_text()) for run in runs if run.method == name]
        assert rows[name]["rmse"] == pytest.approx(np.mean([result["rmse"] for result in results]))
        worst = [max(result["rmse_per_client"]) for result in results]
        assert rows[name]["worst_client"] == pytest.approx(np.mean(worst))
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert float(lines[0]["rmse"]) == pytest.approx(rows["local"]["rmse"])
    assert float(lines[1]["metric_r2"]) == pytest.approx(rows["fedavg"]["metric_r2"])


def test_a_sweep_takes_the_lowest(runs: list[RunRecord]) -> None:
    by_method = {method: [run for run in runs if run.method == method] for method in ("local", "fedavg")}
    cells = [SweepCell({"training.lr": at}, own) for at, own in enumerate(by_method.values())]
    table = build_table(cells, [0, 1, 2])
    assert table is not None
    lowest = table.rows["validation"].astype(float).idxmin()
    assert table.chosen == {"training.lr": lowest}
    assert "the choice is by validation RMSE, never by test RMSE" in table.section.notes


def test_curves_are_in_the_unit_of_the_numbers(table: Table) -> None:
    groups = [section.group for section in table.sections]
    (axes,) = draw(groups, ["curves"])["rmse-by-round"].axes
    assert axes.get_ylabel() == "test RMSE"
    points = curve_frame(groups[0])
    assert list(axes.lines[0].get_ydata()) == pytest.approx(list(points["mean"][points["name"] == "local"]))
