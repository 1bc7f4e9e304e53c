"""The table over groups that were held out in turn, by hand from the runs' results."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.report.grouping import Group, group_runs
from polyfed.report.leave_one_out import leave_one_out_tables
from polyfed.report.run_records import load_runs
from tests.helpers.hospitals import GROUPS, hospitals

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison whose scores are then others, by which no two cells are alike."""
    place = tmp_path_factory.mktemp("turns")
    recipe = Recipe.from_dict(hospitals(place, evaluation={"held_out": "each group"}))
    pf.compare(recipe, ["fedavg"], seeds=SEEDS, out=place / "runs")
    return place / "runs"


def groups(folder: Path) -> list[Group]:
    found, _ = group_runs(load_runs(folder))
    return found


def score(folder: Path, group: str, method: str, seed: int) -> float:
    result = json.loads((folder / group / method / f"seed-{seed}" / "result.json").read_text())
    mean: float = result["held_out"]["received"]["mean"]
    return 100 * mean


def mean_and_std(values: list[float]) -> str:
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"


def test_cells_by_hand(folder: Path) -> None:
    ((title, columns),) = leave_one_out_tables(groups(folder))
    assert title.startswith("Each group held out in turn, in %: with what it would receive if it joined now (csv:")
    assert "held out:" not in title
    assert [column.heading for column in columns] == ["method", *GROUPS, "mean", "vs Local", "interval"]
    assert columns[0].cells == ["local", "fedavg"]
    by_heading = {column.heading: [" ".join(cell.split()) for cell in column.cells] for column in columns}
    means = {}
    for place, method in enumerate(columns[0].cells):
        for group in GROUPS:
            scores = [score(folder, group, method, seed) for seed in SEEDS]
            assert by_heading[group][place] == mean_and_std(scores)
        means[method] = [statistics.fmean(score(folder, group, method, seed) for group in GROUPS) for seed in SEEDS]
        assert by_heading["mean"][place] == mean_and_std(means[method])
    gaps = [mine - local for mine, local in zip(means["fedavg"], means["local"], strict=True)]
    assert by_heading["vs Local"][0] == by_heading["interval"][0] == "-"
    assert by_heading["vs Local"][1] == f"{statistics.fmean(gaps):+.2f} ± {statistics.stdev(gaps):.2f}"
    half = 4.302653 * statistics.stdev(gaps) / 3**0.5  # Student's t with two degrees of freedom
    low, high = (float(part) for part in by_heading["interval"][1].strip("[]").split(","))
    assert (low, high) == pytest.approx((statistics.fmean(gaps) - half, statistics.fmean(gaps) + half), abs=0.006)


def test_one_group_alone_makes_no_table(folder: Path) -> None:
    every = groups(folder)
    assert leave_one_out_tables(every[:1]) == ()
    assert leave_one_out_tables([]) == ()
    ((_, columns),) = leave_one_out_tables(every[:2])
    assert [column.heading for column in columns][1:3] == list(GROUPS[:2])
