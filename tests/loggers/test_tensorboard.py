"""Live curves: what is in the files, what a resumed run leaves of them, what happens without the package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from polyfed.cli import app as cli
from polyfed.core.client import Client
from polyfed.engine.federation import Federation
from polyfed.engine.task import Output
from polyfed.errors import RunInterrupted
from polyfed.loggers.tensorboard import TensorBoard
from polyfed.methods import FedAvg
from polyfed.testing.fixtures import SHORT, draw, tiny_model
from tests.helpers.interrupt import Interrupt
from tests.helpers.small_recipe import small_recipe

RECIPE = small_recipe(training={"rounds": 2}, evaluation={"extra_stages": ["received"]})


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> its points, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def federation(out: Path, *loggers: Any) -> Federation:
    clients = [Client("a", draw(12, (0, 1, 2), i), draw(9, (0, 1, 2), 9 + i)) for i in range(3)]
    training = SHORT.model_copy(update={"rounds": 5})
    kept, builders = Output(path=out, checkpoint_every=2), {"a": lambda: tiny_model(1, 4, 6)}
    return Federation(clients, FedAvg(), training, out=kept, builders=builders, loggers=loggers)


def test_a_resumed_run_has_the_curves_of_an_uninterrupted_one(tmp_path: Path) -> None:
    federation(tmp_path / "whole", TensorBoard()).run()
    with pytest.raises(RunInterrupted):
        federation(tmp_path / "parts", TensorBoard(), Interrupt(3)).run()
    shutil.rmtree(tmp_path / "parts" / "checkpoint" / "round-000003")  # a power cut leaves the one of round 2
    federation(tmp_path / "parts", TensorBoard()).run(resume=True)
    whole, parts = curves(tmp_path / "whole"), curves(tmp_path / "parts")
    assert [step for step, _ in parts["train_loss"]] == [1, 2, 3, 4, 5]
    assert len(list((tmp_path / "parts" / "tensorboard").glob("events*"))) == 2
    for tag in whole.keys() - {"seconds", "processor_seconds", "result/seconds"}:
        assert parts[tag] == whole[tag], tag


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_without_the_package_one_line_and_nothing_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.toml").write_text(RECIPE)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    words = [str(tmp_path / "r.toml"), "--out", str(tmp_path / "run"), "--logger", name]
    for command in ("run", "compare"):
        assert cli.status([command, *words]) == 2
        error = capsys.readouterr().err
        assert f"pip install 'polyfed[{name}]'" in error
        assert error.count("\n") == 1
        assert not (tmp_path / "run").exists()


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.toml").write_text(RECIPE)
    recipe, out = str(tmp_path / "r.toml"), tmp_path / "run"
    assert cli.status(["run", recipe, "--out", str(out), "--logger", "tensorboard", "-q"]) == 0
    seen = curves(out)
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    for stage in ("personal", "received"):
        expected = [(line["round"], line["accuracy"][stage]["mean"]) for line in lines]
        assert seen[f"accuracy/{stage}/mean"] == [(step, pytest.approx(value)) for step, value in expected]
    assert seen["bytes_up"] == [(line["round"], line["bytes_up"]) for line in lines]
    assert not [name for name in seen if "client" in name or name == "round"]
    assert cli.status(["run", recipe, "--out", str(out), "-q", "--resume"]) == 0  # with or without: the same recipe
    assert cli.status(["run", recipe, "--out", str(out), "-q", "--overwrite"]) == 0
    assert not (out / "tensorboard").exists()  # the old curves go with the old run
    capsys.readouterr()
    assert cli.status(["run", recipe, "--out", str(tmp_path / "other"), "--logger", "tensorbord"]) == 2
    names = "'tensorboard', 'mlflow' or 'wandb'"
    assert f"expected {names}, got 'tensorbord'; did you mean 'tensorboard'?" in capsys.readouterr().err


def test_every_run_of_a_sweep_has_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(small_recipe(method={"header_epochs": 2}, training={"rounds": 1}))
    words = ["--set", "method.header_lr=0.1,1", "--logger", "tensorboard", "-q", "--out", "swept"]
    assert cli.status(["sweep", "tiny.toml", *words]) == 0
    with_curves = {path.parent for path in Path("swept").rglob("tensorboard")}
    assert with_curves == {path.parent for path in Path("swept").rglob("result.json")}
    assert len(with_curves) == 2
    assert all("train_loss" in curves(folder) for folder in with_curves)
