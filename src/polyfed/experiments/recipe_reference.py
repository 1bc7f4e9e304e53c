"""Every key of a recipe: its type, its default and what it means, read off the classes that check recipes.

What a key means is stated once: as the description of its field, and of a method's hyperparameter as the comment
beside it. `polyfed recipe`, the page docs/reference/recipe.md and the JSON Schema for editors are made of it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic_core import PydanticUndefined

from polyfed.config.recipe import Recipe
from polyfed.config.schema import SECTIONS, MethodChoice, PluginChoice
from polyfed.errors import ConfigError
from polyfed.experiments.method_facts import Key, format_value, kind_of, list_hyperparameters
from polyfed.own_methods import method_class
from polyfed.plugins.settings import BUILT_IN, Profile
from polyfed.registry import METHODS, suggest

__all__ = ["Section", "find_keys", "sections", "to_schema"]


@dataclass(frozen=True)
class Section:
    """One table of a recipe: what stands between its brackets, what it is for, and its keys."""

    name: str
    about: str
    keys: tuple[Key, ...]


_VARIANT = (
    "the hyperparameters of a method that is asked for by name (--method NAME), or a variant, whose name says whose it "
    "is; every other key is a hyperparameter"
)
_PRESET = "settings that --preset NAME lays over the recipe, in sections of the same names: [presets.NAME.training]"
_NOTE = Key("note", "text", "none", "what the preset scales down; shown wherever results are")


def sections() -> list[Section]:
    """All sections, in the order of a recipe."""
    kinds: dict[str, type[BaseModel]] = {**SECTIONS, "method": MethodChoice, "plugins": PluginChoice}
    found = []
    for name in Recipe.model_fields:
        if name in kinds:
            found.append(Section(name, _summary(kinds[name]), _keys(kinds[name])))
        if name == "devices":
            found.append(Section("devices.custom.NAME", _summary(Profile), _keys(Profile)))
        if name == "method":
            own, *others = _keys(MethodChoice)
            found.append(Section("methods.NAME", _VARIANT, (dataclasses.replace(own, default="NAME"), *others)))
    return [*found, Section("presets.NAME", _PRESET, (_NOTE,))]


def _summary(kind: type[BaseModel]) -> str:
    """The first paragraph of a class's documentation without the section's name."""
    first = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    return re.sub(r"^``\[+[\w.]+\]+``: ", "", first).replace("`", "").rstrip(".")


def _keys(kind: type[BaseModel]) -> tuple[Key, ...]:
    """The keys of a class of settings."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found = []
    for name, field in kind.model_fields.items():
        default = field.get_default(call_default_factory=True)
        words = "required" if default in (PydanticUndefined, "") else format_value(default)
        found.append(Key(name, kind_of(hints[name]), words, field.description or ""))
    return tuple(found)


def find_keys(name: str, beside: Sequence[str] = ()) -> Section:
    """A section, a method's hyperparameters or a single key, by its dotted name.

    Args:
        name: "training", "training.lr", "method.fedhenn", "method.fedhenn.kernel.rank". beside: folders in which the
            module of a method of one's own is looked for.

    Raises:
        ConfigError: there is none such; tells the nearest.
    """
    known = {section.name: section for section in sections()}
    if name in known:
        return known[name]
    place, _, rest = name.partition(".")
    if place == "method" and rest not in [key.name for key in known["method"].keys]:
        own, _, key = (rest, "", "") if ":" in rest else rest.partition(".")
        about = f"the hyperparameters of {own}; also keys of [methods.NAME]"
        section = Section("method", about, tuple(list_hyperparameters(method_class(own, beside))))
        if not key:
            return section
    else:
        place, _, key = name.rpartition(".")
        if place not in known:
            raise ConfigError(f"unknown section '{name}'{suggest(name, known)}")
        section = known[place]
    keys = tuple(one for one in section.keys if one.name == key)
    if not keys:
        raise ConfigError(f"unknown key '{name}'{suggest(key, [one.name for one in section.keys])}")
    return dataclasses.replace(section, keys=keys)


# the schema ---------------------------------------------------------------------------------------------------------

Schema = dict[str, Any]


def to_schema() -> Schema:
    """The JSON Schema of a recipe: pydantic's, with the hyperparameters of each method where its name stands.

    What only the whole recipe decides (keys that need one another, names of data sets and networks) is left to
    `polyfed check`.
    """
    schema = Recipe.model_json_schema(ref_template="#/definitions/{model}")
    named: Schema = schema.pop("$defs")
    schema["definitions"] = named
    choice = named["MethodChoice"]
    common = choice["properties"]
    choice["allOf"] = [
        {"if": {"properties": {"name": {"const": name}}, "required": ["name"]}, "then": _reference(f"method {name}")}
        for name in METHODS
    ]
    for name, kind in METHODS.items():
        own = TypeAdapter(kind).json_schema(ref_template="#/definitions/{model}")
        named.update(own.pop("$defs", {}))
        for one in list_hyperparameters(kind):
            *tables, key = one.name.split(".")
            place = own["properties"]
            for table in tables:
                place = named[place[table]["$ref"].rpartition("/")[2]]["properties"]
            place[key]["description"] = one.meaning
        named[f"method {name}"] = {**own, "properties": {**common, **own["properties"]}}
    named["variant"] = _partial(choice)
    own_name = {"if": {"required": ["name"]}, "then": _reference("variant")}
    tables = schema["properties"]
    tables["methods"] |= {
        "description": _VARIANT,
        "properties": {name: {**own_name, "else": _reference(f"method {name}")} for name in METHODS},
        "additionalProperties": _reference("variant"),
    }
    partial = {name: _partial(named["Profile"]) for name in BUILT_IN}
    named["Devices"]["properties"]["custom"]["properties"] = partial
    laid_over = {name: _partial(named[kind.__name__]) for name, kind in SECTIONS.items()}
    laid_over |= {name: tables[name] for name in ("methods", "plugins")} | {"method": _reference("variant")}
    note = {"type": "string", "description": _NOTE.meaning}
    preset = {"type": "object", "properties": {"note": note, **laid_over}, "additionalProperties": False}
    tables["presets"] = {"type": "object", "description": _PRESET, "additionalProperties": preset}
    # draft 7 is the newest that editors of TOML know; [method] may be left to --method
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "required": ["data", "models"]}


def _partial(table: Schema) -> Schema:
    """A table that something else completes."""
    return {key: copy.deepcopy(rule) for key, rule in table.items() if key != "required"}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}
