"""Who is held out of training, by group: one by its name, or each in turn (``evaluation.held_out = "each group"``)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from polyfed.config.recipe import Recipe
from polyfed.core.settings import EACH_GROUP, Evaluation
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache
from polyfed.registry import suggest

__all__ = ["group_folders", "with_numbers", "without"]

_KEY = f"evaluation.held_out = '{EACH_GROUP}'"
_FEWEST = 3  # one that is held out, and two that train together


def group_folders(recipe: Recipe, data: DataCache) -> dict[str, str]:
    """Each group that is held out in turn, and its folder's name; no two alike.

    Raises:
        ConfigError: rows are not partitioned by group, a client has several groups, or there are too few.
    """
    found: dict[str, str] = {}
    for number, group in enumerate(_groups_of(recipe, data)):
        plain = re.sub(r"[^A-Za-z0-9_.+=-]+", "-", group).strip("-.")
        taken = {name.lower() for name in found.values()}  # some file systems tell no case apart
        found[group] = f"{plain}-{number}".strip("-") if plain.lower() in {*taken, ""} else plain
    return found


def without(recipe: Recipe, group: str) -> Recipe:
    """The same experiment with a group held out."""
    return recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"held_out": [group]})})


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


# by name ------------------------------------------------------------------------------------------------------------


def with_numbers(evaluation: Evaluation, federated: FederatedDataset) -> Evaluation:
    """The evaluation with the numbers of the clients that hold a group that is held out.

    Raises:
        ConfigError: there is no such group, or its client has others, too.
    """
    asked = evaluation.held_out
    if isinstance(asked, int | str) or all(isinstance(value, int) for value in asked):
        return evaluation
    if not federated.groups:
        named = next(value for value in asked if isinstance(value, str))
        raise ConfigError(
            f"evaluation.held_out: expected numbers of clients, as groups have names with data.partition 'by_group' "
            f"alone, got '{named}'"
        )
    numbers = [value if isinstance(value, int) else _client_of_group(value, federated.groups) for value in asked]
    if len({*numbers}) < len(numbers):
        raise ConfigError(f"evaluation.held_out: expected every client once, got one again in {asked}")
    return evaluation.model_copy(update={"held_out": numbers})


def _client_of_group(name: str, groups: Sequence[Sequence[str]]) -> int:
    """The client that holds a group, and no other."""
    for client, held in enumerate(groups):
        if name in held and len(held) > 1:
            others = ", ".join(f"'{other}'" for other in held if other != name)
            raise ConfigError(
                f"evaluation.held_out: expected a group that is a client of its own, got '{name}', which shares client "
                f"{client} with {others:.200}; leave out data.num_clients"
            )
        if name in held:
            return client
    known = [group for held in groups for group in held]
    raise ConfigError(f"evaluation.held_out: expected a value of data.group_by, got '{name}'{suggest(name, known)}")
