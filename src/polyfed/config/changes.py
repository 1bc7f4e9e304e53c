"""What is changed of a recipe's settings takes along what the recipe said of the old value."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.config.schema import SECTIONS
from polyfed.registry import METHODS
from polyfed.results.read import flat_table
from polyfed.validation.effect import idle
from polyfed.validation.hyperparameters import flat_fields

__all__ = ["drop_idle", "join", "merge"]


def drop_idle(settings: dict[str, Any], changed: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """The settings without what lost its effect by what was laid over them.

    ``--set data.partition=iid`` takes a recipe's ``dirichlet_alpha`` away, which was said of its own
    partition; one that was itself laid over them stays, to be refused.

    Args:
        settings: with the changes in them. changed: the dotted keys that were laid over them.
    """
    settings = copy.deepcopy(settings)
    for place in dict.fromkeys(map(_home, changed)):
        fields = _fields_at(settings, place)
        tables = _tables_at(settings, place)
        keys = {".".join(path[len(place) :]) for path in changed if path[: len(place)] == place}
        values = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
        for table in tables:
            given = flat_table(table)
            values |= {name: given[name] for name in fields if name in given}
        for name, needed in idle(fields, values).items():
            if needed.key in keys and name not in keys:
                for table in tables:
                    _drop(table, name.split("."))
    return settings


def _home(path: tuple[str, ...]) -> tuple[str, ...]:
    """The section that a dotted key is of, or the table of a method's variant."""
    return path[:2] if path[0] == "methods" else path[:1]


def _drop(table: dict[str, Any], keys: Sequence[str]) -> None:
    """Leave out what a dotted key stands for, and a table that is empty without it."""
    first = keys[0]
    if len(keys) == 1 or not isinstance(table.get(first), dict):
        table.pop(first, None)
        return
    _drop(table[first], keys[1:])
    if not table[first]:
        del table[first]


def _tables_at(settings: Mapping[str, Any], place: tuple[str, ...]) -> list[dict[str, Any]]:
    """The tables that hold the keys of a place, the one that counts more behind; a method's hyperparameters may lie in
    two.
    """
    places = [place]
    method = settings.get("method")
    if place == ("method",) and isinstance(method, Mapping):
        places = [("methods", str(method.get("name"))), place]
    found = []
    for path in places:
        table: Any = settings
        for key in path:
            table = table.get(key) if isinstance(table, Mapping) else None
        if isinstance(table, dict):
            found.append(table)
    return found


def _fields_at(settings: Mapping[str, Any], place: tuple[str, ...]) -> Mapping[str, Any]:
    """The settings that a place may hold: of a section, or of a registered method; none where it is neither."""
    if len(place) == 1 and place[0] in SECTIONS:
        return SECTIONS[place[0]].model_fields
    if place != ("method",) and place[:1] != ("methods",):
        return {}
    name = place[-1]
    for table in _tables_at(settings, place)[::-1]:
        name = str(table.get("name", name))
    return flat_fields(METHODS[name]) if name in METHODS else {}


def merge(settings: Mapping[str, Any], more: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    merged = dict(settings)
    for section, values in more.items():
        own = merged.get(section, {})
        merged[section] = {**own, **values} if isinstance(own, Mapping) else own
    return merged


def join(own: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Both tables as one, key by key, those in them likewise; what `more` says counts."""
    joined = dict(own)
    for key, value in more.items():
        before = joined.get(key)
        both_tables = isinstance(before, Mapping) and isinstance(value, Mapping)
        joined[key] = join(before, value) if both_tables else value  # type: ignore[arg-type]
    return joined
