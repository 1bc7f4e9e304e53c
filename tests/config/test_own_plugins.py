"""A plugin of the user's own: by name in a recipe, in worker processes, after a resumption; and what is refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf
from polyfed import registry
from tests.helpers.refusals import refusal

SOURCE = """
from typing import ClassVar

import torch
import polyfed as pf
from polyfed.core.message import flatten
from polyfed.core.method import hyperparameters
from polyfed.core.settings import Settings


class Scale(Settings):
    factor: float = 1.0


class Scaled(pf.Plugin):
    name = "scaled"
    settings_class = Scale

    def encode(self, upload, client, method, received):
        factor = self.settings.factor
        return {
            entry: {name: t * factor if t.is_floating_point() else t for name, t in value.items()}
            if not isinstance(value, torch.Tensor)
            else value
            for entry, value in upload.items()
        }

    def record(self, round):
        return {"factor": self.settings.factor, "asked": sorted(round.asked)}


class Plain(pf.Plugin):
    name = "plain"


class Nameless(pf.Plugin):
    pass


class Counted(pf.Plugin):
    name = "counted"
    built = 0

    def __init__(self):
        super().__init__()
        Counted.built += 1


@hyperparameters
class CountedMethod(pf.methods.FedAvg):
    built: ClassVar[int] = 0

    def __post_init__(self):
        CountedMethod.built += 1
"""
RECIPE = """
[data]
dataset = "digits"
num_clients = 3
limit_train = 90
[models]
architectures = ["digits-cnn1"]
[method]
name = "fedavg"
[training]
rounds = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The present folder, with a module of plugins."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(registry, "added_folders", [])
    (tmp_path / "my_plugins.py").write_text(SOURCE)
    yield tmp_path
    sys.modules.pop("my_plugins", None)


def recipe(**settings: Any) -> Path:
    """A recipe with one plugin."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    path = Path("mine.toml")
    path.write_text(f"{RECIPE}\n[[plugins]]\n" + "\n".join(lines) + "\n")
    return path


def values(run: Any) -> list[Any]:
    return [(r["train_loss"], r["accuracy"], r.get("plugins")) for r in run.history]


def test_it_acts_and_is_recorded_alike_by_all_executors() -> None:
    scaled = recipe(name="my_plugins:Scaled", factor=0.5)
    serial = pf.run(pf.Recipe.load(scaled, executor="serial"), out="serial")
    pooled = pf.run(pf.Recipe.load(scaled, executor="processes", workers=2), out="pooled")
    assert values(serial) == values(pooled)
    assert serial.history[0]["plugins"] == {"scaled": {"factor": 0.5, "asked": [0, 1, 2]}}
    once = pf.run(pf.Recipe.load(recipe(name="my_plugins:Scaled"), executor="serial"), out="once")
    assert serial.history[1]["train_loss"] != once.history[1]["train_loss"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "scaled"}, "cannot import plugin 'scaled'; expected 'package.module:name'"),
        ({"name": "my_plugins:flatten"}, "expected a class that extends polyfed.Plugin"),
        ({"name": "my_plugins:Nameless"}, "expected a name of its own"),
        ({"name": "my_plugins:Plain", "factor": 2.0}, "expected no settings"),
        ({"name": "my_plugins:Scaled", "factor": "much"}, "factor: expected a number"),
        ({"factor": 2.0}, "plugins: expected name = "),
    ],
)
def test_what_cannot_be_is_one_line(settings: dict[str, Any], said: str) -> None:
    assert re.search(said, refusal(lambda: pf.Recipe.load(recipe(**settings))))


def test_a_run_builds_its_plugins_and_its_method_once() -> None:
    chosen = pf.Recipe.load(recipe(name="my_plugins:Counted"), method="my_plugins:CountedMethod", executor="serial")
    mine = sys.modules["my_plugins"]
    assert (mine.Counted.built, mine.CountedMethod.built) == (0, 1)
    pf.run(chosen, out="first")
    assert (mine.Counted.built, mine.CountedMethod.built) == (1, 1)
    pf.run(chosen, out="second")
    assert (mine.Counted.built, mine.CountedMethod.built) == (2, 1), "a plugin may change in a run, a method may not"
