"""Whose weights a run keeps: the best round's or none; after resuming and power cuts the same."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.core.modules import export_state
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.experiments.prediction import load_model
from polyfed.report.run_records import load_runs
from polyfed.results.read import unseal
from polyfed.testing.fixtures import TIMES
from tests.helpers.interrupt import Interrupt

SETTINGS: Mapping[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 3, "limit_train": 200, "split": "5:3:2"},
    "models": {"architectures": ["digits-cnn1"]},
    "method": {"name": "fedgh"},
    "training": {"rounds": 8, "batch_size": 10, "lr": 0.3},  # so large that it goes up and down
    "run": {"executor": "serial", "checkpoint_every": 3},
}


def recipe(keep: str = "best", **sections: Mapping[str, Any]) -> Recipe:
    laid = {name: {**SETTINGS.get(name, {}), **table} for name, table in sections.items() if name != "method"}
    method = {"method": sections["method"]} if "method" in sections else {}
    settings = {**SETTINGS, **laid, **method}
    return Recipe.from_dict({**settings, "run": {**settings["run"], "keep": keep}})


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> pf.Run:
    """The run that nothing disturbs."""
    return pf.run(recipe(), out=tmp_path_factory.mktemp("straight") / "run")


def models(folder: Path | None) -> dict[str, bytes]:
    assert folder is not None
    return {path.name: path.read_bytes() for path in (folder / "models").glob("*.safetensors")}


def until(rounds: int, folder: Path) -> dict[str, bytes]:
    """The models of a run of the same plan that was stopped after a round."""
    federation = pf.Recipe.from_dict(recipe("last").to_dict())
    from polyfed.experiments.build import build_federation

    made = build_federation(federation, loggers=[Interrupt(rounds)])
    with pytest.raises(RunInterrupted):
        made.run()
    made.write_models(_folder(folder))
    return models(folder)


def _folder(path: Path) -> Any:
    from polyfed.engine.run_folder import RunFolder

    path.mkdir()
    return RunFolder(path)


def test_the_models_are_those_of_the_best_round(tmp_path: Path) -> None:
    run = pf.run(recipe(), out=tmp_path / "best")
    last = pf.run(recipe("last"), out=tmp_path / "last")
    values = [record["validation"] for record in run.history]
    number = values.index(max(values)) + 1
    assert 1 < number < 8, "or this test says nothing"
    assert run.result["models_of_round"] == number
    assert last.result["models_of_round"] == 8
    assert {**run.result, **_varying(last)} == {**last.result, "models_of_round": number}, "all else is the same"
    assert models(tmp_path / "best") == until(number, tmp_path / "until")
    assert models(tmp_path / "best") != models(tmp_path / "last")
    index = json.loads((tmp_path / "best/models/index.json").read_text())
    assert {entry["round"] for entry in index.values()} == {number}
    assert f"Weights are those after round {number}." in (tmp_path / "best/models/README.md").read_text()
    for client, network in run.models.items():
        loaded = export_state(load_model(tmp_path / "best", client).network)
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in export_state(network).items())
    scored = [float(accuracy) for accuracy in run.history[number - 1]["accuracy_per_client"]]
    assert sum(scored) / 3 == pytest.approx(run.result["accuracy_best_by_validation"])
    assert tomllib.loads((tmp_path / "best/recipe.toml").read_text())["run"]["keep"] == "best"
    assert "keep" not in tomllib.loads((tmp_path / "last/recipe.toml").read_text())["run"]


def _varying(run: pf.Run) -> dict[str, Any]:
    return {key: run.result[key] for key in (*TIMES, "samples_per_second")}


def test_without_a_folder_too(straight: pf.Run) -> None:
    run, kept = pf.run(recipe()), straight
    assert run.result["models_of_round"] == kept.result["models_of_round"] < 8
    for client, network in run.models.items():
        ours, theirs = export_state(network), export_state(kept.models[client])
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_killed_at_any_checkpoint_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: pf.Run
) -> None:
    """As by a power cut right after a checkpoint was written."""
    from polyfed.engine import checkpoint

    write, written = checkpoint.write, []

    def dies(folder: Path, snapshot: Any, *best: Any) -> None:
        write(folder, snapshot, *best)
        if snapshot.round not in written:
            written.append(snapshot.round)
            raise RuntimeError("killed")

    monkeypatch.setattr(checkpoint, "write", dies)
    for _ in range(20):
        try:
            pf.run(recipe(), out=tmp_path / "run", resume=True)
        except RuntimeError:
            continue
        break
    assert len(written) > 3
    assert models(tmp_path / "run") == models(straight.path)


def test_a_run_that_goes_on_keeps_the_best_of_all_its_rounds(tmp_path: Path) -> None:
    sections = {"evaluation": {"every_n_rounds": 2}}
    for rounds in (3, 5, 8):
        longer = recipe(training={"rounds": rounds}, **sections)
        pf.run(longer, out=tmp_path / "longer", resume=True)
    straight = pf.run(recipe(**sections), out=tmp_path / "straight")
    assert models(tmp_path / "longer") == models(tmp_path / "straight")
    assert (
        json.loads((tmp_path / "longer/result.json").read_text())["models_of_round"]
        == (straight.result["models_of_round"])
    )


def test_a_damaged_checkpoint_of_the_best_round_is_no_silent_loss(tmp_path: Path, straight: pf.Run) -> None:
    best = straight.result["models_of_round"]

    with pytest.raises(RunInterrupted):
        pf.run(recipe(), out=tmp_path / "run", loggers=[Interrupt(best + 1)])
    (tmp_path / "run/checkpoint" / f"round-{best:06d}" / "weights.safetensors").write_bytes(b"")
    says = rf"round-{best + 1:06d} is damaged \(that of the best round before it, {best}, is damaged\)"
    with pytest.warns(UserWarning, match=says), pytest.raises(ConfigError, match=r"are damaged; start again"):
        pf.run(recipe(), out=tmp_path / "run", resume=True)


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        pf.run(recipe(data={"split": "4:0:1"}), out=tmp_path / "run")
    assert str(refused.value).startswith("run.keep = 'best': expected validation data, by which the best round is ")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"run.keep: expected 'last', 'best' or 'nothing', got 'first'"):
        recipe("first")
    client = pf.Client(torch.nn.Linear(4, 2), train=(torch.randn(9, 4), torch.arange(9) % 2))
    with pytest.raises(ConfigError, match="keep: expected 'last', 'best' or 'nothing', got 'bset'"):
        pf.Federation([client], pf.methods.Local(), out=pf.Output(keep="bset"))  # type: ignore[arg-type]
    pf.run(recipe("last"), out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"another recipe's run: run.keep was None, now 'best'"):
        pf.run(recipe("best"), out=tmp_path / "run", resume=True)


SLIM: Mapping[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 3, "limit_train": 150, "split": "6:2:2"},
    "models": {"architectures": ["digits-cnn1"]},
    "method": {"name": "fedavg"},
    "training": {"rounds": 4, "batch_size": 10, "lr": 0.05},
}
RECORDS = {"recipe.toml", "result.json", "rounds.jsonl"}


def recipe_nothing(keep: str = "nothing", rounds: int = 4) -> Recipe:
    training = {**SLIM["training"], "rounds": rounds}
    return Recipe.from_dict({**SLIM, "training": training, "run": {"keep": keep, "checkpoint_every": 1}})


def figures(folder: Path) -> dict[str, Any]:
    """The result, without times and the models' round."""
    result = unseal((folder / "result.json").read_bytes())
    return {key: value for key, value in result.items() if key not in (*TIMES, "samples_per_second", "models_of_round")}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps its models."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    pf.run(recipe_nothing("last"), out=folder)
    return folder


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps nothing."""
    folder = tmp_path_factory.mktemp("slim") / "run"
    pf.run(recipe_nothing(), out=folder)
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
        pf.run(recipe_nothing(), out=folder, loggers=[Interrupt(2)])
    assert (folder / "checkpoint/round-000002").is_dir()
    pf.run(recipe_nothing(), out=folder, resume=True)
    assert {path.name for path in folder.iterdir()} == RECORDS
    assert figures(folder) == figures(kept)


def test_a_finished_one_is_read_again(slim: Path) -> None:
    run = pf.run(recipe_nothing(), out=slim, resume=True)
    assert len(run.history) == 4
    with pytest.raises(ConfigError, match="last checkpoint is gone; client 0's weights, if kept, are in models/"):
        _ = run.models[0]


def test_what_needs_weights_is_refused_in_one_line(tmp_path: Path, slim: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot go on from 4 to 5 rounds: it kept no weights \(keep = 'nothing'\)"):
        pf.run(recipe_nothing(rounds=5), out=slim, resume=True)
    with pytest.raises(
        ConfigError, match=r"expected a run that keeps weights, got .*run, which has no folder 'models'"
    ):
        load_model(slim, 0)
    with pytest.raises(ConfigError, match=r"another recipe's run: run.keep was 'nothing', now None"):
        pf.run(recipe_nothing("last"), out=slim, resume=True)


def test_models_of_a_run_in_python_are_at_hand_until_it_is_gone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    clients = [pf.Client(torch.nn.Linear(4, 2), train=(x, y)) for _ in range(2)]
    out = pf.Output(tmp_path / "run", keep="nothing")
    run = pf.Federation(clients, pf.methods.FedAvg(), pf.Training(rounds=2, batch_size=10), out=out).run()
    assert run.models[1](x).shape == (20, 2)
    assert {path.name for path in (tmp_path / "run").iterdir()} == RECORDS
