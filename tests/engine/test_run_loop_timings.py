"""Where a round's time went, as the records tell it."""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import pytest

import polyfed as pf
from polyfed.methods import fedhenn
from polyfed.profiling import SECTIONS
from polyfed.testing.fixtures import TIMES

RECIPE: dict[str, Any] = {
    "data": {
        "dataset": "digits",
        "num_clients": 3,
        "max_train_per_client": 10,
        "max_test_per_client": 10,
        "holdout": 20,
    },
    "models": {"architectures": ["digits-cnn1", "digits-cnn2"]},
    "training": {"rounds": 2, "batch_size": 5},
}
FEDHENN = {"name": "fedhenn", "alignment_data": {"size": 20, "batch": 8}, "eta0": 0.1}


def records(method: dict[str, Any], profile: bool, workers: int = 1) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    executor = {"executor": "processes" if workers > 1 else "serial", "workers": workers}
    done = pf.run(pf.Recipe.from_dict({**RECIPE, "method": method, "run": executor}), profile=profile)
    return dict(done.result), [dict(record) for record in done.history]


def without_time(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in (*TIMES, "timings")}


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="worker processes need Linux")


@pytest.mark.parametrize(("workers", "chunk"), [(1, 8), (1, 4), pytest.param(2, 8, marks=LINUX)])
def test_sections_add_up_and_change_nothing(workers: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the term's gradient is taken apart from the task's (chunk below the step's rows)."""
    monkeypatch.setattr(fedhenn, "ROWS_AT_ONCE", chunk)
    result, rounds = records(FEDHENN, True, workers)
    _, plain = records(FEDHENN, False)
    for record, expected in zip(rounds, plain, strict=True):
        spent = record["timings"]
        assert tuple(spent) == SECTIONS
        assert sum(spent.values()) == pytest.approx(workers * record["seconds"], rel=1e-3)
        assert min(spent[name] for name in SECTIONS if name not in ("align", "idle", "prototypes")) > 0
        assert (spent["idle"] > 0) == (workers > 1)
        assert without_time(record) == without_time(expected)
        assert "timings" not in expected
    first, second = (record["timings"]["align"] for record in rounds)
    assert first < 0.2 * second, "eta is 0 in round 1, so that there is no term"
    assert second > 0
    assert rounds[1]["timings"]["prototypes"] > 0, "the server's passes over the RAD"
    assert result["timings"] == {name: sum(record["timings"][name] for record in rounds) for name in SECTIONS}


def test_off_there_is_no_key() -> None:
    result, rounds = records({"name": "local"}, False)
    assert "timings" not in result
    assert not any("timings" in record for record in rounds)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=LINUX)])
def test_processor_time_is_of_the_run_and_its_workers(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second whenever it is read: twice for a round and for each answer of a worker."""
    monkeypatch.setattr(time, "process_time", itertools.count().__next__)
    result, rounds = records({"name": "local"}, False, workers)
    answers = 0 if workers == 1 else 2 * RECIPE["data"]["num_clients"]  # training, then scores
    assert [record["processor_seconds"] for record in rounds] == pytest.approx([1 + answers] * 2)
    assert result["processor_seconds"] == pytest.approx(2 * (1 + answers))
