"""What each client has over seeds, and its difference to Local; and reports of chosen rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from polyfed.cli import app as cli
from polyfed.errors import ConfigError
from polyfed.report.comparison import compare_runs
from polyfed.report.comparison_tables import to_latex, to_text, write
from polyfed.report.run_records import load_runs, only_rows

LOCAL = ((0.50, 0.80), (0.54, 0.70), (0.52, 0.90))  # of two clients, by seed
FEDGH = ((0.60, 0.70), (0.65, 0.60), (0.61, 0.80))


@pytest.fixture
def three_seeds(make: Any) -> Path:
    for name, values in (("local", LOCAL), ("fedgh", FEDGH)):
        for seed, pair in enumerate(values):
            table = [
                {"id": n, "architecture": "a", "samples": 9, "test_samples": 20 + n + seed, "accuracy": pair[n]}
                for n in (0, 1)
            ]
            more = {"accuracy_per_client": list(pair), "clients_table": table, "client_names": ["north", "south"]}
            make(f"{name}-{seed}", name, seed, (0.1, sum(pair) / 2), **more)
    folder: Path = make.root
    return folder


def test_a_client_has_its_mean_interval_and_test_rows(three_seeds: Path, tmp_path: Path) -> None:
    table = compare_runs(load_runs(three_seeds))
    clients = table.sections[0].clients.set_index(["name", "method"])
    north = clients.loc["north"]
    assert list(north["test_rows"]) == ["20 to 22"] * 2
    assert clients.loc[("south", "local"), "test_rows"] == "21 to 23"
    assert north.loc["local", "score"] == pytest.approx(0.52)
    found = north.loc["fedgh"]
    gains = [mine[0] - own[0] for mine, own in zip(FEDGH, LOCAL, strict=True)]
    low, high = stats.t.interval(0.95, 2, sum(gains) / 3, stats.sem(gains))
    ends = found["difference"] - found["difference_margin"], found["difference"] + found["difference_margin"]
    assert ends == pytest.approx((low, high))
    assert north.loc["local", "difference"] is None
    text = to_text(table, clients=True)
    assert "0 ('north')  20 to 22  52.00" in text
    assert text != to_text(table)
    write(table, tmp_path)
    rows = list(csv.DictReader((tmp_path / "comparison-clients.csv").read_text().splitlines()))
    assert [(row["client"], row["name"], row["method"]) for row in rows] == [
        (str(n), name, method) for n, name in enumerate(("north", "south")) for method in ("local", "fedgh")
    ]
    assert float(rows[1]["difference_margin"]) == pytest.approx(found["difference_margin"])
    assert rows[0]["difference"] == ""


def test_for_how_many_clients_a_method_is_better_is_a_note(three_seeds: Path) -> None:
    """South loses the same in every seed: a spread of nothing tells nothing."""
    (note,) = [text for text in compare_runs(load_runs(three_seeds)).sections[0].notes if "client by client" in text]
    assert "fedgh better for 1, worse for 0, undecided for 1" in note
    assert "another client" not in note, "clients have names"
    for path in three_seeds.glob("*/result.json"):
        result = json.loads(path.read_text())
        del result["client_names"]
        path.write_text(json.dumps(result))
    (note,) = [text for text in compare_runs(load_runs(three_seeds)).sections[0].notes if "client by client" in text]
    assert "another client in each" in note


def test_rows_are_chosen(three_seeds: Path, make: Any, tmp_path: Path) -> None:
    make("moon-0", "moon", 0)
    runs = load_runs(three_seeds)
    assert "moon" not in to_latex(compare_runs(only_rows(runs, ["local", "fedgh"])))
    with pytest.raises(ConfigError, match="--methods: expected rows of the table, got 'fedg'; did you mean 'fedgh'"):
        only_rows(runs, ["fedg"])
    words = ["--methods", "local,fedgh", "--clients", "--out", str(tmp_path / "paper")]
    assert cli.status(["report", str(three_seeds), *words]) == 0
    assert "moon" not in (tmp_path / "paper" / "comparison.tex").read_text()
