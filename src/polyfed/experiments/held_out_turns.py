"""Every group held out of training in turn: what `polyfed compare` runs with ``evaluation.held_out = "each group"``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from polyfed.config.recipe import Recipe
from polyfed.core.settings import EACH_GROUP
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache
from polyfed.experiments.planned_runs import PlannedRun

__all__ = ["plan_turns"]

_KEY = f"evaluation.held_out = '{EACH_GROUP}'"
_FEWEST = 3  # one that is held out, and two that train together


def plan_turns(recipes: Iterable[Recipe], seeds: Sequence[int], folder: Path, data: DataCache) -> list[PlannedRun]:
    """All runs, seed by seed and group by group.

    Args:
        recipes: what is compared. folder: where runs lie. data: kept between calls.

    Raises:
        ConfigError: rows are not dealt by group, a client has several groups, or there are too few.
    """
    chosen = list(recipes)
    folders = _folders(_groups_of(chosen[0], data))
    return [
        PlannedRun(
            f"{recipe.name} without {group}",
            _without(recipe, group).with_run(seed=seed, out=None),
            folder / place / recipe.name / f"seed-{seed}",
        )
        for seed in seeds
        for group, place in folders.items()
        for recipe in chosen
    ]


def _groups_of(recipe: Recipe, data: DataCache) -> list[str]:
    """The groups, each of which is a client of its own."""
    groups = data.federated(recipe).groups
    if not groups:
        raise ConfigError(
            f"{_KEY}: expected data.partition 'by_group', whose values of data.group_by are the groups, got "
            f"'{recipe.data.partition}'"
        )
    shared = next((held for held in groups if len(held) > 1), None)
    if shared is not None:
        raise ConfigError(
            f"{_KEY}: expected a client for every group, got one with {len(shared)}; leave out data.num_clients"
        )
    if len(groups) < _FEWEST:
        raise ConfigError(f"{_KEY}: expected {_FEWEST} groups or more, got {len(groups)}")
    return [name for held in groups for name in held]


def _without(recipe: Recipe, group: str) -> Recipe:
    evaluation = recipe.evaluation.model_copy(update={"held_out": [group]})
    return recipe.model_copy(update={"evaluation": evaluation})


def _folders(groups: Sequence[str]) -> dict[str, str]:
    """Each group's folder; no two alike."""
    found: dict[str, str] = {}
    for number, group in enumerate(groups):
        plain = re.sub(r"[^A-Za-z0-9_.+=-]+", "-", group).strip("-.")
        taken = {name.lower() for name in found.values()}  # some file systems tell no case apart
        found[group] = f"{plain}-{number}".strip("-") if plain.lower() in {*taken, ""} else plain
    return found
