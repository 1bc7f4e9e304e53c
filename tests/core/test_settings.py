"""Settings and hyperparameters that cannot be: Python gives the recipe's one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf
from polyfed.core.method import Method, hyperparameters
from polyfed.core.settings import Settings
from polyfed.errors import ConfigError

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.toml"
SECTIONS: list[tuple[type[Settings], dict[str, Any], str]] = [
    (pf.Training, {"roundz": 3}, "unknown key 'training.roundz'; did you mean 'rounds'?"),
    (pf.Training, {"rounds": True}, "training.rounds: expected a whole number, got true"),
    (pf.Training, {"rounds": 0, "lr": -1.0}, "training.rounds: expected at least 1, got 0 (and 1 more)"),
    (pf.Training, {"patience": 3}, "unknown key 'training.patience'; it belongs to [evaluation]"),
    (pf.Evaluation, {"metrics": "f1"}, "evaluation.metrics: expected a list, got 'f1'"),
    (pf.Privacy, {"upload_clip_norm": -1.0}, "privacy.upload_clip_norm: expected at least 0, got -1.0"),
    (pf.Devices, {"custom": {"mine": {"flops": 1.0}}}, "expected the key 'devices.custom.mine.memory_bytes'"),
    (
        pf.Devices,
        {"custom": {"gpu": {"memory_byte": 1.0}}},
        "unknown key 'devices.custom.gpu.memory_byte'; did you mean",
    ),
]


@pytest.mark.parametrize(("kind", "given", "line"), SECTIONS)
def test_python_says_of_settings_what_a_recipe_says(kind: type[Settings], given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as made:
        kind(**given)
    assert line in str(made.value)
    assert "\n" not in str(made.value)
    settings = pf.Recipe.load(RECIPE).to_dict()
    settings[kind.__name__.lower()] = given
    with pytest.raises(ConfigError) as read:
        pf.Recipe.from_dict(settings)
    assert str(read.value) == str(made.value)


def test_python_says_of_hyperparameters_what_a_recipe_says() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("FedGH", {"header_lrr": 1.0}, "unknown key 'fedgh.header_lrr'; did you mean 'header_lr'?"),
        ("FedGH", {"header_lr": -1.0}, "fedgh.header_lr: expected at least 0, got -1.0"),
    ]
    for name, given, line in cases:
        with pytest.raises(ConfigError) as made:
            getattr(pf.methods, name)(**given)
        assert line in str(made.value)
        overrides = [f"method.{key}={value}" for key, value in given.items()]
        with pytest.raises(ConfigError) as read:
            pf.Recipe.load(RECIPE, overrides, method=name.lower())
        assert str(read.value).replace("method.", f"{name.lower()}.") == str(made.value)


def test_a_method_of_ones_own_has_it_too() -> None:
    @hyperparameters
    class Own(Method):
        rate: float = 0.1

    @hyperparameters
    class Narrow(Own):
        width: int = 3

    with pytest.raises(ConfigError, match=r"unknown key 'own.rat'; did you mean 'rate'\?"):
        Own(rat=0.2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"narrow.rate: expected a number, got 'x'"):
        Narrow(rate="x", width=2)  # type: ignore[arg-type]
    assert dataclasses.replace(Narrow(rate=0.2), width=4) == Narrow(rate=0.2, width=4)


def test_what_stands_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^Training: expected each setting by its name, got 3 .* Training\(rounds="):
        pf.Training(3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^FedGH: expected each setting by its name, got 0.1 .* FedGH\(header_lr="):
        pf.methods.FedGH(0.1)  # type: ignore[call-arg]
