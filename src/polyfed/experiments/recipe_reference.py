"""Every key of a recipe: its type, its default and what it means, read off the classes that check recipes.

What a key means is stated once: as the description of its field, and of a method's hyperparameter as the comment
beside it. `polyfed recipe` and the page docs/reference/recipe.md are made of it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from polyfed.config.recipe import Recipe
from polyfed.config.schema import SECTIONS, MethodChoice, PluginChoice
from polyfed.errors import ConfigError
from polyfed.experiments.method_facts import Key, format_value, kind_of, list_hyperparameters
from polyfed.own_methods import method_class
from polyfed.plugins.settings import Profile
from polyfed.registry import suggest

__all__ = ["Section", "find_keys", "sections"]


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
