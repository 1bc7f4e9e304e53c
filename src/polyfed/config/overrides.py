"""``--set SECTION.KEY=VALUE``: single settings in place of a recipe's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tomli_w

from polyfed.config.changes import drop_idle, merge
from polyfed.config.schema import SECTIONS
from polyfed.errors import ConfigError
from polyfed.results.read import parse_toml

__all__ = ["apply_overrides", "parse_override", "to_toml"]


def apply_overrides(settings: dict[str, Any], overrides: Sequence[str], method: str | None) -> dict[str, Any]:
    """Put `overrides` over the settings, `method` in between, so that ``method.lr=1`` means the method asked for."""
    parsed = [parse_override(text) for text in overrides]
    changed = [f"{'.'.join(keys)}={_plain(value)}" for keys, value in parsed if _changes(settings, keys, value)]
    for keys, value in parsed:
        _refuse_kept(keys)
        if keys == ["method", "name"] and method is None:
            method = str(value)
    for keys, value in parsed:
        if keys[0] != "method":
            _assign(settings, keys, value)
    if method is not None and not _is_method(settings.get("method"), method):
        settings["method"] = {"name": method}
    for keys, value in parsed:
        if keys[0] == "method" and keys != ["method", "name"]:
            _assign(settings, keys, value)
    settings = drop_idle(settings, [tuple(keys) for keys, _ in parsed])
    if not changed:
        return settings
    run = settings.get("run")
    before = run.get("overrides", ()) if isinstance(run, Mapping) else ()
    return merge(settings, {"run": {"overrides": [*before, *changed]}})


def _refuse_kept(keys: Sequence[str]) -> None:
    """Raises `ConfigError` for what a run's own recipe keeps, and nobody sets."""
    if list(keys) == ["run", "overrides"]:
        raise ConfigError("run.overrides: expected nothing, as --set itself writes it, got --set")
    if list(keys) in (["run", "preset"], ["run", "preset_note"]):
        raise ConfigError(f"{'.'.join(keys)}: expected --preset NAME, which writes it, got --set")


def _is_method(table: Any, name: str) -> bool:
    """Whether ``[method]`` is of this name; what is no table is told elsewhere."""
    if table is None:
        return False
    return not isinstance(table, dict) or table.get("name") == name


def _changes(settings: Mapping[str, Any], keys: Sequence[str], value: Any) -> bool:
    """Whether an override makes it another experiment than the recipe's; not where, how or how often it looks."""
    if keys[0] in ("run", "evaluation") or list(keys) in (["data", "root"], ["method", "name"]):
        return False
    fields = SECTIONS[keys[0]].model_fields if keys[0] in SECTIONS else {}
    field = fields.get(keys[1])
    there: Any = settings
    for key in keys:
        there = there.get(key) if isinstance(there, Mapping) else None
    if there is None and field is not None:
        there = field.default
    return bool(value != there)


def _plain(value: Any) -> str:
    """A value on one line; text without quotes."""
    return value if isinstance(value, str) else to_toml(value)


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


def parse_override(text: str) -> tuple[list[str], Any]:
    """``"data.num_clients=20"`` to (["data", "clients"], 20)."""
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


def _assign(settings: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    place = settings
    for depth, key in enumerate(keys[:-1], 1):
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise ConfigError(f"unknown key '{'.'.join(keys)}': '{'.'.join(keys[:depth])}' is no table")
    place[keys[-1]] = value
