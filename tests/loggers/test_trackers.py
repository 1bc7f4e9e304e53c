"""MLflow and Weights & Biases: what they are given, that a resumed run goes on there, and that they end no run.

Each test runs with a stand-in of what is called of the package, one with MLflow itself where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from polyfed.errors import RunInterrupted
from polyfed.loggers.mlflow import _DEFAULTS
from polyfed.registry import LOGGERS
from polyfed.report.run_records import load_runs
from tests.helpers.interrupt import Interrupt
from tests.loggers.test_tensorboard import federation

ENVIRONMENT = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_PROJECT")


class Shown:
    """What a tracker has of a run."""

    def __init__(self) -> None:
        self.parameters: dict[str, str] = {}
        self.points: dict[str, list[tuple[int, float]]] = {}
        self.is_done: bool | None = None
        self.name = ""

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.points.setdefault(name, []).append((step, value))


class StandIn:
    """What is called of MLflow and of Weights & Biases.

    Attributes:
        shown: the last run, of the id "id". asked: where runs were to be kept. broken: whether adding points fails.
    """

    def __init__(self) -> None:
        self.shown = Shown()
        self.asked: list[str] = []
        self.broken = False

    def modules(self) -> dict[str, dict[str, Any]]:
        return {
            "mlflow": {"MlflowClient": self.client},
            "mlflow.entities": {"Param": lambda *what: what, "Metric": lambda *what: what},
            "mlflow.exceptions": {"MlflowException": KeyError},
            "wandb": {"init": self.init, "Settings": dict},
        }

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        if self.broken:
            raise OSError("nobody\nanswers at http://ana:secret@host")
        self.shown.add(step, values)

    def done(self, is_done: bool | None) -> None:
        self.shown.is_done = is_done

    def begin(self, name: str = "") -> Any:
        self.shown = Shown()
        self.shown.name = name
        return self.run("id")

    def run(self, known: str) -> Any:
        return MagicMock(**{"info.run_id": {"id": "id"}[known], "data.params": self.shown.parameters})

    def client(self, address: str) -> Any:
        def log_batch(run: str, metrics: Any = (), params: Any = ()) -> None:
            self.shown.parameters |= dict(params)
            for name, value, _, step in metrics:
                self.add(step, {name: value})

        self.asked.append(address)
        client = MagicMock(get_run=self.run, log_batch=log_batch)
        client.create_run = lambda experiment, run_name, tags: self.begin(run_name)
        client.get_metric_history = lambda run, name: [Mock(step=step) for step, _ in self.shown.points.get(name, ())]
        client.update_run = lambda run, status: self.done(None)
        client.set_terminated = lambda run, status: self.done(status == "FINISHED")
        return client

    def init(self, id: str | None, mode: str, dir: str, config: dict[str, str], **_: Any) -> Any:
        self.asked.append(mode)
        self.begin()  # offline also where the id is known
        self.shown.parameters = config
        logs = Path(dir, "wandb", f"offline-run-{len(self.asked)}-id")
        logs.mkdir(parents=True)
        (logs / "debug-core.log").symlink_to("/dev/null")
        run = MagicMock(id="id", starting_step=0)
        run.log = lambda values, step: self.add(step, values)
        run.finish = lambda exit_code: self.done(exit_code == 0)
        return run


def of_mlflow(folder: Path) -> Shown:
    """The run in MLflow's database."""
    from mlflow import MlflowClient

    client, shown = MlflowClient(f"sqlite:///{folder}/mlflow/mlflow.db"), Shown()
    found = client.search_runs([client.get_experiment_by_name("polyfed").experiment_id])
    assert [run.info.run_id for run in found] == [(folder / "mlflow" / "run_id").read_text()]
    shown.parameters = found[0].data.params
    for name in found[0].data.metrics:
        for point in client.get_metric_history(found[0].info.run_id, name):
            shown.add(point.step, {name: point.value})
    shown.is_done = {"FINISHED": True, "KILLED": False}[found[0].info.status]
    return shown


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    for variable in (*ENVIRONMENT, *_DEFAULTS, "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)  # and what a test sets of it goes again
    made = StandIn()
    for name, inside in made.modules().items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, origin="here")
        vars(module).update(inside)
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.mark.parametrize(("name", "kind"), [("mlflow", "stand-in"), ("mlflow", "package"), ("wandb", "stand-in")])
def test_a_resumed_run_is_one_run_that_has_every_round_once(
    name: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "package" and importlib.util.find_spec(name) is None:
        pytest.skip(f"the package {name} is not installed")
    stand_in = request.getfixturevalue("stand_in") if kind == "stand-in" else None
    for variable in ENVIRONMENT:
        monkeypatch.delenv(variable, raising=False)
    out = tmp_path / "run"

    def shown() -> Shown:
        return of_mlflow(out) if stand_in is None else stand_in.shown

    with pytest.raises(RunInterrupted):
        federation(out, LOGGERS[name](), Interrupt(3)).run()
    assert shown().is_done is False
    assert [step for step, _ in shown().points["train_loss"]] == [1, 2, 3]
    for part in (out / "checkpoint" / "round-000003").iterdir():  # a power cut leaves the one of round 2
        part.unlink()
    (out / "checkpoint" / "round-000003").rmdir()
    result = federation(out, LOGGERS[name]()).run(resume=True).result

    found = shown()
    records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert found.points["train_loss"] == [(record["round"], record["train_loss"]) for record in records]
    assert found.points["accuracy/received/mean"][-1] == (5, records[-1]["accuracy"]["received"]["mean"])
    assert found.points["bytes_up"][-1] == (5, records[-1]["bytes_up"])
    assert found.points["result/accuracy"] == [(5, result["accuracy"])]
    assert found.points["result/f1"] == [(5, result["metrics"]["received"]["f1"]["mean"])]
    assert found.parameters["training.rounds"] == "5"
    assert found.parameters["method.name"] == "fedavg"
    assert found.is_done is True
    assert load_runs([out])[0].result is not None  # though Weights & Biases makes links in its own folder


def test_runs_of_a_sweep_are_told_apart_by_their_settings(tmp_path: Path, stand_in: StandIn) -> None:
    federation(tmp_path / "lr=0.1" / "seed-0", LOGGERS["mlflow"]()).run()
    assert stand_in.shown.name == "fedavg lr=0.1 seed 0"


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_tracker_that_fails_says_so_once_and_gets_what_it_has_missed(
    name: str, tmp_path: Path, stand_in: StandIn
) -> None:
    def breaks(record: Any) -> None:
        stand_in.broken = record["round"] in (2, 3)

    said = rf"^{name} has failed, the run goes on without it: nobody answers at http://\*\*\*@host$"
    with pytest.warns(UserWarning, match=said) as told:
        federation(tmp_path / "run", breaks, LOGGERS[name]()).run()
    assert len(told) == 1
    assert [step for step, _ in stand_in.shown.points["train_loss"]] == [1, 2, 3, 4, 5]
    assert stand_in.shown.is_done is True

    stand_in.broken = True
    with pytest.warns(UserWarning, match="has failed") as told:
        result = federation(tmp_path / "other", LOGGERS[name]()).run().result
    assert len(told) == 1
    assert result["accuracy"] == federation(tmp_path / "plain").run().result["accuracy"]


@pytest.mark.parametrize(
    ("name", "variable", "value"),
    [("mlflow", "MLFLOW_TRACKING_URI", "http://there"), ("wandb", "WANDB_MODE", "online")],
)
def test_nothing_leaves_the_run_folder_unasked(
    name: str, variable: str, value: str, tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation(tmp_path / "run", LOGGERS[name]()).run()
    monkeypatch.setenv(variable, value)
    federation(tmp_path / "other", LOGGERS[name]()).run()
    here = {"mlflow": f"sqlite:///{tmp_path}/run/mlflow/mlflow.db", "wandb": "offline"}
    assert stand_in.asked == [here[name], value]
    federation(tmp_path / "run").run(overwrite=True)
    assert not (tmp_path / "run" / name).exists()


def test_of_another_folder_nothing_is_removed(tmp_path: Path, stand_in: StandIn) -> None:
    place = tmp_path / "run" / "wandb"
    with pytest.raises(RunInterrupted):
        federation(tmp_path / "run", Interrupt(3)).run()
    (place / "offline-run-1-x").mkdir(parents=True)
    (place / "run_id").write_text("x/../../../elsewhere")
    (tmp_path / "elsewhere").mkdir()
    federation(tmp_path / "run", LOGGERS["wandb"]()).run(resume=True)
    assert (tmp_path / "elsewhere").exists()
    assert (place / "run_id").read_text() == "id"
