"""Whether stored figures of a benchmark are those of a recipe and a method, as they are now.

Figures keep what they were made with (`polyfed.report.benchmark_results`). A key that has come into the library since
counts as its default, so that figures outlive it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polyfed.config.recipe import Recipe
from polyfed.errors import ConfigError
from polyfed.report.benchmark_results import RowResult
from polyfed.results.read import flat_table

__all__ = ["as_json", "described", "first_difference", "has_hyperparameters", "hyperparameters_of"]

_LOCAL = "local"


def first_difference(stored: Mapping[str, Any], recipe: Recipe) -> tuple[str, Any, Any] | None:
    """The first key in which a stored recipe is another than this one: its name, the stored value and this one's."""
    here = flat_table(described(recipe))
    there = flat_table(stored)
    for key, value in there.items():  # first, so that nothing is resolved, or imported, that the recipe does not name
        if here.get(key) != value:
            return key, value, here.get(key)
    if here.keys() - there.keys():
        there = flat_table(_with_new_defaults(stored, recipe))
    for key, value in here.items():
        if there.get(key) != value:
            return key, there.get(key), value
    return None


def described(recipe: Recipe) -> dict[str, Any]:
    """A recipe as figures keep it: resolved, without method, run and the place of data."""
    found = recipe.choose(_LOCAL).to_dict()
    found["data"].pop("root", None)
    kept: dict[str, Any] = as_json({name: table for name, table in found.items() if name not in ("method", "run")})
    return kept


def _with_new_defaults(stored: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """A stored recipe with the keys that have come since, which have their defaults."""
    try:
        return described(Recipe.from_dict({**stored, "method": {"name": _LOCAL}}, beside=recipe.beside))
    except ConfigError:
        return dict(stored)


def hyperparameters_of(row: Recipe) -> dict[str, Any]:
    """All hyperparameters of a row's method, as figures keep them."""
    found: dict[str, Any] = as_json(row.to_dict()["method"])
    del found["name"]
    return found


def has_hyperparameters(stored: RowResult, row: Recipe, training: Mapping[str, Any]) -> bool:
    """Whether a stored row was made with these; those that have come since count as their defaults.

    Args:
        training: settings of [training] that were chosen for the row, by their whole keys.
    """
    now = flat_table(hyperparameters_of(row)) | as_json(training)
    then = flat_table(stored.hyperparameters)
    if stored.method != row.method.name or then.keys() - now.keys():
        return False
    if now.keys() - then.keys():
        then = flat_table(_default_hyperparameters(row)) | then
    return all(then.get(key) == value for key, value in now.items())


def _default_hyperparameters(row: Recipe) -> dict[str, Any]:
    """Those that a method has where a recipe names none; empty where it needs some."""
    try:
        plain = {**described(row), "method": {"name": row.method.name}}
        return hyperparameters_of(Recipe.from_dict(plain, beside=row.beside))
    except ConfigError:
        return {}


def as_json(value: Any) -> Any:
    """A value as a JSON file gives it back."""
    return json.loads(json.dumps(value))
