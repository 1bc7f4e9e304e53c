"""Recipes, models' entries and sweeps as they are read from folders."""

from __future__ import annotations

from typing import Any

import pytest

from polyfed.results.fields import validated
from polyfed.results.stored_files import StoredRecipe, check_nodes_entry

ENTRY = {
    "architecture": "digits-cnn1", "classes": 10, "class_names": ["0"], "feature_names": [], "vocabulary": None,
    "texts": None, "vectors": None, "samples": 4, "zoo": True, "feature_dim": None, "auxiliary_model": None,
    "input": {"shape": [1, 8, 8], "type": "uint8"}, "prepare": {"mean": [0.5], "std": [1.0]}, "method": "local",
    "hyperparameters": {}, "variant": "", "round": 2,
}  # fmt: skip


def test_a_section_stays_as_it_is_written() -> None:
    training = {"lr": 0.1, "rounds": 5, "own": [1, 2]}
    recipe = validated(StoredRecipe, {"training": training, "method": {"name": "fedgh", "header_lr": 1}, "new": {}})
    assert list(recipe.training.items()) == list(training.items())
    assert (recipe.rounds, recipe.method_name, recipe.architectures) == (5, "fedgh", ())
    assert recipe.section("training") is recipe.training
    assert not recipe.is_empty


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"training": {"rounds": 1.5}}, "'training.rounds': expected a whole number, got 1.5"),
        ({"models": {"architectures": ["a", 1]}}, "'models.architectures[1]': expected a text, got 1"),
        ({"method": {"name": ["x"]}}, "'method.name': expected a text, got ['x']"),
        ({"privacy": 5}, "'privacy': expected an object, got 5"),
        ({"run": {"paper_tables": "x"}}, "'run.paper_tables': expected a list, got 'x'"),
    ],
)
def test_a_recipe_of_wrong_types_is_told(found: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole line is compared)
        validated(StoredRecipe, found)
    assert str(caught.value) == says


def test_the_entry_of_a_nodes_model_is_whole() -> None:
    check_nodes_entry(ENTRY)
    check_nodes_entry({**ENTRY, "prepare": "plain"})
    for key in ENTRY.keys() - {"prepare"}:
        with pytest.raises(ValueError, match=f"expected the key '{key}', got none"):
            check_nodes_entry({name: value for name, value in ENTRY.items() if name != key})
    with pytest.raises(ValueError, match=r"'prepare\.mean': expected a list, got 'a'"):
        check_nodes_entry({**ENTRY, "prepare": {"mean": "a", "std": [1.0]}})
