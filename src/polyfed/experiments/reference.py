"""What methods and the keys of recipes are, read off their classes; `polyfed methods` and `polyfed recipe` show it.

A method is described by its docstrings, its requirements and the comments next to its hyperparameters. What a key of a
section means is the description of its field. The page docs/reference/recipe.md is made of it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from polyfed.config.recipe import Recipe
from polyfed.config.resolve import to_toml
from polyfed.config.schema import SECTIONS, MethodChoice, PluginChoice
from polyfed.core.method import Method
from polyfed.core.modules import HEAD
from polyfed.errors import ConfigError
from polyfed.own_methods import method_class
from polyfed.plugins.settings import Profile
from polyfed.registry import suggest
from polyfed.validation.settings import flat_fields

__all__ = ["Key", "Section", "format_value", "kind_of", "list_hyperparameters", "page", "section_of", "sections"]

_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True)
class Key:
    """A key of a recipe.

    Attributes:
        name: with dots where it is of a table in the section.
        type: the values that it takes, in words.
        default: as a recipe has it; "required" where there is none, "none" where the key is left out.
        meaning: what it does.
    """

    name: str
    type: str
    default: str
    meaning: str


_PAPER = re.compile(r"\(([^()]*(?:19|20)\d\d[^()]*)\)")
_SENT = re.compile(r"^Sent: down (.*?); up (.*?)\. Kept: (.*?)\.$\n?", re.DOTALL | re.MULTILINE)


def page(name: str, beside: Sequence[str] = ()) -> dict[str, Any]:
    """Describe one method: name, paper, differs, down, up, states, scored, needs, hyperparameters (each a `Key`),
    summary, text and deviations (from its paper).

    The paper stands in brackets in the first paragraph of the module's docstring, and what is sent in a line of it:
    "Sent: down P; up P + 1. Kept: server: w."

    Args:
        name: of a registered method, or ``"package.module:Class"``. beside: folders with the module.

    Raises:
        ConfigError: there is no such method.
    """
    kind: Any = method_class(name, beside)
    summary, _, own = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
    title, _, whole = (inspect.getdoc(inspect.getmodule(kind)) or "").partition("\n\n")
    paper = _PAPER.search(" ".join(title.split()))
    sent = _SENT.search(own or whole)
    text, head, deviations = _SENT.sub("", own or whole).partition("Deviations from ")
    method = kind()
    needs = []
    for field in dataclasses.fields(method.requirements):
        value = getattr(method.requirements, field.name)
        if value != field.default and field.name != "hint":
            needs.append(field.name if value is True else f"{field.name}={value}")
    down, up, states = (" ".join(part.split()) for part in sent.groups()) if sent else ("", "", "")
    return {
        "name": name,
        "paper": paper[1] if paper else "none",
        "differs": _may_differ(kind),
        "down": down,
        "up": up,
        "states": states,
        "scored": method.evaluation_stage,
        "needs": needs,
        "hyperparameters": list_hyperparameters(kind),
        "summary": " ".join(summary.split()),
        "text": text.strip("\n"),
        "deviations": " ".join(f"{head}{deviations}".split()),
    }


def _may_differ(kind: type[Method]) -> str:
    """What may differ between clients' models, with the default hyperparameters and with other choices of one."""
    usual = _allowed(kind())
    others: dict[str, list[str]] = {}
    for name, field in flat_fields(kind).items():
        for choice in typing.get_args(field.annotation) if typing.get_origin(field.annotation) is Literal else ():
            with contextlib.suppress(ConfigError):  # the choice needs another hyperparameter, too
                others.setdefault(_allowed(kind(**{name: choice})), []).append(str(choice))
    more = [f"{', '.join(choices)}: {allowed}" for allowed, choices in others.items() if allowed != usual]
    return f"{usual} ({', '.join(more)})" if more else usual


def _allowed(method: Method) -> str:
    """What a method's requirements leave free."""
    needs = method.requirements
    if needs.same_architecture:
        kind = type(method)
        has_sub_models = kind.variant is not Method.variant or "shares" in flat_fields(kind)  # shares of the weights
        return "size: sub-models of one network" if has_sub_models else "nothing"
    shares_more = needs.shared_shapes and needs.shared_parts != HEAD
    if needs.same_head and not shares_more:
        head = "a linear head of equal width" if needs.linear_head else "heads with the same tensors"
        return f"anything before the head; {head}"
    free = "depth; same-named tensors need the same shape" if shares_more else "anything"
    cuts = "; cuts of equal shape" if needs.same_cut_shapes else ""
    return f"{free}{cuts}" + ("; equal feature width" if needs.same_feature_dim else "")


def format_value(value: Any) -> str:
    """A value as a recipe has it."""
    if value is None:
        return "none"
    return str(value) if isinstance(value, Mapping) else to_toml(value)


def kind_of(hint: Any) -> str:
    """What values a key of this type takes, in words. TOML has no none: such a key is left out.

    >>> kind_of(bool), kind_of(Literal["a", "b"]), kind_of(int | None)
    ('true or false', '"a" or "b"', 'whole number')
    """
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin is typing.Annotated:
        rules = [getattr(one, "metadata", ()) for one in inner[1:]]
        bounds = [
            f"{sign} {getattr(rule, key):g}"
            for rule in itertools.chain(*rules)
            for key, sign in _SIGNS.items()
            if hasattr(rule, key)
        ]
        return " ".join([kind_of(inner[0]), " and ".join(bounds)]).rstrip()
    if origin is Literal:
        return " or ".join(format_value(value) for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(kind_of(one) for one in inner if one is not type(None))
    if origin is list:
        return f"list of {kind_of(inner[0])}"
    if origin is dict:
        return "table" if inner[1] is Any else f"table of {kind_of(inner[1])}"
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return "table"
    return _KINDS.get(hint, getattr(hint, "__name__", str(hint)))


def list_hyperparameters(kind: type[Any]) -> list[Key]:
    """The fields of a method's class in order, those of a table by their dotted names.

    Where its source cannot be read, they have no meaning.
    """
    help_texts = {name: words for base in reversed(kind.__mro__) for name, words in _comments(base).items() if words}
    hints = typing.get_type_hints(kind, include_extras=True)
    found = []
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.default):
            inner = list_hyperparameters(type(field.default))
            found += [dataclasses.replace(one, name=f"{field.name}.{one.name}") for one in inner]
        else:
            default = format_value(field.default)
            found.append(Key(field.name, kind_of(hints[field.name]), default, help_texts.get(field.name, "")))
    return found


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


# recipes ------------------------------------------------------------------------------------------------------------


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


def section_of(name: str) -> Section:
    """A section by its name.

    Raises:
        ConfigError: there is none such; tells the nearest.
    """
    known = {section.name: section for section in sections()}
    if name not in known:
        raise ConfigError(f"unknown section '{name}'{suggest(name, known)}")
    return known[name]
