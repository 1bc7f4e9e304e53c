"""Recipes, models' entries and sweeps as they are read from folders."""

from __future__ import annotations

from typing import Any

import pytest

from polyfed.records.fields import validated
from polyfed.records.stored_files import StoredRecipe


def test_a_section_stays_as_it_is_written() -> None:
    training = {"lr": 0.1, "rounds": 5, "own": [1, 2]}
    recipe = validated(StoredRecipe, {"training": training, "method": {"name": "fedgh", "header_lr": 1}, "new": {}})
    assert list(recipe.training.items()) == list(training.items())
    assert (recipe.rounds, recipe.method_name) == (5, "fedgh")
    assert not recipe.is_empty


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"training": {"rounds": 1.5}}, "'training.rounds': expected a whole number, got 1.5"),
        ({"method": {"name": ["x"]}}, "'method.name': expected a text, got ['x']"),
        ({"privacy": 5}, "'privacy': expected an object, got 5"),
        ({"run": {"paper_tables": "x"}}, "'run.paper_tables': expected a list, got 'x'"),
    ],
)
def test_a_recipe_of_wrong_types_is_told(found: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole line is compared)
        validated(StoredRecipe, found)
    assert str(caught.value) == says
