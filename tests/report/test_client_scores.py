"""What each client has over seeds, and its difference to Local."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from polyfed.report.comparison import compare_runs
from polyfed.report.comparison_tables import to_text, write
from polyfed.report.run_records import load_runs

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


FOREST = ((0.40, 0.90), (0.44, 0.81), (0.42, 1.0))


def worth(make: Any, validation: dict[str, float | None]) -> list[str]:
    """The notes on whether it is worth it. validation: row -> its score."""
    rows = {"local": LOCAL, "fedgh": FEDGH, "own-forest": FOREST}
    for name, values in rows.items():
        for seed, pair in enumerate(values):
            table = [
                {"id": n, "architecture": "a", "samples": 9, "test_samples": 20, "accuracy": pair[n]} for n in (0, 1)
            ]
            more = {"accuracy_per_client": list(pair), "clients_table": table, "client_names": ["north", "south"]}
            more |= {} if validation[name] is None else {"validation": validation[name]}
            control = {"run": {"control": name}} if name.startswith("own") else {}
            method = "local" if control else name
            sent = {"bytes_up": 7 if name == "fedgh" else 0}
            make(f"{name}-{seed}", method, seed, (0.1, sum(pair) / 2), **control, **more, **sent)
    notes = compare_runs(load_runs(make.root)).sections[0].notes
    return [note for note in notes if "worth it, client" in note or note.startswith(("client 0", "client 1"))]


def test_a_client_has_a_sentence_on_whether_it_is_worth_it(make: Any) -> None:
    """Against the row of those that need nobody that validation rows like best, whatever test rows say."""
    about, north, south = worth(make, {"local": 0.1, "fedgh": 0.2, "own-forest": 0.3})
    assert "fedgh against own-forest" in about
    gains = [100 * (mine[0] - own[0]) for mine, own in zip(FEDGH, FOREST, strict=True)]
    low, high = stats.t.interval(0.95, 2, sum(gains) / 3, stats.sem(gains))
    assert north == f"client 0 ('north') gains {sum(gains) / 3:.2f} [{low:.2f}, {high:.2f}] points over own-forest"
    losses = [100 * (own[1] - mine[1]) for mine, own in zip(FEDGH, FOREST, strict=True)]
    low, high = stats.t.interval(0.95, 2, sum(losses) / 3, stats.sem(losses))
    assert south == f"client 1 ('south') loses {sum(losses) / 3:.2f} [{low:.2f}, {high:.2f}] points to own-forest"


def test_validation_rows_pick_the_row_that_needs_nobody(make: Any) -> None:
    about, north, south = worth(make, {"local": 0.4, "fedgh": 0.2, "own-forest": 0.3})
    assert "fedgh against local" in about
    assert north.endswith("points over local")
    assert (
        south == "client 1 ('south'): no gain that can be told from chance, -10.00 [-10.00, -10.00] points over local"
    )


def test_without_validation_rows_nothing_is_said(make: Any) -> None:
    (about,) = worth(make, {"local": None, "fedgh": None, "own-forest": None})
    assert "not said without validation rows" in about
