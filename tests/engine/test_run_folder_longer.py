"""A finished run that goes on for more rounds ends as if they had been planned from the start, or is refused."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.engine import checkpoint
from polyfed.engine.run_folder import RunFolder, why_not_longer
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.experiments.prediction import load_model
from polyfed.methods import ScaleFL
from polyfed.methods.fedkd import FedKD
from polyfed.report.run_records import load_runs
from polyfed.results.read import unseal
from polyfed.testing.fixtures import TIMES
from tests.helpers.interrupt import Interrupt
from tests.helpers.quick import others_slow

SETTINGS: Mapping[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 3, "limit_train": 150, "holdout": 30, "split": "6:2:2"},
    "models": {"architectures": ["digits-cnn1"]},
    "method": {"name": "fedgh"},
    "training": {"rounds": 3, "batch_size": 10, "lr": 0.05},
    "run": {"executor": "serial", "checkpoint_every": 2},
}
FINAL = {"method": {"name": "fedrep", "head_epochs": 1, "final_head_epochs": 1}}
AVERAGE = {"method": {"name": "fedhenn-homogeneous", "alignment_data": {"size": 10}, "final_average": True}}


def recipe(rounds: int, **sections: Mapping[str, Any]) -> Recipe:
    """Sections are laid over the settings; a method replaces the method."""
    laid = {name: {**SETTINGS.get(name, {}), **table} for name, table in sections.items() if name != "method"}
    method = {"method": sections["method"]} if "method" in sections else {}
    settings = {**SETTINGS, **laid, **method}
    settings["training"] = {**settings["training"], "rounds": rounds}
    return Recipe.from_dict(settings)


@functools.cache
def _finished(rounds: int, sections: str, home: Path) -> Path:
    pf.run(recipe(rounds, **json.loads(sections)), out=home / f"{len(list(home.iterdir()))}")
    return max(home.iterdir(), key=lambda folder: int(folder.name))


class Finished:
    """Runs from start to end, each made once."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def content(self, rounds: int, **sections: Mapping[str, Any]) -> dict[str, Any]:
        """What such a run leaves."""
        return content(_finished(rounds, json.dumps(sections), self.home))

    def copy(self, folder: Path, rounds: int, **sections: Mapping[str, Any]) -> None:
        """Such a run in a folder of its own."""
        shutil.copytree(_finished(rounds, json.dumps(sections), self.home), folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("finished"))


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


CASES: dict[str, Mapping[str, Any]] = {
    "fedgh": {},
    "fedavg, falling rates": {
        "method": {"name": "fedavg"},
        "training": {"lr_schedule": "exponential", "lr_gamma": 0.5, "warmup_rounds": 2},
    },
    "a final round": FINAL,
    "another final round": AVERAGE,
    "scored in every second round": {"evaluation": {"every_n_rounds": 2, "extra_stages": ["received"]}},
    "late uploads, drops, joiners": {
        "method": {"name": "fedavg"},
        "data": {"num_clients": 6},
        "availability": {"delay_rate": 0.5, "dropout_rate": 0.2, "late_joiners": 1, "join_round": 3},
        "training": {"client_fraction": 0.7},
    },
    "patience that does not run out": {"evaluation": {"patience": 5, "every_n_rounds": 2}},
    "noise, and a budget that lasts": {
        "method": {"name": "fedavg"},
        "privacy": {"upload_clip_norm": 1.0, "upload_noise_multiplier": 5.0, "max_epsilon": 100.0},
        "evaluation": {"every_n_rounds": 2},
    },
}


SOME = ("a final round", "late uploads, drops, joiners")


