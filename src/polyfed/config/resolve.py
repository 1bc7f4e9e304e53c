"""A recipe's file, and the settings of one experiment in it: presets, ``--method`` and ``--set`` laid over the others.

`resolve` takes dictionaries and gives one; `Recipe` checks it, once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from polyfed.config.schema import SECTIONS
from polyfed.data.files import check_file
from polyfed.errors import ConfigError
from polyfed.own_methods import LABEL
from polyfed.records.read import flat_table, parse_toml
from polyfed.registry import METHODS, suggest
from polyfed.validation.effect import idle
from polyfed.validation.error_lines import shown
from polyfed.validation.settings import flat_fields

__all__ = [
    "join",
    "module_folders",
    "parse_override",
    "preset_names",
    "read_recipe",
    "recipe_stem",
    "resolve",
    "to_toml",
    "without_labels",
]

_WRITTEN = {  # what a run's own recipe keeps, and nobody sets
    "overrides": "expected nothing, as --set itself writes it",
    "preset": "expected --preset NAME, which writes it",
    "preset_note": "expected --preset NAME, which writes it",
}


def resolve(
    settings: Mapping[str, Any], preset: str | None = None, overrides: Sequence[str] = (), method: str | None = None
) -> dict[str, Any]:
    """The settings of one experiment; what was given stays as it was.

    Args:
        settings: a recipe's, section by section, with ``[presets]``.
        preset: names with commas between; each is laid over the recipe in turn.
        overrides: ``"data.num_clients=20"``, as ``--set`` takes them; laid over all else.
        method: a method's or a variant's name, in place of the recipe's own.

    Raises:
        ConfigError: no such preset, or an override that is none. Keys and values are not checked.
    """
    resolved = copy.deepcopy(dict(settings))
    presets = _checked_presets(resolved.pop("presets", {}), resolved.get("run"))
    names = preset_names(preset)
    for name in names:
        if name not in presets:
            hint = suggest(name, presets) if presets else "; the recipe has none"
            raise ConfigError(f"unknown preset '{name}'{hint}")
        table = {section: values for section, values in presets[name].items() if section != "note"}
        changed = [tuple(key.split(".")) for key in flat_table(table)]
        resolved = _drop_idle(join(resolved, table), changed)
    if names:
        notes = "; ".join(presets[name]["note"] for name in names if "note" in presets[name])
        resolved = join(resolved, {"run": {"preset": ",".join(names)} | ({"preset_note": notes} if notes else {})})
    return _override(resolved, [parse_override(text) for text in overrides], method)


# presets ------------------------------------------------------------------------------------------------------------


def preset_names(preset: str | None) -> list[str]:
    """``"n50,small"`` to its names; none of None."""
    return [] if preset is None else [name.strip() for name in preset.split(",")]


def _checked_presets(presets: Any, run: Any) -> Mapping[str, Any]:
    """The tables of ``[presets]``, of which the names and the notes are looked at; their keys are where one is asked
    for.
    """
    if not isinstance(presets, Mapping):
        raise ConfigError(f"presets: expected a table, got {shown(presets)}")
    for name, table in presets.items():
        if not LABEL.fullmatch(name):
            raise ConfigError(f"presets: expected names of letters, digits, '-' and '_', got '{name}'")
        if not isinstance(table, Mapping):
            raise ConfigError(f"presets.{name}: expected a table, got {shown(table)}")
        if not isinstance(table.get("note", ""), str):
            raise ConfigError(f"presets.{name}.note: expected text, got {shown(table['note'])}")
        unknown = [section for section in table if section not in (*SECTIONS, "note", "method", "methods", "plugins")]
        if unknown:
            raise ConfigError(f"presets.{name}: unknown key '{unknown[0]}'{suggest(unknown[0], SECTIONS)}")
    for settings in (run, *(table.get("run") for table in presets.values())):
        if presets and isinstance(settings, Mapping) and ("preset" in settings or "preset_note" in settings):
            raise ConfigError("run.preset: expected --preset NAME, which writes it, got it in a recipe with [presets]")
    return presets


def join(own: Any, more: Any, place: tuple[str, ...] = ()) -> Any:
    """Both as one, tables key by key and those in them likewise; what `more` says counts.

    A method's table that names another method is replaced as a whole. place: the keys that lead to both in a recipe.
    """
    if not isinstance(own, Mapping) or not isinstance(more, Mapping):
        return copy.deepcopy(more)
    if place and place[0] in ("method", "methods") and more.get("name", own.get("name")) != own.get("name"):
        return copy.deepcopy(more)
    return dict(own) | {key: join(own.get(key), value, (*place, key)) for key, value in more.items()}


# single settings ----------------------------------------------------------------------------------------------------


def _override(settings: dict[str, Any], parsed: Sequence[tuple[list[str], Any]], method: str | None) -> dict[str, Any]:
    """The overrides in their places; the method between them, so that ``method.lr=1`` means the one asked for."""
    texts = [f"{'.'.join(keys)}={value if isinstance(value, str) else to_toml(value)}" for keys, value in parsed]
    changed = [text for text, (keys, value) in zip(texts, parsed, strict=True) if _changes(settings, keys, value)]
    for keys, value in parsed:
        if keys[0] == "run" and keys[1] in _WRITTEN:
            raise ConfigError(f"{'.'.join(keys)}: {_WRITTEN[keys[1]]}, got --set")
        if keys == ["method", "name"] and method is None:
            method = str(value)
        if keys[0] != "method":
            _assign(settings, keys, value)
    own = settings.get("method")
    if method is not None and (own is None or (isinstance(own, Mapping) and own.get("name") != method)):
        settings["method"] = {"name": method}
    for keys, value in parsed:
        if keys[0] == "method" and keys != ["method", "name"]:
            _assign(settings, keys, value)
    settings = _drop_idle(settings, [tuple(keys) for keys, _ in parsed])
    if changed:
        before = settings.get("run", {}).get("overrides", [])
        settings = join(settings, {"run": {"overrides": [*before, *changed]}})
    return settings


def _changes(settings: Mapping[str, Any], keys: Sequence[str], value: Any) -> bool:
    """Whether an override makes it another experiment than the recipe's; not where, how or how often it looks."""
    if keys[0] in ("run", "evaluation") or list(keys) in (["data", "root"], ["method", "name"]):
        return False
    field = SECTIONS[keys[0]].model_fields.get(keys[1]) if keys[0] in SECTIONS else None
    there: Any = settings
    for key in keys:
        there = there.get(key) if isinstance(there, Mapping) else None
    if there is None and field is not None:
        there = field.default
    return bool(value != there)


