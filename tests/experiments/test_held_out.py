"""`evaluation.held_out = "each group"`: a comparison for each group that is held out, and a table over all of them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache
from polyfed.experiments.held_out import group_folders
from polyfed.report.findings import leave_one_out_tables
from polyfed.report.grouping import Group, group_runs
from polyfed.report.run_records import load_runs
from tests.helpers.hospitals import GROUPS, hospitals

EACH = {"held_out": "each group", "held_out_epochs": 1}


def recipe(folder: Path, **sections: dict[str, Any]) -> Recipe:
    return Recipe.from_dict(hospitals(folder, **{"evaluation": EACH, **sections}))


def times(folder: Path) -> dict[Path, int]:
    """When each run's result was written."""
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("result.json"))}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("turns")
    pf.compare(recipe(folder), ["fedavg"], seeds=(0, 1, 2), out=folder / "runs")
    return folder / "runs"


def test_every_group_is_held_out_once(compared: Path) -> None:
    runs = {path.parent.relative_to(compared): json.loads(path.read_text()) for path in times(compared)}
    assert sorted(map(str, runs)) == sorted(
        f"{group}/{method}/seed-{seed}" for group in GROUPS for method in ("fedavg", "local") for seed in range(3)
    )
    for place, result in runs.items():
        assert result["evaluation"]["held_out"] == [GROUPS.index(place.parts[0])]
        assert result["held_out"].keys() == {"received", "after_training"}
        assert pf.Recipe.of_run(compared / place).evaluation.held_out == [place.parts[0]]


def test_a_run_is_that_of_the_group_alone(compared: Path, tmp_path: Path) -> None:
    alone = pf.run(recipe(tmp_path, evaluation={"held_out": ["south"], "held_out_epochs": 1}))
    turned = json.loads((compared / "south" / "fedavg" / "seed-0" / "result.json").read_text())
    assert turned["held_out"] == alone.result["held_out"]
    assert turned["accuracy_per_client"] == alone.result["accuracy_per_client"]


def mean_and_std(values: list[float], sign: str = "") -> str:
    return f"{statistics.fmean(values):{sign}.2f} ± {statistics.stdev(values):.2f}"


def test_the_table_over_all_by_hand(compared: Path) -> None:
    groups: list[Group] = group_runs(load_runs(compared))[0]
    (title, columns), _ = leave_one_out_tables(groups)
    assert title.startswith("Each group held out in turn, in %: with what it would receive if it joined now (csv:")
    assert [column.heading for column in columns] == ["method", *GROUPS, "mean", "vs Local", "interval"]
    assert columns[0].cells == ["local", "fedavg"]
    by_heading = {column.heading: [" ".join(cell.split()) for cell in column.cells] for column in columns}

    def score(group: str, method: str, seed: int) -> float:
        result = json.loads((compared / group / method / f"seed-{seed}" / "result.json").read_text())
        return 100 * float(result["held_out"]["received"]["mean"])

    means = {}
    for place, method in enumerate(columns[0].cells):
        for group in GROUPS:
            assert by_heading[group][place] == mean_and_std([score(group, method, seed) for seed in range(3)])
        means[method] = [statistics.fmean(score(group, method, seed) for group in GROUPS) for seed in range(3)]
        assert by_heading["mean"][place] == mean_and_std(means[method])
    gaps = [mine - local for mine, local in zip(means["fedavg"], means["local"], strict=True)]
    assert by_heading["vs Local"] == ["-", mean_and_std(gaps, "+")]
    half = 4.302653 * statistics.stdev(gaps) / 3**0.5  # Student's t with two degrees of freedom
    low, high = (float(part) for part in by_heading["interval"][1].strip("[]").split(","))
    assert (low, high) == pytest.approx((statistics.fmean(gaps) - half, statistics.fmean(gaps) + half), abs=0.006)
    assert leave_one_out_tables(groups[:1]) == (), "one group alone"
    (_, columns), _ = leave_one_out_tables(groups[:2])
    assert [column.heading for column in columns][1:3] == list(GROUPS[:2])


def test_groups_with_names_that_are_no_folders_have_folders_of_their_own(tmp_path: Path) -> None:
    settings = hospitals(tmp_path, evaluation=EACH)
    table = tmp_path / "table.csv"
    table.write_text(table.read_text().replace("south", "a/b").replace("west", "A b"))
    places = group_folders(Recipe.from_dict(settings), DataCache()).values()
    assert len({place.lower() for place in places}) == 3
    assert not any("/" in place for place in places)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"partition": "iid", "group_by": None, "num_clients": 3}, "expected data.partition 'by_group'"),
        ({"num_clients": 2}, "expected a client for every group, got one with 2; leave out data.num_clients"),
    ],
)
def test_what_has_no_groups_is_refused(data: dict[str, Any], says: str, tmp_path: Path) -> None:
    settings = hospitals(tmp_path, evaluation=EACH, data=data)
    settings["data"] = {key: value for key, value in settings["data"].items() if value is not None}
    with pytest.raises(ConfigError, match=says):
        pf.compare(Recipe.from_dict(settings), ["fedavg"], out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_single_run_and_controls_refuse_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got 'each group', which is for `polyfed compare`"):
        build_federation(recipe(tmp_path))
    with pytest.raises(ConfigError, match=r"expected|got"):
        pf.compare(recipe(tmp_path), ["fedavg"], out=tmp_path / "runs", controls=True)
