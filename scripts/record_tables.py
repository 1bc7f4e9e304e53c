"""The tables of docs/records.md: what every key of a run's files is, from the models that read and check them."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from polyfed.records.fields import FieldType, Record
from polyfed.records.schema import RoundRecord, RunResult, Summary
from polyfed.records.stored_files import ModelEntry, Normalization

TABLES: dict[str, type[Record]] = {"summary": Summary, "round": RoundRecord, "result": RunResult, "model": ModelEntry}
SINGLE = {float: "number", int: "integer", bool: "Boolean", str: "string"}  # kinds of single values
EXPLAINED_ELSEWHERE = {"Summary", "FigureSummary"}  # in the section on figures
NOT_OF_THEIR_FIELD = {("ModelEntry", "prepare"): Normalization}  # of a field that may hold something else as well


def tables(name: str) -> str:
    """The table of a file's objects, and one for each kind of object in them. name: "round"."""
    model = TABLES[name]
    parts = [_table(model)]
    for part, keys in _parts(model).items():
        named = " and ".join(f"`{key}`" for key in keys)
        parts.append(f"{named}: {_first_line(part)}\n\n{_table(part)}")
    return "\n".join(parts)


def _table(model: type[Record]) -> str:
    lines = ["| key | value | |", "| --- | --- | --- |"]
    for name, hint in _hints(model).items():
        field = model.model_fields[name]
        shape = _shape(hint)
        if (model.__name__, name) in NOT_OF_THEIR_FIELD:
            shape = "object, string or null"
        lines.append(f"| `{field.alias or name}` | {shape} | {field.description} |")
    return "\n".join(lines) + "\n"


def _hints(model: type[Record]) -> dict[str, Any]:
    """The fields' types, in the order of the file."""
    hints = typing.get_type_hints(model, include_extras=True)
    return {name: hints[name] for name in model.model_fields}


def _first_line(model: type[Record]) -> str:
    text = (model.__doc__ or "").partition("\n")[0]
    return text[0].lower() + text[1:]


def _parts(model: type[Record]) -> dict[type[Record], list[str]]:
    """The kinds of objects in a model, each with the keys that hold one."""
    found: dict[type[Record], list[str]] = {}
    for name, hint in _hints(model).items():
        inner = list(_models_in(hint))
        if (model.__name__, name) in NOT_OF_THEIR_FIELD:
            inner.append(NOT_OF_THEIR_FIELD[model.__name__, name])
        for part in inner:
            if part.__name__ not in EXPLAINED_ELSEWHERE:
                found.setdefault(part, []).append(name)
    return found


def _models_in(hint: Any) -> Iterator[type[Record]]:
    if isinstance(hint, type) and issubclass(hint, Record):
        yield hint
    for inner in get_args(hint):
        yield from _models_in(inner)


def _shape(hint: Any, plural: bool = False) -> str:
    """What a value is, in words: "list of integers"."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _annotated_shape(hint, plural)
    if origin is Literal:
        return " or ".join(f"`{text}`" for text in get_args(hint))
    if origin in (Union, types.UnionType):
        shape = _shape(_other_than_null(hint), plural)
        return f"{shape}, or null" if " of " in shape else f"{shape} or null"
    if origin is list:
        entries = _shape(get_args(hint)[0], plural=True)
        return f"{'lists' if plural else 'list'} of {entries}"
    if origin is dict:
        name = "objects" if plural else "object"
        entry = get_args(hint)[1]
        return name if entry is Any else f"{name} of {_shape(entry, plural=True)}"
    if hint is Any:
        return "any value"
    if hint.__name__ in EXPLAINED_ELSEWHERE:
        return "summaries" if plural else "summary"
    return "objects" if plural else "object"


def _annotated_shape(hint: Any, plural: bool) -> str:
    inner, *marks = get_args(hint)
    if any(isinstance(mark, FieldType) for mark in marks):
        return f"{SINGLE[inner]}s" if plural else SINGLE[inner]
    if get_origin(inner) in (Union, types.UnionType):  # a key that is only sometimes there, and then not null
        inner = _other_than_null(inner)
    return _shape(inner, plural)


def _other_than_null(union: Any) -> Any:
    return next(arg for arg in get_args(union) if arg is not type(None))
