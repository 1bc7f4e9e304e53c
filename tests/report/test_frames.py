"""The one frame of what runs have recorded: against the files, by hand, and of a run in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.errors import ConfigError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    recipe = Recipe.from_dict(
        {
            "data": {"dataset": "digits", "num_clients": 3, "partition": "iid", "max_train_per_client": 20},
            "models": {"architectures": ["digits-cnn1", "digits-cnn2"]},
            "method": {"name": "fedtgp"},
            "training": {"rounds": 2, "batch_size": 10, "lr": 0.1},
            "evaluation": {"extra_stages": ["personal"]},
        }
    )
    return pf.run(recipe, out=tmp_path_factory.mktemp("frame") / "run")


def value(frame: pd.DataFrame, **keys: Any) -> float:
    """The only line of a metric; without a round, a client and so on unless one is asked for."""
    asked = {"round": None, "client": None, "architecture": "", "predictor": "", "stage": ""} | keys
    for column, wanted in asked.items():
        frame = frame[frame[column].isna() if wanted is None else frame[column] == wanted]
    (found,) = frame["value"]
    return float(found)


def test_the_lines_are_those_of_the_files(run: Any) -> None:
    frame = pf.results(run.path)
    result = json.loads((run.path / "result.json").read_text())
    second = json.loads((run.path / "rounds.jsonl").read_text().splitlines()[1])
    stage = result["evaluation"]["stage"]
    assert value(frame, metric="accuracy", stage=stage) == result["accuracy"]
    assert value(frame, metric="bytes_up") == result["bytes_up"]
    assert value(frame, metric="accuracy", stage="personal") == result["accuracy_by_stage"]["personal"]["mean"]
    assert value(frame, metric="accuracy", stage="personal", round=2) == second["accuracy"]["personal"]["mean"]
    assert value(frame, metric="train_loss", round=2) == second["train_loss"]
    by_head = second["accuracy_by_predictor"][stage]["head"]["mean"]
    assert value(frame, metric="accuracy", stage=stage, predictor="head", round=2) == by_head
    by_network = result["accuracy_per_architecture"]["digits-cnn2"]["mean"]
    assert value(frame, metric="by_architecture", stage=stage, architecture="digits-cnn2") == by_network
    client = result["clients_table"][1]
    own = {"client": 1, "architecture": "digits-cnn2"}
    assert value(frame, metric="accuracy", stage=stage, **own) == client["accuracy"]
    assert value(frame, metric="samples", **own) == client["samples"]
    assert set(frame["main_stage"]) == {stage}
    assert set(frame["seed"]) == {0}


def test_a_run_in_memory_has_the_same(run: Any) -> None:
    pd.testing.assert_frame_equal(pf.results(run), pf.results(run.path))


def test_what_tells_runs_apart_is_in_each_line(two_by_two: Path) -> None:
    frame = pf.results([two_by_two / "local-1", two_by_two / "fedgh-0"])
    assert len(frame.groupby(["run", "name", "method", "control", "seed"], observed=True)) == 2
    scores = frame[frame["round"].notna() & (frame["stage"] == frame["main_stage"]) & (frame["metric"] == "accuracy")]
    curves = scores.pivot_table("value", "round", "name", observed=True)
    assert curves["fedgh"].tolist() == [0.3, 0.4, 0.6]
    assert curves["local"].tolist() == [0.3, 0.4, 0.54]


def test_folders_without_a_finished_run_are_refused(make: Any) -> None:
    make("a", finished=False)
    with pytest.raises(ConfigError, match="expected finished runs, got none in"):
        pf.results(make.root)
