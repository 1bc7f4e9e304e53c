"""The table of methods: model heterogeneity, communication, state and hyperparameters.

Its source are the methods' own files: class variables of `Method`, and comments next to the hyperparameters.
"""

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

from polyfed.registry import METHODS
from polyfed.validation.hyperparameters import flat_hints

__all__ = ["Hyperparameter", "describe", "format_value", "list_hyperparameters", "page", "to_markdown"]

_SYMBOLS = (
    (
        "P",
        "floats of a client's network: weights and float buffers; P(r): at width r; P(l): at level l; P(d): at depth d",
    ),
    ("P_h, P_G", "of its head, of a feature generator"),
    ("P_m, P_A(r)", "of the auxiliary model, of adapters of rank r"),
    ("K (m + n + 1)", "an m x n matrix as its K largest singular values with their vectors"),
    ("C, S, D", "classes of the task, classes of the client, input features of the head (closed-form: its `features`)"),
    ("L, r", "public inputs, columns of the mean kernel's factor"),
    ("n_S, q", "pairs of intermediate features, floats of one pair"),
    ("M, M_k, K_k", "other clients' models, personal entries of client k, entries of its sub-model"),
    ("S(r), S(l)", "floats of BatchNorm's statistics at width r, at level l"),
    ("w, phi, h", "weights, those of the extractor, those of the head; w_k, h_k: client k's"),
    ("c, m, a, A", "control variates, momentum or masks, anchors, affinities; c_k, m_k, a_k: client k's"),
)


_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): "none"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True)
class Hyperparameter:
    """A setting of a method. name: as a recipe has it. default: its value. about: what the comment beside it says."""

    name: str
    default: Any
    about: str


# what a method is -------------------------------------------------------------------------------------------------


def describe() -> list[dict[str, Any]]:
    """One row per registered method: name, paper, differs, down, up, states, scored, needs, hyperparameters (name ->
    default) and about (name -> what the hyperparameter does).
    """
    return [_described(name, kind) for name, kind in METHODS.items()]


def page(name: str, beside: Sequence[str] = ()) -> dict[str, Any]:
    """Describe one method: a row of `describe`, kinds (hyperparameter -> accepted values), summary, text and deviations
    (from its paper).

    Args:
        name: of a registered method, or ``"package.module:Class"``. beside: folders with the module.

    Raises:
        ConfigError: there is no such method.
    """
    from polyfed.own_methods import method_class

    kind: Any = method_class(name, beside)
    summary, _, own = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
    _, _, whole = (inspect.getdoc(inspect.getmodule(kind)) or "").partition("\n\n")
    text, head, deviations = (own or whole).partition("Deviations from the paper")
    return {
        **_described(name, kind),
        "kinds": {setting: kind_of(hint) for setting, hint in flat_hints(kind).items()},
        "summary": " ".join(summary.split()),
        "text": text.strip("\n"),
        "deviations": " ".join(f"{head}{deviations}".split()),
    }


def _described(name: str, kind: Any) -> dict[str, Any]:
    method = kind()
    own = list_hyperparameters(kind)
    card = {key: getattr(kind.card, key) for key in ("paper", "differs", "down", "up", "states")}
    card["paper"] += " (a reading)" if kind.card.reading else ""
    row = {"name": name, **card, "scored": method.evaluation_stage, "needs": _needs(method.requirements)}
    return row | {"hyperparameters": {k.name: k.default for k in own}, "about": {k.name: k.about for k in own}}


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
    given = {f.name: getattr(needs, f.name) for f in dataclasses.fields(needs) if f.name != "instead"}
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


# showing ----------------------------------------------------------------------------------------------------------


def symbols_in(text: str) -> list[tuple[str, str]]:
    """Symbols that occur in a description of sizes, with their meanings."""
    words = set(re.findall(r"[A-Za-z]+(?:_\w+)?", text))
    return [entry for entry in _SYMBOLS if words & set(re.findall(r"[A-Za-z]+(?:_\w+)?", entry[0]))]


def to_markdown() -> str:
    """The page docs/methods/README.md."""
    lines = [
        "| method | paper | may differ between clients | download | upload | state between rounds | evaluation stage "
        "| hyperparameters |",
        f"|{' --- |' * 8}",
    ]
    for row in describe():
        own = ", ".join(f"`{name}` {format_value(default)}" for name, default in row["hyperparameters"].items())
        cells = [row[key] for key in ("paper", "differs", "down", "up", "states")]
        cells = [f"[{row['name']}]({row['name']}.md)", *cells, f"`{row['scored']}`", own or "none"]
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    symbols = "\n".join(f"| {_cell(symbol)} | {_cell(meaning)} |" for symbol, meaning in _SYMBOLS)
    return (
        "# Methods\n\n"
        "Generated by `polyfed methods --markdown`; `polyfed methods NAME` explains a method and its hyperparameters.\n"
        "Sizes are numbers of 4 bytes per client and round, unless stated otherwise. For bytes with your models and\n"
        "data, and for the methods that support them: `polyfed check RECIPE.toml --methods all`.\n\n"
        "On all pages, unless stated otherwise: different architectures are averaged layer by layer, each tensor over\n"
        "the clients that have it (tensors of the same name need the same shape), or within each architecture\n"
        '(`aggregation = "same-shape"`), where papers have a single architecture; BatchNorm\'s running statistics are\n'
        "averaged like weights, and its batch counter stays local. Accuracies are fractions unless in %. `received`\n"
        "and `personal` are [evaluation stages](../evaluation.md).\n\n"
        + "\n".join(lines)
        + "\n\n| symbol | |\n| --- | --- |\n"
        + symbols
        + "\n"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def format_value(value: Any) -> str:
    """A value as a recipe has it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
