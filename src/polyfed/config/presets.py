"""``[presets.NAME]``: settings that ``--preset NAME`` lays over a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from polyfed.config.changes import drop_idle, merge
from polyfed.errors import ConfigError
from polyfed.registry import suggest
from polyfed.validation.error_lines import shown

__all__ = ["LABEL", "apply_presets", "preset_names"]

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # a variant's or a preset's name is a folder's name, too


def preset_names(preset: str | None) -> list[str]:
    """``"n50,small"`` to its names; none of None."""
    return [] if preset is None else [name.strip() for name in preset.split(",")]


def apply_presets(
    settings: Mapping[str, Any], preset: str | None, make: Callable[[Mapping[str, Any]], Any]
) -> dict[str, Any]:
    """The settings without ``[presets]``, of which those asked for are laid over them; all of them are checked.

    Args:
        settings: a recipe's. preset: names with commas between. make: checks settings, and makes a recipe of them.
    """
    presets = settings.get("presets", {})
    base = {key: value for key, value in settings.items() if key != "presets"}
    if not isinstance(presets, Mapping):
        raise ConfigError(f"presets: expected a table, got {shown(presets)}")
    for name, table in presets.items():
        _check_preset(base, name, table, make)
    laid: dict[str, Any] = base
    for name in preset_names(preset):
        if name not in presets:
            hint = suggest(name, presets) if presets else "; the recipe has none"
            raise ConfigError(f"unknown preset '{name}'{hint}")
        laid = _lay_over(laid, presets[name])
    if preset is None:
        return laid
    notes = [presets[name]["note"] for name in preset_names(preset) if "note" in presets[name]]
    kept = {"preset": ",".join(preset_names(preset)), "preset_note": "; ".join(notes)}
    return merge(laid, {"run": {key: text for key, text in kept.items() if text}})


def _check_preset(base: Mapping[str, Any], name: str, table: Any, make: Callable[[Mapping[str, Any]], Any]) -> None:
    """One preset's keys and values, as far as the recipe itself stands."""
    if not LABEL.fullmatch(name):
        raise ConfigError(f"presets: expected names of letters, digits, '-' and '_', got '{name}'")
    if not isinstance(table, Mapping):
        raise ConfigError(f"presets.{name}: expected a table, got {shown(table)}")
    note = table.get("note", "")
    if not isinstance(note, str):
        raise ConfigError(f"presets.{name}.note: expected text, got {shown(note)}")
    whole = {"method": {"name": "local"}, **base}  # one that is always asked with --method has no [method]
    try:
        make(whole)
    except ConfigError:
        return  # the recipe's own fault, which is told without a preset's name
    try:
        laid = make(_lay_over(whole, table))
    except ConfigError as problem:
        raise ConfigError(f"presets.{name}: {problem}") from None
    if laid.run.preset is not None or laid.run.preset_note is not None:
        raise ConfigError("run.preset: expected --preset NAME, which writes it, got it in a recipe with [presets]")


def _lay_over(settings: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with a preset's in their place, without what lost its effect by them."""
    return drop_idle(_join(settings, preset), list(_paths(preset)))


def _join(own: Any, more: Any, place: tuple[str, ...] = ()) -> Any:
    """Tables are joined key by key; a method's table that names another method is replaced as a whole."""
    if not isinstance(own, Mapping) or not isinstance(more, Mapping):
        return more
    if place and place[0] in ("method", "methods") and more.get("name", own.get("name")) != own.get("name"):
        return more
    joined = dict(own)
    for key, value in more.items():
        if place or key != "note":
            joined[key] = _join(own.get(key), value, (*place, key))
    return joined


def _paths(table: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The dotted keys of all values in a table of tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _paths(value, (*place, key))
        else:
            yield (*place, key)
