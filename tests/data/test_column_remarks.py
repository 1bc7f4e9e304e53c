"""What is said of the columns of a table before anybody learns from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyfed as pf
from polyfed.data.datasets import load_dataset

CLIENTS = ("north", "south", "west", "east")
ROWS = 40


def clinics(
    place: Path, change: Callable[[Any, str], Any], names: tuple[str, ...] = CLIENTS, **options: Any
) -> list[str]:
    """The remarks on a folder per client, each with the columns age, size, sex and label, after a change."""
    import pandas as pd

    for number, name in enumerate(names):
        rng = np.random.default_rng(number)
        table = pd.DataFrame(
            {
                "age": rng.integers(20, 90, ROWS),
                "size": rng.normal(12 + number, 3, ROWS).round(3),
                "sex": rng.choice(["f", "m"], ROWS),
                "label": np.arange(ROWS) % 2,
            }
        )
        (place / name).mkdir()
        change(table, name).to_csv(place / name / "data.csv", index=False)
    source = load_dataset(f"clients:{place}", label_column="label", columns=("client",), **options)
    return [*pf.federate(source, None, "by_group", group_by="client", split="8:1:1").remarks]


def as_they_are(table: Any, _: str) -> Any:
    return table


def test_nothing_is_said_of_an_ordinary_table_but_what_is_left_out(tmp_path: Path) -> None:
    (line,) = clinics(tmp_path, as_they_are)
    assert "category_columns" in line
    assert line.endswith(": 'sex'")
    chosen = {"label_column": "label", "columns": ("client",), "feature_columns": ("age", "size")}
    assert load_dataset(f"clients:{tmp_path}", **chosen).remarks == ()


@pytest.mark.parametrize(
    ("names", "factor", "named"), [(CLIENTS, 1000, "north"), (CLIENTS, 0.001, "north"), (CLIENTS[:2], 0.001, "south")]
)
def test_a_column_in_another_unit_at_a_client_is_named(
    tmp_path: Path, names: tuple[str, ...], factor: float, named: str
) -> None:
    """Of two clients, the one with the larger numbers."""

    def change(table: Any, name: str) -> Any:
        return table.assign(size=table["size"] * (factor if name == "north" else 1))

    lines = clinics(tmp_path, change, names, category_columns=("sex",), missing_values="client_mean")
    (line,) = (line for line in lines if "unit" in line)
    assert "'size'" in line
    assert "'age'" not in line
    assert f"('{named}') has" in line


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda table, name: table.assign(patient_id=np.arange(ROWS) * 9973 + 1e6), "'patient_id'"),
        (lambda table, name: table.assign(cost=np.arange(ROWS) * 9973), None),
        (lambda table, name: table.assign(patient_id=np.arange(ROWS) // 2), None),
    ],
)
def test_a_column_with_another_value_in_every_row_is_named(tmp_path: Path, change: Any, found: str | None) -> None:
    lines = [line for line in clinics(tmp_path, change) if "ids?" in line]
    assert len(lines) == (found is not None)
    assert found is None or found in lines[0]


def test_categories_with_another_value_in_every_row_and_columns_with_one_value_are_named(tmp_path: Path) -> None:
    def change(table: Any, name: str) -> Any:
        return table.assign(code=[f"{name}{row}" for row in range(ROWS)], year=2021)

    lines = clinics(tmp_path, change, category_columns=("sex", "code"), missing_values="client_mean")
    assert [line.partition(":")[2] for line in lines] == [" 'code'", " 'year'"]
