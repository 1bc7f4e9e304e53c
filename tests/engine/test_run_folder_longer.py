"""Run folders that go on for more rounds, or are refused; whose weights a run keeps, also after power cuts."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.core.modules import export_state
from polyfed.engine import checkpoint
from polyfed.engine.run_folder import RunFolder
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.experiments.build import build_federation
from polyfed.experiments.prediction import load
from polyfed.records.read import unseal
from polyfed.report.run_records import load_runs
from polyfed.testing.fixtures import TIMES
from tests.helpers.interrupt import Interrupt
from tests.helpers.refusals import refusal

SETTINGS: Mapping[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 3, "limit_train": 150, "holdout": 30, "split": "6:2:2"},
    "models": {"architectures": ["digits-cnn1"]},
    "method": {"name": "fedgh"},
    "training": {"rounds": 3, "batch_size": 10, "lr": 0.05},
    "run": {"executor": "serial", "checkpoint_every": 2},
}
FINAL = {"method": {"name": "fedrep", "head_epochs": 1, "final_head_epochs": 1}}


def laid(base: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], **last: Mapping[str, Any]) -> Recipe:
    """Sections are laid over the settings, and others over these; a method replaces the method."""
    settings = dict(base)
    for name, table in [*sections.items(), *last.items()]:
        settings[name] = table if name == "method" else {**settings.get(name, {}), **table}
    return Recipe.from_dict(settings)


def recipe(rounds: int, **sections: Mapping[str, Any]) -> Recipe:
    return laid(SETTINGS, sections, training={"rounds": rounds})


def records(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in (*TIMES, "seal")} for line in lines]


def content(folder: Path) -> dict[str, Any]:
    """All that a run leaves, without what differs between equal runs."""
    result = unseal((folder / "result.json").read_bytes())
    for key in (*TIMES, "samples_per_second", "workers"):
        del result[key]
    models = {path.name: path.read_bytes() for path in (folder / "models").iterdir()}
    last = max((folder / "checkpoint").iterdir())
    state = {path.name: tensors(path) for path in last.glob("*.safetensors")}
    return {"records": records(folder), "result": result, "models": models, "last": last.name, "state": state}


def tensors(path: Path) -> dict[str, bytes]:
    """Tensors by name, whatever their order in the file."""
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}


MORE: dict[str, Mapping[str, Any]] = {
    "final round": FINAL,
    "drops, joiners": {
        "data": {"num_clients": 6},
        "availability": {"dropout_rate": 0.2, "late_joiners": 1, "join_round": 3},
        "training": {"client_fraction": 0.7},
    },
}


@pytest.mark.parametrize("case", MORE)
def test_a_finished_run_goes_on_as_if_more_rounds_had_been_planned(case: str, tmp_path: Path) -> None:
    sections = MORE[case]
    pf.run(recipe(3, **sections), out=tmp_path / "longer")
    with pytest.raises(RunInterrupted):
        pf.run(recipe(5, **sections), out=tmp_path / "longer", resume=True, loggers=[Interrupt(4)])
    pf.run(recipe(5, **sections), out=tmp_path / "longer", resume=True)
    pf.run(recipe(5, **sections), out=tmp_path / "straight")
    assert content(tmp_path / "longer") == content(tmp_path / "straight")
    kept = [Recipe.of_run(tmp_path / name).with_run(out=None) for name in ("longer", "straight")]
    assert kept[0].to_dict() == kept[1].to_dict()
    for other, says in (
        (recipe(3, **sections), "training.rounds was 5, now 3"),
        (
            recipe(6, **{**sections, "training": {**sections.get("training", {}), "lr": 0.1}}),
            "training.lr was 0.05, now 0.1",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            pf.run(other, out=tmp_path / "longer", resume=True)


REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "cosine": ({"training": {"lr_schedule": "cosine"}}, "training.lr_schedule"),
    "target": (
        {"method": {"name": "fedavg"}, "privacy": {"upload_clip_norm": 1.0, "target_epsilon": 100.0}},
        "privacy.target_epsilon",
    ),
    "energy": ({"method": {"name": "fedkd"}}, "energy"),
    "patience": ({"evaluation": {"patience": 1, "min_delta": 1.0}}, "evaluation.patience"),
    "nothing": ({"run": {"keep": "nothing"}}, "keep"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_depends_on_the_number_of_rounds_is_refused(case: str, tmp_path: Path) -> None:
    sections, says = REFUSED[case]
    folder = tmp_path / "run"
    pf.run(recipe(3, **sections), out=folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    said = refusal(lambda: pf.run(recipe(5, **sections), out=folder, resume=True))
    assert "cannot go on" in said
    assert says in said
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


SETTINGS_KEPT: Mapping[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 3, "limit_train": 200, "split": "5:3:2"},
    "models": {"architectures": ["digits-cnn1"]},
    "method": {"name": "fedgh"},
    "training": {"rounds": 8, "batch_size": 10, "lr": 0.3},  # so large that it goes up and down
    "run": {"executor": "serial", "checkpoint_every": 3},
}


def recipe_kept(keep: str = "best", **sections: Mapping[str, Any]) -> Recipe:
    return laid(SETTINGS_KEPT, sections, run={"keep": keep})


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> pf.Run:
    """The run that nothing disturbs."""
    return pf.run(recipe_kept(), out=tmp_path_factory.mktemp("straight") / "run")


def models(folder: Path | None) -> dict[str, bytes]:
    assert folder is not None
    return {path.name: path.read_bytes() for path in (folder / "models").glob("*.safetensors")}


def until(rounds: int, folder: Path) -> dict[str, bytes]:
    """The models of a run of the same plan that was stopped after a round."""
    made = build_federation(recipe_kept("last"), loggers=[Interrupt(rounds)])
    with pytest.raises(RunInterrupted):
        made.run()
    folder.mkdir()
    made.write_models(RunFolder(folder))
    return models(folder)


def test_the_models_are_those_of_the_best_round(tmp_path: Path) -> None:
    run = pf.run(recipe_kept(), out=tmp_path / "best")
    last = pf.run(recipe_kept("last"), out=tmp_path / "last")
    values = [record["validation"] for record in run.history]
    number = values.index(max(values)) + 1
    assert 1 < number < 8, "or this test says nothing"
    assert run.result["models_of_round"] == number
    assert last.result["models_of_round"] == 8
    best = run.history[number - 1]
    assert run.result["accuracy"] == best["accuracy"]["personal"]["mean"] == run.result["accuracy_best_by_validation"]
    assert run.result["accuracy_per_client"] == best["accuracy_per_client"]
    assert (run.result["metrics"], run.result["validation"]) == (best["metrics"], best["validation"])
    assert run.result["accuracy_last_round"] == last.result["accuracy_last_round"] == last.result["accuracy"]
    assert run.result["bytes_up"] == last.result["bytes_up"], "all rounds count"
    assert models(tmp_path / "best") == until(number, tmp_path / "until")
    assert models(tmp_path / "best") != models(tmp_path / "last")
    index = json.loads((tmp_path / "best/models/index.json").read_text())
    assert {entry["round"] for entry in index.values()} == {number}
    for client, network in run.models.items():
        loaded = export_state(load(tmp_path / "best", client).network)
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in export_state(network).items())
    assert tomllib.loads((tmp_path / "best/recipe.toml").read_text())["run"]["keep"] == "best"
    assert (run.result["evaluation"]["round"], last.result["evaluation"]["round"]) == ("best", "last")
    assert "keep" not in tomllib.loads((tmp_path / "last/recipe.toml").read_text())["run"]


def test_killed_at_any_checkpoint_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: pf.Run
) -> None:
    """As by a power cut right after a checkpoint was written."""
    write, written = checkpoint.write, []

    def dies(folder: Path, snapshot: Any, *best: Any) -> None:
        write(folder, snapshot, *best)
        if snapshot.round not in written:
            written.append(snapshot.round)
            raise RuntimeError("killed")

    monkeypatch.setattr(checkpoint, "write", dies)
    for _ in range(20):
        try:
            pf.run(recipe_kept(), out=tmp_path / "run", resume=True)
        except RuntimeError:
            continue
        break
    assert len(written) > 3
    assert models(tmp_path / "run") == models(straight.path)


STOPPED: Mapping[str, Mapping[str, Any]] = {
    "a method": {},
    "a final round": {
        "method": {"name": "fedrep", "final_head_epochs": 1, "head_epochs": 1},
        "evaluation": {"stage": "personal"},
    },
    "it runs to its end": {"evaluation": {"patience": 7}},
}


@pytest.mark.parametrize("case", STOPPED)
def test_early_stopping_goes_back_to_the_best_round(case: str, tmp_path: Path) -> None:
    asked = laid(recipe_kept("last", evaluation={"patience": 1}).to_dict(), STOPPED[case])
    run = pf.run(asked, out=tmp_path / "run")
    regular = [record for record in run.history if not record["final_round"]]
    values = [record["validation"] for record in regular]
    number = values.index(max(values)) + 1
    assert number < len(regular), "or this test says nothing"
    assert (run.result["stopped_after"] is None) == (case == "it runs to its end")
    reported = run.history[-1] if case == "a final round" else run.history[number - 1]
    assert (run.result["best_round"], run.result["models_of_round"]) == (number, reported["round"])
    assert run.result["accuracy"] == reported["accuracy"]["personal"]["mean"]
    assert run.result["accuracy_last_round"] == regular[-1]["accuracy"]["personal"]["mean"]
    if case == "a final round":
        before = run.history[number - 1]["accuracy"]["personal"]["mean"]
        assert run.result["accuracy_before_final_round"] == before
    scored = [right(load(tmp_path / "run", client), asked, client) for client in range(3)]
    assert scored == pytest.approx(run.result["accuracy_per_client"])
    in_memory = pf.run(asked)
    assert {**in_memory.result, **{key: run.result[key] for key in RUNNING}} == run.result
    for stopped in {number, len(regular)}:
        folder = tmp_path / f"stopped-{stopped}"
        with pytest.raises(RunInterrupted):
            pf.run(asked, out=folder, loggers=[Interrupt(stopped)])
        again = pf.run(asked, out=folder, resume=True)
        assert {**again.result, **{key: run.result[key] for key in RUNNING}} == run.result
        assert models(folder) == models(tmp_path / "run")


RUNNING = (*TIMES, "samples_per_second")  # what no two runs share


def right(model: Any, asked: Recipe, client: int) -> float:
    """The share of the client's test rows that its model is right on."""
    test = build_federation(asked).clients[client].data.test
    return float((model.scores(test.x).argmax(1) == test.y).double().mean())


