"""What is changed of a recipe's settings takes along what the recipe said of the old value."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.config.schema import SECTIONS
from polyfed.registry import METHODS
from polyfed.validation.effect import idle

__all__ = ["drop_idle", "merge"]


def drop_idle(settings: dict[str, Any], changed: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """The settings without what lost its effect by what was laid over them.

    ``--set data.partition=iid`` takes a recipe's ``alpha`` away, which was said of its own partition; an ``alpha`` that
    was itself laid over them stays, to be refused.

    Args:
        settings: with the changes in them. changed: the dotted keys that were laid over them.
    """
    settings = copy.deepcopy(settings)
    for place in dict.fromkeys(path[:-1] for path in changed):
        fields = _fields_at(settings, place)
        tables = _tables_at(settings, place)
        keys = {path[-1] for path in changed if path[:-1] == place}
        values = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
        for table in tables:
            values |= {name: table[name.rstrip("_")] for name in fields if name.rstrip("_") in table}
        for name, needed in idle(fields, values).items():
            if needed.key in keys and name.rstrip("_") not in keys:
                for table in tables:
                    table.pop(name.rstrip("_"), None)
    return settings


def _tables_at(settings: Mapping[str, Any], place: tuple[str, ...]) -> list[dict[str, Any]]:
    """The tables that hold the keys of a place, the one that counts more behind; a method's knobs may lie in two."""
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
    fields: Mapping[str, Any] = METHODS[name].__pydantic_fields__ if name in METHODS else {}
    return fields


def merge(settings: Mapping[str, Any], more: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    merged = dict(settings)
    for section, values in more.items():
        own = merged.get(section, {})
        merged[section] = {**own, **values} if isinstance(own, Mapping) else own
    return merged
