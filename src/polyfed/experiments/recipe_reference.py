"""Every key of a recipe: its type, its default and what it means, read off the classes that check recipes.

What is said of a key is said once: as the description of its field, and of a method's hyperparameter as the comment
beside it. `polyfed recipe`, the page docs/reference/recipe.md and the schema for editors are made of what is here.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from polyfed.config.recipe import Recipe
from polyfed.config.schema import SECTIONS, MethodChoice, PluginChoice
from polyfed.errors import ConfigError
from polyfed.experiments.method_table import format_value, kind_of, list_hyperparameters
from polyfed.own_methods import method_class, with_hyperparameters
from polyfed.plugins.settings import Profile
from polyfed.registry import suggest
from polyfed.validation.hyperparameters import flat_hints

__all__ = ["Key", "Section", "find", "sections", "to_markdown"]

_METHOD = "method."  # before a method's name: its hyperparameters
_REQUIRED = "required"
_TABLE = "NAME"  # the table's own name


@dataclass(frozen=True)
class Key:
    """One key of a section.

    Attributes:
        name: with dots where it is of a table in the section.
        type: the values that it takes, in words.
        default: as a recipe has it; "required" where there is none, "none" where the key is left out.
        meaning: what it does.
        hint: its type in Python.
    """

    name: str
    type: str
    default: str
    meaning: str
    hint: Any


@dataclass(frozen=True)
class Section:
    """One table of a recipe: what stands between its brackets, what it is for, and its keys."""

    name: str
    about: str
    keys: tuple[Key, ...]


# what there is --------------------------------------------------------------------------------------------------


def sections() -> list[Section]:
    """All sections, in the order of a recipe."""
    further: dict[str, type[BaseModel]] = {"method": MethodChoice, "plugins": PluginChoice}
    found = []
    for name in Recipe.model_fields:
        kind = SECTIONS.get(name) or further.get(name)
        if kind is not None:
            found.append(Section(name, _summary(kind), _keys(kind)))
        if name == "devices":
            found.append(Section("devices.custom.NAME", _summary(Profile), _keys(Profile)))
        if name == "method":
            found.append(Section("methods.NAME", _VARIANT, _keys(MethodChoice, given_by_its_name=True)))
    return [*found, Section("presets.NAME", _PRESET, (Key("note", "text", "none", _NOTE, str),))]


_VARIANT = (
    "the hyperparameters of a method that is asked for by name (--method NAME), or a variant, whose name says whose it "
    "is; every other key is a hyperparameter"
)
_PRESET = "settings that --preset NAME lays over the recipe, in sections of the same names: [presets.NAME.training]"
_NOTE = "what the preset scales down; shown wherever results are"


def of_method(name: str, beside: Sequence[str] = ()) -> Section:
    """The hyperparameters of a method, as keys of ``[method]``.

    Args:
        name: of a registered method, or ``"package.module:Class"``. beside: folders in which the module is looked for.

    Raises:
        ConfigError: no such method.
    """
    kind = with_hyperparameters(name, method_class(name, beside))
    hints = flat_hints(kind)
    keys = tuple(
        Key(one.name, _without_none(kind_of(hints[one.name])), _written(one.default), one.about, hints[one.name])
        for one in list_hyperparameters(kind)
    )
    return Section("method", f"the hyperparameters of {name}; also keys of [methods.NAME]", keys)


def find(name: str, beside: Sequence[str] = ()) -> Section:
    """A section, a method's hyperparameters or a single key, by its dotted name.

    Args:
        name: "training", "training.lr", "method.fedhenn", "method.fedhenn.kernel.rank". beside: see `of_method`.

    Raises:
        ConfigError: there is none such; tells the nearest.
    """
    known = {section.name: section for section in sections()}
    if name in known:
        return known[name]
    own = {key.name for key in known["method"].keys}
    if name.startswith(_METHOD) and name.removeprefix(_METHOD) not in own:
        method, _, key = name.removeprefix(_METHOD).partition(".")
        if ":" in name:
            method = name.removeprefix(_METHOD)
            key = ""
        section = of_method(method, beside)
        if not key:
            return section
    else:
        place, _, key = name.rpartition(".")
        if place not in known:
            raise ConfigError(f"unknown section '{name}'{suggest(name, known)}")
        section = known[place]
    keys = [one for one in section.keys if one.name == key]
    if not keys:
        raise ConfigError(f"unknown key '{name}'{suggest(key, [one.name for one in section.keys])}")
    return dataclasses.replace(section, keys=tuple(keys))


def _summary(kind: type[BaseModel]) -> str:
    """The first paragraph of a class's documentation without the section's name."""
    first = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    return re.sub(r"^``\[+[\w.]+\]+``: ", "", first).replace("`", "").rstrip(".")


def _keys(kind: type[BaseModel], given_by_its_name: bool = False) -> tuple[Key, ...]:
    """The keys of a class of settings. given_by_its_name: the table's own name stands for the key `name`."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found = []
    for name, field in kind.model_fields.items():
        default = field.get_default(call_default_factory=True)
        words = _REQUIRED if default in (PydanticUndefined, "") else _written(default)
        if given_by_its_name and name == "name":
            words = _TABLE
        found.append(Key(name, _without_none(kind_of(hints[name])), words, field.description or "", hints[name]))
    return tuple(found)


def _written(default: Any) -> str:
    """A default as a recipe has it."""
    if isinstance(default, list):
        return f"[{', '.join(map(format_value, default))}]"
    return format_value(default)


def _without_none(words: str) -> str:
    """A type in words; TOML has no none: the key is left out."""
    return words.removesuffix(" or none")


# the page -------------------------------------------------------------------------------------------------------


def to_markdown() -> str:
    """docs/reference/recipe.md."""
    tables = "\n".join(_table_of(section) for section in sections())
    return f"{_INTRODUCTION}\n{tables}"


_INTRODUCTION = """# Recipe keys

Made by `polyfed recipe --markdown`: every key of a recipe. `polyfed recipe training` prints one section,
`polyfed recipe training.lr` one key and `polyfed recipe method.fedhenn` the hyperparameters of a method, which the
[methods' pages](../methods/README.md) list, too.

A default of `none` means that the key is left out. A setting that has no effect beside the others is an error.

## In an editor

Editors that know JSON Schema check a recipe as it is typed, complete its keys and show what they mean: VS Code with
the extension Even Better TOML, and every editor that uses the language server Taplo. Write the schema once:

```bash
polyfed recipe --json-schema > recipe.schema.json
```

and name it in the first line of a recipe beside it:

```toml
#:schema ./recipe.schema.json
```
"""


def _table_of(section: Section) -> str:
    """A section's heading and table."""
    brackets = f"[[{section.name}]]" if section.name == "plugins" else f"[{section.name}]"
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    rows += [
        f"| `{key.name}` | {_cell(key.type)} | {_cell(_code(key.default))} | {_cell(key.meaning)} |"
        for key in section.keys
    ]
    return "\n".join([f"## `{brackets}`", "", f"{_sentence(section.about)}", "", *rows, ""])


def _code(default: str) -> str:
    return default if default in (_REQUIRED, "none", _TABLE) else f"`{default}`"


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def as_rows(section: Section) -> list[Mapping[str, str]]:
    """A section's keys for machines."""
    return [{name: getattr(key, name) for name in ("name", "type", "default", "meaning")} for key in section.keys]
