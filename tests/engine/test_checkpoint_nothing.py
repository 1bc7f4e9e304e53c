"""`run.keep = "nothing"`: a finished run has its records only; its figures are those of any other run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.deploy.server import serve
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.experiments.prediction import load_model
from polyfed.report.run_records import load_runs
from polyfed.results.read import unseal
from polyfed.testing.fixtures import TIMES

SETTINGS: Mapping[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 3, "limit_train": 150, "split": "6:2:2"},
    "models": {"architectures": ["digits-cnn1"]},
    "method": {"name": "fedavg"},
    "training": {"rounds": 4, "batch_size": 10, "lr": 0.05},
}
RECORDS = {"recipe.toml", "result.json", "rounds.jsonl"}


def recipe(keep: str = "nothing", rounds: int = 4) -> Recipe:
    training = {**SETTINGS["training"], "rounds": rounds}
    return Recipe.from_dict({**SETTINGS, "training": training, "run": {"keep": keep, "checkpoint_every": 1}})


class StopAfterRound:
    """Ctrl-C, when a round is done."""

    def __init__(self, number: int) -> None:
        self.number = number

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        if record["round"] == self.number:
            raise KeyboardInterrupt


def figures(folder: Path) -> dict[str, Any]:
    """The result, without times and the models' round."""
    result = unseal((folder / "result.json").read_bytes())
    return {key: value for key, value in result.items() if key not in (*TIMES, "samples_per_second", "models_of_round")}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps its models."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    pf.run(recipe("last"), out=folder)
    return folder


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps nothing."""
    folder = tmp_path_factory.mktemp("slim") / "run"
    pf.run(recipe(), out=folder)
    return folder


def test_records_are_all_that_is_left_and_the_figures_are_equal(kept: Path, slim: Path) -> None:
    assert {path.name for path in slim.iterdir()} == RECORDS
    assert {path.name for path in kept.iterdir()} == RECORDS | {"checkpoint", "models"}
    assert figures(slim) == figures(kept)
    assert "models_of_round" not in json.loads((slim / "result.json").read_text())
    (run,) = load_runs([slim])
    assert len(run.rounds) == 4


def test_an_interrupted_one_goes_on_from_its_checkpoint(tmp_path: Path, kept: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RunInterrupted):
        pf.run(recipe(), out=folder, loggers=[StopAfterRound(2)])
    assert (folder / "checkpoint/round-000002").is_dir()
    pf.run(recipe(), out=folder, resume=True)
    assert {path.name for path in folder.iterdir()} == RECORDS
    assert figures(folder) == figures(kept)


def test_a_finished_one_is_read_again(slim: Path) -> None:
    run = pf.run(recipe(), out=slim, resume=True)
    assert len(run.history) == 4
    with pytest.raises(ConfigError, match="last checkpoint is gone; client 0's weights, if kept, are in models/"):
        _ = run.models[0]


def test_what_needs_weights_is_refused_in_one_line(tmp_path: Path, slim: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot go on from 4 to 5 rounds: it kept no weights \(keep = 'nothing'\)"):
        pf.run(recipe(rounds=5), out=slim, resume=True)
    with pytest.raises(
        ConfigError, match=r"expected a run that keeps weights, got .*run, which has no folder 'models'"
    ):
        load_model(slim, 0)
    with pytest.raises(ConfigError, match=r"another recipe's run: run.keep was 'nothing', now None"):
        pf.run(recipe("last"), out=slim, resume=True)


def test_nodes_keep_their_states(tmp_path: Path) -> None:
    from tests.helpers.nearby import Nearby, recipe_of

    asked = recipe_of(run={"keep": "nothing"})
    with pytest.raises(ConfigError, match=r"run.keep: expected 'last', .* no more, got 'nothing'"):
        serve(asked, Nearby(asked, tmp_path), out=tmp_path / "out", deadline=5)


def test_models_of_a_run_in_python_are_at_hand_until_it_is_gone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    clients = [pf.Client(torch.nn.Linear(4, 2), train=(x, y)) for _ in range(2)]
    out = pf.Output(tmp_path / "run", keep="nothing")
    run = pf.Federation(clients, pf.methods.FedAvg(), pf.Training(rounds=2, batch_size=10), out=out).run()
    assert run.models[1](x).shape == (20, 2)
    assert {path.name for path in (tmp_path / "run").iterdir()} == RECORDS
