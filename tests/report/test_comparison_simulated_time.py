"""Simulated time in tables, curves and pages: there where it was recorded, and not a word of it elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyfed.errors import ConfigError
from polyfed.report.comparison import compare_runs, to_csv, to_json, to_markdown, to_text
from polyfed.report.figures import axes_of, curve_drawings, series
from polyfed.report.grouping import group_runs
from polyfed.report.html_report import page_data
from polyfed.report.run_records import load_runs


def simulate(folder: Path, seconds: float, **result: Any) -> None:
    """Have a run folder tell that every round took so many simulated seconds."""
    path = folder / "rounds.jsonl"
    records = [{**json.loads(line), "simulated_seconds": seconds} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    done = json.loads((folder / "result.json").read_text())
    done |= {"simulated_seconds": seconds * len(records), **result}
    (folder / "result.json").write_text(json.dumps(done))


@pytest.fixture
def simulated(two_by_two: Path) -> Path:
    """FedGH 10 and 30 s a round, Local 400 s."""
    for seed in (0, 1):
        simulate(two_by_two / f"fedgh-{seed}", (10.0, 30.0)[seed], left_out=[[4], []][seed])
        simulate(two_by_two / f"local-{seed}", 400.0, left_out=[])
    return two_by_two


def test_curves(simulated: Path) -> None:
    runs = load_runs(simulated)
    (group,), _ = group_runs(runs)
    local, fedgh = series(group, "simulated")
    assert fedgh.x == (20.0, 40.0, 60.0)
    assert local.x == (400.0, 800.0, 1200.0)
    (drawing,) = curve_drawings(runs, "simulated")
    (axes,) = drawing.figure.axes
    assert axes.get_xlabel().startswith("simulated time [")
    assert axes.get_xscale() == "log", "twenty times apart"
    assert drawing.stem == "accuracy-by-simulated"


def test_tables_and_targets(simulated: Path) -> None:
    table = compare_runs(load_runs(simulated), target=0.6)
    local, fedgh = table.sections[0].rows
    assert (fedgh.simulated_seconds, local.simulated_seconds) == (60.0, 1200.0)
    assert fedgh.to_target is not None
    assert fedgh.to_target.simulated_seconds == pytest.approx((30 + 60) / 2), "after rounds 3 and 2"
    text = to_text(table)
    assert "simulated" in text
    assert "1 min 00 s" in text
    assert "fedgh: clients 4 are left out" in " ".join(text.split())
    assert to_markdown(table).count("simulated time") == 2
    assert "target_simulated_seconds" in to_csv(table).splitlines()[0]
    assert json.loads(to_json(table))["tables"][0]["rows"][1]["simulated_seconds"] == 60.0


def test_the_page_has_the_axis(simulated: Path) -> None:
    runs = load_runs(simulated)
    data = page_data(runs, compare_runs(runs))
    assert list(data["axes"]) == ["round", "bytes", "seconds", "simulated"]
    assert data["sections"][0]["curves"]["lines"]["fedgh"]["axes"]["simulated"] == [20, 40, 60]


def test_a_row_without_it_is_not_on_the_axis(two_by_two: Path) -> None:
    for seed in (0, 1):
        simulate(two_by_two / f"fedgh-{seed}", 10.0)
    runs = load_runs(two_by_two)
    lines = page_data(runs, compare_runs(runs))["sections"][0]["curves"]["lines"]
    assert list(lines["local"]["axes"]) == ["round", "bytes", "seconds"]
    assert "simulated" in lines["fedgh"]["axes"]


def test_where_nothing_is_simulated_nothing_is_said_of_it(two_by_two: Path) -> None:
    runs = load_runs(two_by_two)
    table = compare_runs(runs, target=0.6)
    assert axes_of(runs) == ["round", "bytes", "seconds"]
    assert list(page_data(runs, table)["axes"]) == ["round", "bytes", "seconds"]
    for show in (to_text, to_markdown, to_csv, to_json):
        assert "simulated" not in show(table)
    with pytest.raises(ConfigError, match="no round of these runs has a simulated time"):
        curve_drawings(runs, "simulated")
