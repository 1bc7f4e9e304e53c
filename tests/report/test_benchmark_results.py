"""Stored figures that are none are refused, with the file and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyfed.errors import ConfigError
from polyfed.report.benchmark_results import (
    ProcessorTime,
    join_results,
    read_processor_time,
    read_result,
    write_result,
)
from tests.report.test_benchmark_page import row, setting


def with_score(value: object) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["rows"][1]["accuracy"].update({"2": value})


@pytest.mark.parametrize(
    ("score", "change", "told"),
    [
        ("accuracy", lambda found: found.update(setting="two"), "expected the setting one, got two"),
        ("accuracy", lambda found: found["rows"].append(row("above", (0.1,))), "expected each row once, got above"),
        ("accuracy", with_score(1.01), "above, seed 2: expected from 0 to 1, got 1.01"),
        ("accuracy", with_score(float("nan")), "above, seed 2: expected from 0 to 1, got nan"),
        ("accuracy", with_score("0.5"), "expected a number, got '0.5'"),
        ("rmse", with_score(-0.1), "above, seed 2: expected from 0 to inf, got -0.1"),
        ("accuracy", lambda found: found.pop("recipe"), "expected the key 'recipe', got none"),
    ],
)
def test_figures_that_cannot_be_are_refused(
    score: str, change: Callable[[dict[str, Any]], None], told: str, tmp_path: Path
) -> None:
    write_result(setting("one", score), ProcessorTime(tuning={}, runs={}), tmp_path)
    path = tmp_path / "one.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as refused:
        read_result(tmp_path, "one")
    assert str(path) in str(refused.value)
    assert told in str(refused.value)


@pytest.mark.parametrize(("score", "value"), [("accuracy", None), ("accuracy", 1), ("rmse", 1.01)])
def test_figures_that_can_be_are_read(score: str, value: float | None, tmp_path: Path) -> None:
    """None: of a run that gave no number."""
    write_result(setting("one", score), ProcessorTime(tuning={}, runs={}), tmp_path)
    path = tmp_path / "one.json"
    content = json.loads(path.read_text())
    with_score(value)(content)
    path.write_text(json.dumps(content))
    found = read_result(tmp_path, "one")
    assert found is not None
    assert found.rows[1].by_seed[2] == value


def test_figures_of_other_data_are_not_joined() -> None:
    stored, found = (
        setting("one", "accuracy").model_copy(update={"data": data}) for data in ({"0": "a", "1": "b"}, {"1": "b"})
    )
    joined = join_results(stored, found, [])
    assert joined.data == {"0": "a", "1": "b"}
    other = found.model_copy(update={"data": {"1": "c", "2": "d"}, "rows": found.rows[:1]})
    assert join_results(stored, other, []) == other
    unknown = stored.model_copy(update={"data": {}})
    assert join_results(unknown, other, []).data == {"1": "c", "2": "d"}


@pytest.mark.parametrize("name", ["one.json", "processor-seconds.json"])
def test_a_folder_in_the_place_of_a_file_is_no_missing_file(name: str, tmp_path: Path) -> None:
    """Else all would run for hours, and then could not be written."""
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=name):
        read_processor_time(tmp_path) if name.startswith("processor") else read_result(tmp_path, "one")
