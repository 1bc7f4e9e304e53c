"""A data set that a function of one's own returns, by its name in a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import polyfed as pf
from polyfed.data.datasets import from_tensors, load_dataset
from polyfed.errors import ConfigError

X, Y = torch.rand(40, 5), torch.arange(40) % 4
MODELS = {"models": {"architectures": ["mlp-64-32", "mlp-64-64-32"]}, "method": {"name": "local"}}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_data", sys.modules[__name__])


def pair() -> Any:
    return X, Y


def arrays() -> Any:
    return [X.double().numpy(), Y.numpy().astype(np.int32)]


def items() -> Any:
    return TensorDataset(X, Y)


def sides() -> Any:
    return {"train": (X[:30], Y[:30]), "test": TensorDataset(X[30:], Y[30:])}


def source() -> Any:
    return from_tensors((X, Y), name="mine", train_columns={"user": np.arange(40) % 5})


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    side = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()}).with_format("torch")
    return datasets.DatasetDict(train=side.select(range(30)), test=side.select(range(30, 40)))


@pytest.mark.parametrize("name", ["pair", "arrays", "items", "source"])
def test_every_training_side_is_the_same(name: str) -> None:
    found = load_dataset(f"own_data:{name}")
    assert torch.equal(found.train.x, X)
    assert torch.equal(found.train.y, Y)
    assert found.test is None
    assert found.name == ("mine" if name == "source" else f"own_data:{name}")


@pytest.mark.parametrize("name", ["sides", "hugging_face"])
def test_both_sides(name: str) -> None:
    found = load_dataset(f"own_data:{name}")
    assert torch.equal(found.train.x, X[:30])
    assert found.test is not None
    assert torch.equal(found.test.y, Y[30:])


def test_a_recipe_runs_on_it_and_deals_by_its_columns() -> None:
    by_user = {"dataset": "own_data:source", "partition": "by_group", "group_by": "user"}
    recipe = pf.Recipe.from_dict({"data": by_user, **MODELS, "training": {"rounds": 1}})
    assert len(pf.run(recipe).result["accuracy_per_client"]) == 5
    with pytest.raises(ConfigError, match="has no column 'users'; did you mean 'user'"):
        load_dataset("own_data:source", columns=("users",))
    with pytest.raises(ConfigError, match="has no column 'user'; it has no further columns"):
        load_dataset("own_data:pair", columns=("user",))


def nothing() -> Any:
    return None


def splits() -> Any:
    return {"training": (X, Y)}


def failing() -> Any:
    raise ValueError("first line\nsecond line")


def ragged() -> Any:
    return X, Y[:3]


def masked() -> Any:
    return np.ma.masked_equal(np.arange(12.0).reshape(4, 3), 5), np.arange(4) % 2


number = 7


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_data:pairs", "cannot import data set 'own_data:pairs': AttributeError"),
        ("no.such:function", "cannot import data set 'no.such:function': ModuleNotFoundError"),
        ("imags:photos", "before a path: 'images:', 'csv:', 'clients:', 'npz:' or 'leaf:'"),
        ("own_data:number", "should be a function without arguments, got a int"),
        ("own_data:failing", "data set 'own_data:failing' failed: ValueError: first line"),
        ("own_data:masked", "expected training inputs and labels in 'own_data:masked' without masked values, got 1"),
        ("own_data:nothing", "got NoneType"),
        ("own_data:splits", "expected a dictionary of 'train' and 'test' from 'own_data:splits', got ['training']"),
        (
            "own_data:ragged",
            "expected as many labels as training inputs in 'own_data:ragged', 40, of shape (N,), got (3,)",
        ),
    ],
)
def test_refusals(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_dataset(name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", [{"label_column": "y"}, {"image_column": "x"}, {"train_splits": ["train", "more"]}])
def test_options_of_files_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"no use for|no splits"):
        load_dataset("own_data:pair", **option)