@pytest.mark.parametrize("case", others_slow(CASES, quick=SOME))
def test_it_ends_as_if_it_had_been_planned(case: str, tmp_path: Path) -> None:
    sections = CASES[case]
    pf.run(recipe(3, **sections), out=tmp_path / "longer")
    longer = pf.run(recipe(5, **sections), out=tmp_path / "longer", resume=True)
    straight = pf.run(recipe(5, **sections), out=tmp_path / "straight")
    assert content(tmp_path / "longer") == content(tmp_path / "straight")
    assert longer.result["rounds"] == 5
    assert len(longer.models) == len(straight.models)
    kept = [Recipe.of_run(tmp_path / name).with_run(out=None) for name in ("longer", "straight")]
    assert kept[0].to_dict() == kept[1].to_dict()
    again = pf.run(recipe(5, **sections), out=tmp_path / "longer", resume=True)
    assert again.result == longer.result, "finished: it is only read"


def test_also_twice_and_from_one_that_was_interrupted(tmp_path: Path, finished: Finished) -> None:
    folder = tmp_path / "longer"
    with pytest.raises(RunInterrupted):
        pf.run(recipe(3, **FINAL), out=folder, loggers=[Interrupt(2)])
    for rounds in (4, 5):
        pf.run(recipe(rounds, **FINAL), out=folder, resume=True)
    assert content(folder) == finished.content(5, **FINAL)


@pytest.mark.parametrize("number", others_slow((4, 5, 6), quick=(5,)))
def test_interrupted_on_the_way_it_goes_on_and_nothing_is_lost(number: int, tmp_path: Path, finished: Finished) -> None:
    """After a round, after the last one, after the final one."""
    folder = tmp_path / "longer"
    finished.copy(folder, 3, **FINAL)
    before = {path.name: path.read_bytes() for path in [folder / "result.json", *(folder / "models").iterdir()]}
    with pytest.raises(RunInterrupted):
        pf.run(recipe(5, **FINAL), out=folder, resume=True, loggers=[Interrupt(number)])
    assert {path.name: path.read_bytes() for path in [folder / "result.json", *(folder / "models").iterdir()]} == before
    load_model(folder, 0)
    (found,) = load_runs(folder)
    assert not found.finished
    assert found.notes == (f"{tmp_path.name}/longer: unfinished, {number} of 5 rounds done, result.json is of 3",)
    with pytest.raises(ConfigError, match=r"training\.rounds was 5, now 3"):
        pf.run(recipe(3, **FINAL), out=folder, resume=True)
    pf.run(recipe(5, **FINAL), out=folder, resume=True)
    assert content(folder) == finished.content(5, **FINAL)


STEPS = ("remove", "rounds", "replace_last", "write_recipe", "write_result")


@pytest.mark.parametrize("step", others_slow(STEPS, quick=("rounds", "write_recipe")))
def test_killed_between_any_two_steps_the_same_command_goes_on(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Finished
) -> None:
    sections = {**FINAL, "evaluation": {"every_n_rounds": 2}}
    folder = tmp_path / "longer"
    finished.copy(folder, 3, **sections)
    owner: Any = checkpoint if step == "remove" else RunFolder
    with monkeypatch.context() as patch:
        patch.setattr(owner, step, killed(getattr(owner, step)))
        with pytest.raises(RuntimeError, match="killed"):
            pf.run(recipe(5, **sections), out=folder, resume=True)
    pf.run(recipe(5, **sections), out=folder, resume=True)
    assert content(folder) == finished.content(5, **sections)


def killed(function: Any) -> Any:
    """Dies after it has done its work."""

    def die(*arguments: Any) -> None:
        function(*arguments)
        raise RuntimeError("killed")

    return die


def test_what_was_made_of_the_shorter_run_goes_when_the_new_result_is_there(tmp_path: Path, finished: Finished) -> None:
    finished.copy(tmp_path / "run", 3)
    for name in ("analysis", "attack"):
        (tmp_path / "run" / name).mkdir()
        (tmp_path / "run" / name / "labels.png").write_text("")
        (tmp_path / "run" / name / "mine.txt").write_text("")
    pf.run(recipe(4), out=tmp_path / "run", resume=True)
    left = sorted(path.name for path in (tmp_path / "run").glob("a*/*"))
    assert left == ["mine.txt", "mine.txt"], "files of somebody else stay"