def test_a_damaged_checkpoint_of_the_best_round_is_no_silent_loss(tmp_path: Path, straight: pf.Run) -> None:
    best = straight.result["models_of_round"]

    with pytest.raises(RunInterrupted):
        pf.run(recipe_kept(), out=tmp_path / "run", loggers=[Interrupt(best + 1)])
    (tmp_path / "run/checkpoint" / f"round-{best:06d}" / "states.safetensors").write_bytes(b"")
    says = rf"round-{best + 1:06d} is damaged \(that of the best round before it, {best}, is damaged\)"
    with pytest.warns(UserWarning, match=says), pytest.raises(ConfigError, match=r"are damaged; start again"):
        pf.run(recipe_kept(), out=tmp_path / "run", resume=True)


SLIM: Mapping[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 3, "limit_train": 150, "split": "6:2:2"},
    "models": {"architectures": ["digits-cnn1"]},
    "method": {"name": "fedavg"},
    "training": {"rounds": 4, "batch_size": 10, "lr": 0.05},
}
RECORDS = {".lock", "recipe.toml", "result.json", "rounds.jsonl"}


def recipe_nothing(keep: str = "nothing", rounds: int = 4) -> Recipe:
    return laid(SLIM, {}, training={"rounds": rounds}, run={"keep": keep, "checkpoint_every": 1})


def figures(folder: Path) -> dict[str, Any]:
    """The result, without times."""
    result = unseal((folder / "result.json").read_bytes())
    return {key: value for key, value in result.items() if key not in (*TIMES, "samples_per_second")}


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
    (run,) = load_runs([slim])
    assert set(run.lines["round"].dropna()) == {1, 2, 3, 4}


def test_a_finished_one_is_read_again(slim: Path) -> None:
    run = pf.run(recipe_nothing(), out=slim, resume=True)
    assert len(run.history) == 4
    with pytest.raises(ConfigError, match="last checkpoint is gone; client 0's weights, if kept, are in models/"):
        _ = run.models[0]


def test_what_needs_weights_is_refused_in_one_line(tmp_path: Path, slim: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"expected a run that keeps weights, got .*run, which has no folder 'models'"
    ):
        load(slim, 0)
    with pytest.raises(ConfigError, match=r"another recipe's run: run.keep was 'nothing', now None"):
        pf.run(recipe_nothing("last"), out=slim, resume=True)
