"""Settings that were given and do nothing: one line, in recipes, by ``--set``, in presets and in Python alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.methods import FedHeNN, FedIN
from polyfed.registry import METHODS
from tests.helpers.refusals import refusal

HYPERPARAMETERS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (
        FedIN,
        {"num_pairs": 3, "exchange_features": False},
        "num_pairs = 3 does nothing beside exchange_features = false; set exchange_features to true",
    ),
    (FedHeNN, {"kernel": {"width": 2.0}}, "width = 2.0 does nothing beside similarity = 'linear'; set"),
]


def recipe(**sections: dict[str, Any]) -> Recipe:
    whole: dict[str, dict[str, Any]] = {
        "data": {"dataset": "digits"},
        "models": {"architectures": ["digits-cnn1"]},
        "method": {"name": "local"},
    }
    return Recipe.from_dict({**whole, **{name: {**whole.get(name, {}), **keys} for name, keys in sections.items()}})


@pytest.mark.parametrize(("kind", "hyperparameters", "said"), HYPERPARAMETERS)
def test_a_hyperparameter_that_does_nothing(kind: Any, hyperparameters: dict[str, Any], said: str) -> None:
    table = ".kernel" if said.startswith("width") else ""  # said of the table alone
    assert refusal(lambda: kind(**hyperparameters)).startswith(f"{kind.name}{table}: {said}")
    spelled = {name.rstrip("_"): value for name, value in hyperparameters.items()}
    assert refusal(lambda: recipe(method={"name": kind.name, **spelled})).startswith(f"method{table}: {said}")


def test_what_was_switched_off_on_purpose_takes_its_own_with_it() -> None:
    assert pf.Availability(dropout_rate=0.0, dropout_stage="after").effective() == {}
    assert pf.Adversaries(sign_flip_fraction=0.0, attack_scale=3.0).effective() == {}
    FedIN(noise_level=0.0, noise_where="message")


def test_a_resolved_recipe_reads_again() -> None:
    off = recipe(
        availability={"dropout_rate": 0.0, "dropout_stage": "after"},
        adversaries={"sign_flip_fraction": 0.0, "attack_scale": 3.0},
    )
    assert Recipe.from_dict(off.to_dict()).to_dict() == off.to_dict()
    for kind in METHODS.values():
        resolved = recipe(method={"name": kind.name}).to_dict()
        assert Recipe.from_dict(resolved).to_dict() == resolved


TEXT = """
[data]
dataset = "digits"
partition = "dirichlet"
dirichlet_alpha = 0.1

[models]
architectures = ["digits-cnn1"]

[method]
name = "fedin"
noise_level = 0.8
noise_where = "message"

[methods.fedin]
projection = "fixed"
projection_grid = 2

[methods.fedhenn.kernel]
similarity = "rbf"
width = 2.0

[presets.alike.data]
partition = "iid"

[presets.wrong.data]
partition = "iid"
min_samples = 5
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(TEXT.partition("[presets.wrong")[0])
    return file


def test_what_is_laid_over_takes_along_what_was_said_of_the_old_value(path: Path) -> None:
    assert Recipe.load(path).data.dirichlet_alpha == 0.1
    for laid in (Recipe.load(path, ["data.partition=iid"]), Recipe.load(path, preset="alike")):
        assert (laid.data.partition, laid.data.dirichlet_alpha) == ("iid", 0.5)
    assert Recipe.load(path, ["method.noise_level=0"]).chosen_method == FedIN(projection="fixed", projection_grid=2)
    assert Recipe.load(path, ["method.projection=none"]).chosen_method == FedIN(noise_level=0.8, noise_where="message")
    assert Recipe.load(path, ["method.kernel.similarity=linear"], method="fedhenn").chosen_method == FedHeNN()
    # where noise on features is added and their projection go with them, and with the projection its size
    without = FedIN(exchange_features=False, noise_level=0.8)
    assert Recipe.load(path, ["method.exchange_features=false"]).chosen_method == without
    assert path.read_text() == TEXT.partition("[presets.wrong")[0]


def test_what_was_itself_laid_over_is_told(path: Path) -> None:
    said = refusal(lambda: Recipe.load(path, ["data.partition=iid", "data.dirichlet_alpha=0.2"]))
    assert said == (
        "data: dirichlet_alpha = 0.2 does nothing beside partition = 'iid'; set partition to 'dirichlet', "
        "or leave dirichlet_alpha at 0.5"
    )
    assert refusal(lambda: Recipe.load(path, ["data.classes_per_client=3"])).startswith("data: classes_per_client = 3")
    path.write_text(TEXT)
    assert refusal(lambda: Recipe.load(path, preset="wrong")).startswith("data: min_samples = 5 does nothing beside")
