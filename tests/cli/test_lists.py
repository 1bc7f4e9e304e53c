"""The lists of methods, models, data sets and keys of recipes."""

from __future__ import annotations

import re

import pytest
import torch

from polyfed.cli.app import status
from polyfed.core.method import Method, hyperparameters
from polyfed.data.dataset import DatasetSource, from_tensors
from polyfed.model_groups import GROUPS
from polyfed.models import SplitModel, build
from polyfed.registry import DATASETS, METHODS, MODELS


@hyperparameters
class Gentle(Method):
    """Trains gently.

    All else is here.
    """

    step: float = 0.25  # how gently


def small(in_shape: tuple[int, ...], classes: int) -> SplitModel:
    """A small network."""
    return build("digits-cnn1", in_shape, classes)


def dots(options: object) -> DatasetSource:
    """Some dots.

    Five of them.
    """
    return from_tensors(torch.zeros(5, 2), torch.zeros(5, dtype=torch.int64))


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry, name, entry in ((METHODS, "gentle", Gentle), (MODELS, "small", small), (DATASETS, "dots", dots)):
        monkeypatch.setitem(registry.entries, name, entry)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("methods", "gentle Trains gently."),
        ("methods gentle", "step number 0.25 how gently"),
        ("models", "small - -"),
        ("models small", "small - -"),
        ("datasets", "dots yes Some dots."),
    ],
)
def test_what_others_have_registered_is_listed(
    others: None, words: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert status(words.split()) == 0
    assert " ".join(line.split()) in " ".join(capsys.readouterr().out.split())


def test_every_method_is_listed_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["methods"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {METHODS.summary(name)[:20]}" in said for name in METHODS)


def test_a_name_that_is_not_known_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for words, near in (("methods fedg", "fedgh"), ("models vit-x", "vit-xs")):
        assert status(words.split()) == 2
        assert f"did you mean '{near}'?" in capsys.readouterr().err


def test_groups_of_networks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["models"]) == 0
    assert "htfe-2 (2), htfe-3 (3)" in " ".join(capsys.readouterr().out.split())
    assert status(["models", "htfe-sen-2"]) == 0
    shown = capsys.readouterr().out
    assert "sizes with inputs and 6 classes" in shown
    assert re.findall(r"^(\S+) +[\d,]+ ", shown, re.MULTILINE) == GROUPS["htfe-sen-2"]
    assert status(["models", "fedavg-cnn#512"]) == 0
    assert f"{878_538 + 512 * 513:,}" in capsys.readouterr().out
