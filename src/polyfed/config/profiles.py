"""``[profiles.NAME]``: settings that ``--profile NAME`` lays over a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from polyfed.config.changes import drop_idle, merge
from polyfed.errors import RequestError
from polyfed.registry import nearest
from polyfed.validation.error_lines import shown

__all__ = ["LABEL", "apply_profiles", "profile_names"]

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # a variant's or a profile's name is a folder's name, too


def profile_names(profile: str | None) -> list[str]:
    """``"n50,small"`` to its names; none of None."""
    return [] if profile is None else [name.strip() for name in profile.split(",")]


def apply_profiles(
    settings: Mapping[str, Any], profile: str | None, make: Callable[[Mapping[str, Any]], Any]
) -> dict[str, Any]:
    """The settings without ``[profiles]``, of which those asked for are laid over them; all of them are checked.

    Args:
        settings: a recipe's. profile: names with commas between. make: checks settings, and makes a recipe of them.
    """
    profiles = settings.get("profiles", {})
    base = {key: value for key, value in settings.items() if key != "profiles"}
    if not isinstance(profiles, Mapping):
        raise RequestError(f"profiles: expected a table, came {shown(profiles)}")
    for name, table in profiles.items():
        _check_profile(base, name, table, make)
    laid: dict[str, Any] = base
    for name in profile_names(profile):
        if name not in profiles:
            hint = nearest(name, profiles) if profiles else "; the recipe has none"
            raise RequestError(f"unknown profile '{name}'{hint}")
        laid = _lay_over(laid, profiles[name])
    if profile is None:
        return laid
    notes = [profiles[name]["note"] for name in profile_names(profile) if "note" in profiles[name]]
    kept = {"profile": ",".join(profile_names(profile)), "profile_note": "; ".join(notes)}
    return merge(laid, {"run": {key: text for key, text in kept.items() if text}})


def _check_profile(base: Mapping[str, Any], name: str, table: Any, make: Callable[[Mapping[str, Any]], Any]) -> None:
    """One profile's keys and values, as far as the recipe itself stands."""
    if not LABEL.fullmatch(name):
        raise RequestError(f"profiles: expected names of letters, digits, '-' and '_', came '{name}'")
    if not isinstance(table, Mapping):
        raise RequestError(f"profiles.{name}: expected a table, came {shown(table)}")
    note = table.get("note", "")
    if not isinstance(note, str):
        raise RequestError(f"profiles.{name}.note: expected text, came {shown(note)}")
    whole = {"method": {"name": "local"}, **base}  # one that is always asked with --method has no [method]
    try:
        make(whole)
    except RequestError:
        return  # the recipe's own fault, which is told without a profile's name
    try:
        laid = make(_lay_over(whole, table))
    except RequestError as problem:
        raise RequestError(f"profiles.{name}: {problem}") from None
    if laid.run.profile is not None or laid.run.profile_note is not None:
        raise RequestError("run.profile: expected --profile NAME, which writes it, came it in a recipe with [profiles]")


def _lay_over(settings: Mapping[str, Any], profile: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with a profile's in their place, without what lost its effect by them."""
    return drop_idle(_join(settings, profile), list(_paths(profile)))


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
