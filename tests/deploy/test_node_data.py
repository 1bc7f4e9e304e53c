"""Whose rows are a node's: what a deployment cannot do with rows of its own is one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from polyfed.config.recipe import Recipe
from polyfed.data.samples import ClientData, LabeledSamples
from polyfed.deploy.node_config import NodeConfig, data_of_node, renumbered
from polyfed.errors import ConfigError
from tests.helpers.nearby import DATA, recipe_of


def place(folder: Path, **more: object) -> NodeConfig:
    return NodeConfig.read({"client-id": 0, "state-dir": str(folder / "state"), **more})


def table(folder: Path, columns: str, rows: Sequence[str]) -> str:
    """A table in a file, and its name as a data set."""
    (folder / "rows.csv").write_text("\n".join([columns, *rows]) + "\n")
    return f"csv:{folder / 'rows.csv'}"


def numbers(folder: Path) -> str:
    return table(folder, "age,ward,cost", [f"{20 + row},{'ab'[row % 2]},{row / 4}" for row in range(40)])


def of_table(dataset: str, **data: object) -> Recipe:
    return Recipe.from_dict(
        {
            "data": {"dataset": dataset, "num_clients": 2, "partition": "iid", **data},
            "models": {"architectures": ["mlp-16-32"]},
            "method": {"name": "local"},
            "training": {"rounds": 1},
        }
    )


def test_numbers_to_predict_are_refused(tmp_path: Path) -> None:
    recipe = of_table(numbers(tmp_path), label_column="cost", task="regression")
    with pytest.raises(ConfigError, match="deployment: expected classes as labels, got numbers to predict"):
        data_of_node(recipe, place(tmp_path), DATA)


def test_label_spaces_of_their_own_are_refused(tmp_path: Path) -> None:
    recipe = recipe_of(data={"label_space": "own"})
    with pytest.raises(ConfigError, match=r"deployment: expected one label space, got data\.label_space"):
        data_of_node(recipe, place(tmp_path), DATA)


def test_categories_of_ones_own_rows_would_be_numbered_otherwise(tmp_path: Path) -> None:
    own = numbers(tmp_path)
    recipe = of_table(own, label_column="ward", category_columns=["cost"])
    with pytest.raises(ConfigError, match=r"expected the recipe's data with data\.category_columns, as all must"):
        data_of_node(recipe, place(tmp_path, data=own), DATA)


def test_a_client_of_no_recipe_is_refused(tmp_path: Path) -> None:
    wrong = NodeConfig.read({"client-id": 3, "state-dir": str(tmp_path)})
    with pytest.raises(ConfigError, match="expected a client-id below 3, got 3"):
        data_of_node(recipe_of(), wrong, DATA)


def test_classes_are_numbered_as_the_task_has_them() -> None:
    rows = LabeledSamples(torch.zeros(4, 2), torch.tensor([0, 1, 1, 0]))
    found = renumbered(ClientData(rows, rows, rows), ["cat", "owl"], ["ant", "owl", "cat"])
    assert [part.y.tolist() for part in (found.train, found.validation, found.test)] == [[2, 1, 1, 2]] * 3
    with pytest.raises(ConfigError, match="expected the classes ant, owl, got 'cat' in this node's data"):
        renumbered(ClientData(rows, rows, rows), ["cat", "owl"], ["ant", "owl"])