# what cannot be -----------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "cosine": (
        {"training": {"lr_schedule": "cosine"}},
        "the learning rates of training.lr_schedule = 'cosine' depend on the number of rounds",
    ),
    "target": (
        {"method": {"name": "fedavg"}, "privacy": {"upload_clip_norm": 1.0, "target_epsilon": 100.0}},
        "the noise for privacy.target_epsilon depends on the number of rounds",
    ),
    "energy": ({"method": {"name": "fedkd"}}, "the energy that is sent depends on the number of rounds"),
    "patience": (
        {"evaluation": {"patience": 1, "min_delta": 1.0}},
        "it stopped early, after round 2 (evaluation.patience), and would stop there again",
    ),
    "budget": (
        {
            "method": {"name": "fedavg"},
            "privacy": {"upload_clip_norm": 1.0, "upload_noise_multiplier": 5.0, "max_epsilon": 1.2},
        },
        "(privacy.max_epsilon), and would stop there again",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_depends_on_the_number_of_rounds_is_refused(case: str, tmp_path: Path) -> None:
    sections, says = REFUSED[case]
    folder = tmp_path / "run"
    pf.run(recipe(3, **sections), out=folder)
    before = content(folder)
    with pytest.raises(ConfigError) as refused:
        pf.run(recipe(5, **sections), out=folder, resume=True)
    assert str(refused.value).startswith(f"{folder} cannot go on from 3 to 5 rounds: ")
    assert says in str(refused.value)
    assert content(folder) == before
    with pytest.raises(ConfigError, match="cannot go on"):
        pf.compare(recipe(5, **sections), [recipe(5, **sections).method.name], out=_as_member(folder, tmp_path))


def _as_member(folder: Path, tmp_path: Path) -> Path:
    method = Recipe.of_run(folder).method.name
    shutil.copytree(folder, tmp_path / "all" / method / "seed-0")
    return tmp_path / "all"


def test_what_a_method_plans_is_its_own_word() -> None:
    assert (FedKD().planned, FedKD(energy_start=0.9, energy_end=0.9).planned) == ("the energy that is sent", "")
    assert ScaleFL().planned == "when early exits begin to learn from the last one"
    assert why_not_longer({"training": {"rounds": 5, "lr_schedule": "exponential"}}, None, "") is None


def test_a_final_round_that_gave_something_away_is_not_taken_back(tmp_path: Path) -> None:
    noisy = {**FINAL, "privacy": {"max_grad_norm": 1.0, "noise_multiplier": 5.0}}
    pytest.importorskip("opacus")
    pf.run(recipe(2, **noisy), out=tmp_path / "run")
    before = content(tmp_path / "run")
    with pytest.raises(ConfigError, match="its final round has given away what counts in epsilon"):
        pf.run(recipe(3, **noisy), out=tmp_path / "run", resume=True)
    assert content(tmp_path / "run") == before


@pytest.mark.parametrize("gone", ["all", "the last regular one"])
def test_without_a_checkpoint_nothing_begins_anew(gone: str, tmp_path: Path, finished: Finished) -> None:
    folder = tmp_path / "run"
    finished.copy(folder, 3, **FINAL)
    before = {path.name: path.read_bytes() for path in folder.glob("*.*")}
    for written in (folder / "checkpoint").iterdir():
        if gone == "all" or written.name == "round-000003":
            shutil.rmtree(written)
    with pytest.raises(ConfigError, match="expected "):
        pf.run(recipe(5, **FINAL), out=folder, resume=True)
    assert {path.name: path.read_bytes() for path in folder.glob("*.*")} == before
    assert pf.run(recipe(3, **FINAL), out=folder, resume=True).result["rounds"] == 3


def test_fewer_rounds_and_other_settings_are_still_another_run(tmp_path: Path, finished: Finished) -> None:
    finished.copy(tmp_path / "run", 3)
    for other, says in (
        (recipe(2), "training.rounds was 3, now 2"),
        (recipe(5, training={"lr": 0.1}), "training.lr was 0.05, now 0.1"),
    ):
        with pytest.raises(ConfigError, match=says):
            pf.run(other, out=tmp_path / "run", resume=True)
