"""A JSON Schema of recipes, for editors: made of the keys that `recipe_reference` lists.

A TOML table is JSON Schema's object. What only the whole recipe decides (keys that need one another, names of data sets
and networks) is left to `polyfed check`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter

from polyfed.experiments.recipe_reference import Key, Section, of_method, sections
from polyfed.plugins.settings import BUILT_IN
from polyfed.registry import METHODS

__all__ = ["to_schema"]

Schema = dict[str, Any]

_DRAFT = "http://json-schema.org/draft-07/schema#"  # the newest that editors of TOML know
_NEEDED = ("data", "models")  # [method] may be left to --method


def to_schema() -> Schema:
    """The schema of a recipe."""
    known = {section.name: section for section in sections()}
    tables = {name: _table(section) for name, section in known.items() if "." not in name}
    device = _table(known["devices.custom.NAME"])
    tables["devices"]["properties"]["custom"] |= {
        "properties": {name: _without_required(device) for name in BUILT_IN},
        "additionalProperties": device,
    }
    tables["plugins"] = {"type": "array", "items": tables["plugins"] | {"additionalProperties": True}}
    tables["method"] = _choice(known["method"])
    tables["methods"] = {
        "type": "object",
        "description": known["methods.NAME"].about,
        "properties": {name: _variant(name) for name in METHODS},
        "additionalProperties": _reference("variant"),
    }
    note = _table(known["presets.NAME"])["properties"]["note"]
    laid_over = {name: _without_required(table) for name, table in tables.items()}
    preset = {"type": "object", "properties": {"note": note, **laid_over}, "additionalProperties": False}
    presets = {"type": "object", "description": known["presets.NAME"].about, "additionalProperties": preset}
    return {
        "$schema": _DRAFT,
        "title": "A recipe of polyfed",
        "type": "object",
        "properties": {**tables, "presets": presets},
        "required": [*_NEEDED],
        "additionalProperties": False,
        "definitions": {
            "variant": _choice(known["methods.NAME"]),
            **{name: _hyperparameters(known["method"], of_method(name)) for name in METHODS},
        },
    }


def _table(section: Section) -> Schema:
    """A section whose keys are all known."""
    schema: Schema = {"type": "object", "description": section.about, "properties": _properties(section.keys)}
    required = [key.name for key in section.keys if key.default == "required"]
    return schema | ({"required": required} if required else {}) | {"additionalProperties": False}


def _without_required(table: Schema) -> Schema:
    """A table that something else completes."""
    return {key: rule for key, rule in table.items() if key != "required"}


def _reference(name: str) -> Schema:
    """What stands under the schema's definitions."""
    return {"$ref": f"#/definitions/{name}"}


def _choice(section: Section) -> Schema:
    """A table whose key `name` says whose hyperparameters its other keys are."""
    table = _table(section)
    table["properties"]["name"]["anyOf"] = [{"enum": [*METHODS]}, {"type": "string"}]
    del table["additionalProperties"]
    table["allOf"] = [
        {"if": {"properties": {"name": {"const": name}}, "required": ["name"]}, "then": _reference(name)}
        for name in METHODS
    ]
    return table


def _variant(name: str) -> Schema:
    """``[methods.NAME]``, where a method has that name: its own hyperparameters, unless the key `name` says others."""
    return {"if": {"required": ["name"]}, "then": _reference("variant"), "else": _reference(name)}


def _hyperparameters(section: Section, method: Section) -> Schema:
    """A table with a method's hyperparameters beside the keys that every method has."""
    properties = {**_properties(section.keys), **_properties(method.keys)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _properties(keys: Iterable[Key]) -> Schema:
    """Keys, those with dots within tables."""
    found: Schema = {}
    for key in keys:
        place = found
        *tables, name = key.name.split(".")
        for table in tables:
            inner = place.setdefault(table, {"type": "object", "properties": {}, "additionalProperties": False})
            place = inner["properties"]
        place[name] = _value(key)
    return found


def _value(key: Key) -> Schema:
    """What a key takes, what it means, and its default."""
    made = TypeAdapter(key.hint).json_schema()
    made = _plain(made, made.get("$defs", {}))
    default = {} if key.default in ("required", "none", "NAME") else {"default": _read(key.default)}
    return {**made, "description": key.meaning, **default}


def _plain(part: Any, named: Schema) -> Any:
    """A part of a schema without references, without titles, and without none, which TOML does not have."""
    if isinstance(part, list):
        return [_plain(one, named) for one in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return _plain(named[part["$ref"].rpartition("/")[2]], named)
    made = {key: _plain(value, named) for key, value in part.items() if key not in ("title", "$defs", "default")}
    choices = [choice for choice in made.get("anyOf", []) if choice != {"type": "null"}]
    if len(choices) == 1:
        del made["anyOf"]
        return {**made, **choices[0]}
    return {**made, "anyOf": choices} if choices else made


def _read(default: str) -> Any:
    """A default, from what the reference shows."""
    return json.loads(default)
