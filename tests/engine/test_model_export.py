"""The networks that a run leaves give the scores that it reports, whatever method, round, stage and clients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.engine.federation import Federation
from polyfed.engine.run import Run
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.experiments.controls import pooled
from polyfed.experiments.prediction import load
from polyfed.registry import METHODS
from tests.helpers.nearby import DATA
from tests.helpers.quick import others_slow
from tests.helpers.regression import write_table

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "data": {
        "dataset": "digits",
        "num_clients": 5,
        "limit_train": 300,
        "min_samples": 12,
        "partition": "dirichlet",
        "dirichlet_alpha": 0.5,
        "split": "5:2:3",
        "holdout": 40,
    },
    "models": {"architectures": ["digits-cnn1"]},
    "method": {"name": "fedavg"},
    "training": {"rounds": 4, "batch_size": 16, "lr": 0.2, "client_fraction": 0.4},
    "run": {"executor": "serial", "seed": 1},
}
SMALL: Mapping[str, Mapping[str, Any]] = {
    "fedhenn": {"alignment_data": {"size": 10}},
    "fedhenn-homogeneous": {"alignment_data": {"size": 10}, "final_average": True},
    "fedrep": {"head_epochs": 1, "final_head_epochs": 1},
    "feddf": {"server_steps": 2, "server_batch": 20},
    "fedet": {"server_steps": 2, "server_batch": 20},
}
ROUNDS: Mapping[str, Mapping[str, Any]] = {
    "last": {},
    "best": {"run": {"keep": "best"}},
    "early stop": {"evaluation": {"patience": 1}, "training": {"rounds": 6}},
}


def recipe_of(*layers: Mapping[str, Mapping[str, Any]]) -> Recipe:
    settings: dict[str, dict[str, Any]] = {section: dict(values) for section, values in SETTINGS.items()}
    for layer in layers:
        for section, values in layer.items():
            settings[section] = {**settings.get(section, {}), **values}
    return Recipe.from_dict(settings)


def of_method(name: str, **sections: Mapping[str, Any]) -> Recipe:
    """The smallest run of a method in which a client is scored in every stage."""
    needs = METHODS[name]().requirements
    kinds = ["digits-cnn1"] if needs.same_architecture or needs.shared_shapes else ["digits-cnn1", "digits-cnn2"]
    layers = {"method": {"name": name, **SMALL.get(name, {})}, "models": {"architectures": kinds}}
    return recipe_of(layers, {"evaluation": {"extra_stages": other_stages(name)}}, sections)


def other_stages(name: str) -> list[str]:
    return [stage for stage in ("received", "personal") if stage != METHODS[name]().evaluation_stage]


def ran(recipe: Recipe, out: Path) -> tuple[Federation, Run]:
    federation = build_federation(recipe, data=DATA, out=out)
    return federation, federation.run()


def gives(federation: Federation, run: Run) -> list[str]:
    """Whether the folder, and the run at hand, give the scores of all stages that are kept; the clients that do."""
    result, folder = run.result, run.path
    assert folder is not None
    score = result.get("score", "accuracy")
    main, *_ = result["evaluation"]["stages"]
    kept = [stage for stage in result[f"{score}_by_stage"] if stage != "after_training"]
    index = json.loads((folder / "models/index.json").read_text())
    assert {entry["round"] for entry in index.values()} == {result["models_of_round"]}
    assert {entry["stage"] for entry in index.values()} == {main}
    scored = [number for number, value in enumerate(result[f"{score}_per_client"]) if value is not None]
    assert scored
    for stage in kept:
        found = []
        for number in scored:
            rows = federation.clients[number].data.test
            said = pf.predict(folder, number, rows.x, stage=stage)
            found.append(judged(said, rows))
            if stage == main:
                assert pf.predict(folder, number, rows.x).scores.equal(said.scores), "the scored one is the default"
                assert found[-1] == pytest.approx(result[f"{score}_per_client"][number]), (stage, number)
                at_hand = run.models[number](federation.clients[number].prepare(rows.x)).detach()
                assert torch.allclose(at_hand, said.scores, atol=1e-4)
        assert sum(found) / len(found) == pytest.approx(result[f"{score}_by_stage"][stage]["mean"]), stage
    return list(index)


def judged(said: pf.Predictions, rows: Any) -> float:
    """The accuracy, or the RMSE, on these rows."""
    if said.model.scale is None:
        return float((said.classes == rows.y).double().mean())
    error = said.values - rows.scale.restored(rows.y)
    return float((error**2).mean().sqrt())


@pytest.mark.parametrize("which", ROUNDS)
@pytest.mark.parametrize("name", others_slow(METHODS, quick=["fedavg", "fedproto", "own-plus-common"]))
def test_a_folder_gives_the_scores_of_its_run(name: str, which: str, tmp_path: Path) -> None:
    _, run = done = ran(of_method(name, **ROUNDS[which]), tmp_path / "run")
    assert gives(*done) == ["0", "1", "2", "3", "4"]
    if which != "last" and not run.result["final_round"]:
        assert run.result["models_of_round"] == run.result["best_round"]


MIXED = {"models": {"architectures": ["digits-cnn1", "digits-cnn2"]}}
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "heads of their own": {"method": {"name": "fedavg", "aggregation": "same-shape"}, **MIXED},
    "slices": {"method": {"name": "heterofl"}},
    "adapters": {"method": {"name": "fedgh", "adapters": {"ranks": "2 4"}}},
    "tuned": {"method": {"personalize": "tuned"}},
    "shares": {"method": {"personalize": "shares"}, "evaluation": {"extra_stages": ["personal"]}},
    "alone": {"method": {"alone": True}, "evaluation": {"extra_stages": ["personal"]}},
    "another stage": {"evaluation": {"stage": "personal", "extra_stages": ["received", "after_training"]}},
    "late": {"availability": {"late_joiners": 2, "join_round": 3, "dropout_rate": 0.3}},
    "stacked": {"run": {"executor": "vectorized"}},
    "processes": {"run": {"executor": "processes", "workers": 2}},
    "one test set": {"data": {"test": "global"}},
}


@pytest.mark.parametrize("case", others_slow(OTHERS, quick=["heads of their own", "shares", "alone", "another stage"]))
def test_whatever_a_run_is_like(case: str, tmp_path: Path) -> None:
    assert len(gives(*ran(recipe_of(OTHERS[case]), tmp_path / "run"))) == 5


def test_numbers(tmp_path: Path) -> None:
    data = {"dataset": f"csv:{write_table(tmp_path / 'costs.csv')}", "label_column": "cost", "task": "regression"}
    table = {"data": {**data, "num_clients": 3, "split": "5:2:3"}, "models": {"architectures": ["mlp-16-32"]}}
    rest = {key: SETTINGS[key] for key in ("method", "training")}
    recipe = Recipe.from_dict({**table, **rest, "evaluation": {"extra_stages": ["personal"], "patience": 2}})
    gives(*ran(recipe, tmp_path / "run"))


def test_pooled_data(tmp_path: Path) -> None:
    gives(*ran(pooled(recipe_of({"training": {"rounds": 6}}, {"evaluation": {"patience": 1}})), tmp_path / "run"))


def test_right_after_training_nothing_is_kept_but_what_came_of_it(tmp_path: Path) -> None:
    settings = {"evaluation": {"stage": "after_training"}, "training": {"client_fraction": 1.0}}
    ran(recipe_of(settings), tmp_path / "run")
    assert load(tmp_path / "run", 0).stage == "personal"
    index = json.loads((tmp_path / "run/models/index.json").read_text())
    assert [(entry["stage"], [*entry["stages"]]) for entry in index.values()] == [("after_training", ["personal"])] * 5
    with pytest.raises(ConfigError, match=r"stage: expected one that the run keeps \(personal\), got 'received'"):
        pf.predict(tmp_path / "run", 0, torch.zeros(1, 1, 8, 8, dtype=torch.uint8), stage="received")


def test_who_is_held_out_has_the_network_of_a_newcomer(tmp_path: Path) -> None:
    federation, run = ran(recipe_of({"evaluation": {"held_out": [3]}}), tmp_path / "run")
    rows = federation.clients[3].data.test
    found = judged(pf.predict(tmp_path / "run", 3, rows.x), rows)
    assert run.result["held_out_per_client"]["received"] == {"3": pytest.approx(found)}


def test_what_is_equal_is_one_file_and_what_goes_is_removed(tmp_path: Path) -> None:
    """Three of five clients do not train in the first round; they keep what they would receive."""
    models = tmp_path / "run/models"
    _, run = ran(recipe_of({"training": {"rounds": 1}}), tmp_path / "run")
    drawn = {number: f"personal-{number:03d}.safetensors" for number in run.history[0]["clients"]}
    assert {path.name for path in models.glob("*.safetensors")} == {"received-000.safetensors", *drawn.values()}
    index = json.loads((models / "index.json").read_text())
    received = {"weights": "received-000.safetensors"}
    for number, entry in index.items():
        personal = {"weights": drawn[int(number)]} if int(number) in drawn else received
        assert entry["stages"] == {"received": received, "personal": personal}
        assert entry["sha256"].keys() == {received["weights"], personal["weights"]}
    (models / "personal-007.safetensors").write_bytes(b"of a run of fewer rounds")
    again = pf.run(recipe_of({"training": {"rounds": 5}}), out=tmp_path / "run", resume=True)
    wanted = {f"personal-{number:03d}.safetensors" for record in again.history for number in record["clients"]}
    assert {path.name for path in models.glob("*.safetensors")} == {"received-000.safetensors", *wanted}