def _assign(settings: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    place = settings
    for depth, key in enumerate(keys[:-1], 1):
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise ConfigError(f"unknown key '{'.'.join(keys)}': '{'.'.join(keys[:depth])}' is no table")
    place[keys[-1]] = value


def parse_override(text: str) -> tuple[list[str], Any]:
    """``"data.num_clients=20"`` to (["data", "num_clients"], 20).

    Raises:
        ConfigError: no ``SECTION.KEY=VALUE``.
    """
    key, equals, value = text.partition("=")
    keys = [part.strip() for part in key.split(".")]
    if not equals or len(keys) < 2 or not all(keys):
        raise ConfigError(f"expected --set SECTION.KEY=VALUE, for instance --set data.num_clients=20, got '{text}'")
    value = value.strip()
    try:
        parsed = parse_toml(f"value = {value}".encode())
    except ValueError:
        return keys, value
    return keys, parsed["value"] if parsed.keys() == {"value"} else value


def to_toml(value: Any) -> str:
    """A value as TOML writes it, on one line, and as ``--set KEY=`` takes it.

    >>> to_toml([1, [2, "a"]])
    '[1, [2, "a"]]'

    Raises:
        ConfigError: a recipe cannot hold it.
    """
    try:
        lines = tomli_w.dumps({"value": value}).partition("=")[2].strip().splitlines()
    except TypeError:
        raise ConfigError(f"expected values that a recipe can hold, got {value!r}") from None
    text = "\n".join(line.strip() for line in lines)
    return text.replace("[\n", "[").replace(",\n]", "]").replace("\n", " ")


# what loses its effect ----------------------------------------------------------------------------------------------


def _drop_idle(settings: dict[str, Any], changed: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """The settings without what lost its effect by what was laid over them.

    ``--set data.partition=iid`` takes a recipe's ``dirichlet_alpha`` away, which was set for its own
    partition; one that was itself laid over them stays, to be refused.

    Args:
        settings: with the changes in them. changed: the dotted keys that were laid over them.
    """
    for place in dict.fromkeys(path[:2] if path[0] == "methods" else path[:1] for path in changed):
        fields, tables = _place(settings, place)
        keys = {".".join(path[len(place) :]) for path in changed if path[: len(place)] == place}
        defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
        values = dict(defaults)
        for table in tables:
            given = flat_table(table)
            values |= {name: given[name] for name in fields if name in given}
        while dropped := [
            name for name, needed in idle(fields, values).items() if needed.key in keys and name not in keys
        ]:
            for name in dropped:
                for table in tables:
                    _drop(table, name.split("."))
                values[name] = defaults[name]
            keys.update(dropped)  # what acts only beside one of them has lost its effect, too
    return settings


def _place(settings: Mapping[str, Any], place: tuple[str, ...]) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """The settings that a section or a method's table may hold, and the tables that hold them, the one that counts
    last; a method's hyperparameters may lie in two.
    """
    if place[0] in SECTIONS:
        return SECTIONS[place[0]].model_fields, [_table(settings, *place)]
    if place[0] not in ("method", "methods"):
        return {}, []
    own = _table(settings, *place)
    name = str(own.get("name", place[-1]))
    tables = [own]
    if place == ("method",):
        tables = [_table(settings, "methods", name), own]
        name = str(tables[0].get("name", name))
    return (flat_fields(METHODS[name]) if name in METHODS else {}), tables


def _table(settings: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """The table at a place; an empty one where there is none."""
    found: Any = settings
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, dict) else {}


def _drop(table: dict[str, Any], keys: Sequence[str]) -> None:
    """Leave out what a dotted key stands for, and a table that is empty without it."""
    first = keys[0]
    inner = table.get(first)
    if len(keys) == 1 or not isinstance(inner, dict):
        table.pop(first, None)
        return
    _drop(inner, keys[1:])
    if not inner:
        del table[first]


# files --------------------------------------------------------------------------------------------------------------


def read_recipe(path: Path) -> dict[str, Any]:
    check_file(path)
    try:
        return parse_toml(path.read_bytes())
    except FileNotFoundError:
        near = [str(p) for folder in (path.parent, Path("recipes")) for p in folder.glob("*.toml")]
        hint = suggest(str(path), near)
        hint = hint if "did you mean" in hint else ""
        raise ConfigError(f"expected a recipe file, got '{path}', which is not there{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"expected a recipe file, got '{path}': {reason}") from None
    except ValueError as error:
        raise ConfigError(f"expected TOML in '{path}', got something else: {error}") from None


def recipe_stem(path: Path) -> str:
    """``recipes/fedgh/table3.toml`` -> "fedgh/table3", so that the default run folders of two papers differ."""
    folders = path.parent.parts
    below = folders[len(folders) - folders[::-1].index("recipes") :] if "recipes" in folders else ()
    return "/".join([*below, path.stem])


def without_labels(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without what of [run] are only labels and places."""
    run = settings.get("run")
    executor = run.get("executor") if isinstance(run, Mapping) else None
    return {section: table for section, table in settings.items() if section != "run"} | {"run": {"executor": executor}}


def module_folders(path: Path) -> list[str]:
    """Where modules that a recipe's file names are looked for, too."""
    return [str(path.parent.absolute()), str(Path.cwd())]
