"""What a method is, read off its class: class variables of `Method`, and comments next to the hyperparameters."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from polyfed.experiments.method_table import format_value
from polyfed.own_methods import method_class
from polyfed.validation.hyperparameters import flat_hints

__all__ = ["Hyperparameter", "kind_of", "list_hyperparameters", "page"]

_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): "none"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True)
class Hyperparameter:
    """A setting of a method. name: as a recipe has it. default: its value. about: what the comment beside it says."""

    name: str
    default: Any
    about: str


def page(name: str, beside: Sequence[str] = ()) -> dict[str, Any]:
    """Describe one method: name, paper, differs, down, up, states, scored, needs, hyperparameters (name -> default),
    about (name -> what the hyperparameter does), kinds (name -> accepted values), summary, text and deviations (from
    its paper).

    Args:
        name: of a registered method, or ``"package.module:Class"``. beside: folders with the module.

    Raises:
        ConfigError: there is no such method.
    """
    kind: Any = method_class(name, beside)
    summary, _, own = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
    _, _, whole = (inspect.getdoc(inspect.getmodule(kind)) or "").partition("\n\n")
    text, head, deviations = (own or whole).partition("Deviations from ")
    method = kind()
    card = {key: getattr(kind.card, key) for key in ("paper", "differs", "down", "up", "states")}
    card["paper"] += " (a reading)" if kind.card.reading else ""
    settings = list_hyperparameters(kind)
    return {
        "name": name,
        **card,
        "scored": method.evaluation_stage,
        "needs": _needs(method.requirements),
        "hyperparameters": {one.name: one.default for one in settings},
        "about": {one.name: one.about for one in settings},
        "kinds": {setting: kind_of(hint) for setting, hint in flat_hints(kind).items()},
        "summary": " ".join(summary.split()),
        "text": text.strip("\n"),
        "deviations": " ".join(f"{head}{deviations}".split()),
    }


def kind_of(hint: Any) -> str:
    """What values a hyperparameter of this type takes, in words.

    >>> kind_of(bool), kind_of(Literal["a", "b"]), kind_of(int | None)
    ('true or false', '"a" or "b"', 'whole number or none')
    """
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin is typing.Annotated:
        rules = [getattr(one, "metadata", ()) for one in inner[1:]]
        bounds = [word for one in itertools.chain(*rules) for word in _bounds(one)]
        return " ".join([kind_of(inner[0]), " and ".join(bounds)]).rstrip()
    if origin is Literal:
        return " or ".join(format_value(value) for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(kind_of, inner))
    if origin is list:
        return f"list of {kind_of(inner[0])}"
    if origin is dict:
        return "table" if inner[1] is Any else f"table of {kind_of(inner[1])}"
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return "table"
    return _KINDS.get(hint, getattr(hint, "__name__", str(hint)))


def _bounds(rule: Any) -> list[str]:
    """A bound of pydantic's as it is written."""
    return [f"{sign} {getattr(rule, key):g}" for key, sign in _SIGNS.items() if hasattr(rule, key)]


def list_hyperparameters(kind: type[Any]) -> list[Hyperparameter]:
    """The fields of a method's class in order, those of a table by their dotted names.

    Where its source cannot be read, they have no help text.
    """
    help_texts = {name: words for base in reversed(kind.__mro__) for name, words in _comments(base).items() if words}
    found = []
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.default):
            inner = list_hyperparameters(type(field.default))
            found += [dataclasses.replace(one, name=f"{field.name}.{one.name}") for one in inner]
        else:
            found.append(Hyperparameter(field.name, field.default, help_texts.get(field.name, "")))
    return found


def _needs(needs: Any) -> list[str]:
    """What is not off."""
    given = {f.name: getattr(needs, f.name) for f in dataclasses.fields(needs) if f.name != "hint"}
    off = {f.name: f.default for f in dataclasses.fields(needs)}
    return [name if value is True else f"{name}={value}" for name, value in given.items() if value != off[name]]


@functools.cache
def _comments(kind: type[Any]) -> dict[str, str]:
    """Name of a class's field -> the comments at the end of its lines, or else those on the lines right above it.

    A comment, as it keeps 130 fields of methods to a line each; pydantic's own way takes two or more.
    """
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        return {}
    lines = [re.split(r"(?:^|\s)# ", line) for line in source.splitlines()]
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            comments = [line[1] for line in lines[node.lineno - 1 : node.end_lineno] if len(line) > 1]
            above = itertools.takewhile(
                lambda line: not line[0].strip() and len(line) > 1, lines[node.lineno - 2 :: -1]
            )
            found[node.target.id] = " ".join(comments or [line[1] for line in above][::-1])
    return found
