"""Settings that act only beside another one, and those of them that were given where they do nothing.

It is declared where the setting stands, of a recipe's sections and of methods' hyperparameters alike:

    dropout_rate: Share = 0.0
    dropout_stage: Annotated[Literal["before", "after"], ActsWith("dropout_rate")] = "before"

What has its default was not given. Where the other setting is a number that was itself given as "off"
(``dropout_rate = 0.0, dropout_stage = "after"``), it was switched off on purpose, as by a series of runs, and
what belongs to it may stand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from polyfed.validation.error_lines import shown

__all__ = ["ActsWith", "idle", "without_effect"]


@dataclass(frozen=True)
class ActsWith:
    """Beside a field: it does something only with certain values of another field.

    Attributes:
        key: the other field.
        values: those of its values. (): where it is on.
        of: values of this field of which this holds; (): of all.
        several: whether the other field is a list that needs two different entries.
    """

    key: str
    values: tuple[Any, ...] = ()
    of: tuple[Any, ...] = ()
    several: bool = False

    def holds(self, own: Any, other: Any) -> bool:
        """Whether this field acts with its value `own` beside the other field's."""
        if self.of and own not in self.of:
            return True
        if self.several:
            entries = other if isinstance(other, list | tuple) else [other]  # a recipe may hold anything as yet
            return any(entry != entries[0] for entry in entries)
        if not self.values:
            return bool(other)
        return other in self.values

    def wanted(self, other: Any) -> str:
        """What to set the other field to, in words; `other` is what it is."""
        key = self.key
        if self.several:
            return f"set {key} to two or more"
        if self.values:
            *most, last = map(shown, self.values)
            return f"set {key} to {' or '.join([', '.join(most), last] if most else [last])}"
        if isinstance(other, bool):
            return f"set {key} to true"
        if isinstance(other, int | float):
            return f"set {key} above 0"
        return f"set {key}"


def idle(fields: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, ActsWith]:
    """The fields that have no effect beside the other values, each with what it would need.

    Args:
        fields: name -> pydantic's field. values: name -> value. A name has dots where it is of a table of settings.

    Returns:
        Name -> what it needs, with the whole name of the other field. A condition of a table on a field outside of it
        is left out where the table is checked alone.
    """
    found: dict[str, ActsWith] = {}
    for name, field in fields.items():
        for stated in field.metadata:
            if not isinstance(stated, ActsWith):
                continue
            needed = replace(stated, key=_beside(name, stated.key, values))
            if needed.key in values and not needed.holds(values[name], values[needed.key]):
                found.setdefault(name, needed)
    return found


def _beside(name: str, key: str, names: Collection[str]) -> str:
    """The whole name of a field that another one names: of the same table, if it has such a one."""
    table, dot, _ = name.rpartition(".")
    return f"{table}{dot}{key}" if f"{table}{dot}{key}" in names else key


def without_effect(fields: Mapping[str, Any], values: Mapping[str, Any], given: Collection[str]) -> str | None:
    """Which field was given a value and does nothing, beside what, and what to set; None: there is none.

    Args:
        fields: name -> pydantic's field. values: name -> value. given: names that were set, to whatever value.
    """
    for name, needed in idle(fields, values).items():
        value = values[name]
        other = values[needed.key]
        default = fields[name].get_default(call_default_factory=True)
        if value == default or (needed.key in given and _is_zero(other, needed)):
            continue
        own = name
        key = needed.key
        beside = f"without {key}" if other is None else f"beside {key} = {shown(other)}"
        instead = f"leave out {own}" if default is None or default == {} else f"leave {own} at {shown(default)}"
        return f"{own} = {shown(value)} does nothing {beside}; {needed.wanted(other)}, or {instead}"
    return None


def _is_zero(other: Any, needed: ActsWith) -> bool:
    """Whether the other field is a number that is off, and was set to that."""
    return not needed.values and isinstance(other, int | float) and not isinstance(other, bool) and other == 0
