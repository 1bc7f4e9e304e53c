"""Settings and hyperparameters that cannot be, in one line: where, what was expected, what was given, the nearest
valid name.

pydantic finds what is wrong, and `one_line` says it. `in_one_line` makes a class say it when it is made in Python; a
recipe asks pydantic itself, since it knows more of the place.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from polyfed.errors import ConfigError, suggest

__all__ = ["WrongSettings", "in_one_line", "one_line", "shown"]

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "a table",
    "model": "a table",
    "dataclass": "a table",
    "finite": "a finite number",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}

Sections = Mapping[str, type[BaseModel]]


class WrongSettings(ConfigError, ValueError):
    """Settings made in Python that cannot be; a ValueError, too, as pydantic's own complaint is.

    Attributes:
        complaints: pydantic's.
    """

    complaints: ValidationError


def in_one_line(init: Callable[..., None], say: Callable[[type, ValidationError], str]) -> Callable[..., None]:
    """An ``__init__`` of pydantic's that takes settings by name only, and whose complaints are one line.

    Args:
        init: pydantic's. say: (class, complaints) -> the line.
    """

    @functools.wraps(init)
    def checked(self: Any, *given: Any, **settings: Any) -> None:
        kind = type(self)
        if given:
            first = next(iter(_fields(kind)), "name")
            raise ConfigError(
                f"{kind.__name__}: expected each setting by its name, got {shown(given[0])} without one; write "
                f"{kind.__name__}({first}=...)"
            )
        try:
            init(self, **settings)
        except ValidationError as complaints:
            problem = WrongSettings(say(kind, complaints))
            problem.complaints = complaints
            raise problem from None

    return checked


def one_line(
    error: ValidationError,
    kind: type,
    place: tuple[str, ...] = (),
    known: Collection[str] | None = None,
    sections: Sections | None = None,
) -> str:
    """The first of pydantic's complaints: where, what was expected, what was given, the nearest valid name.

    Args:
        error: the complaints.
        kind: the class that was to be made.
        place: keys in front of pydantic's own.
        known: the valid keys at `place` of a method; None: `kind` has sections, or is one.
        sections: a recipe's, for a key that belongs to another one than it stands in.
    """
    complaints = error.errors(include_url=False)
    unknown = [c for c in complaints if c["type"] in ("extra_forbidden", "unexpected_keyword_argument")]
    first = (unknown or complaints)[0]  # an unknown key is often why another is missing
    own, valid = _place(kind, first["loc"])
    depth = len(own)
    if known is not None and depth == 1:
        valid = [*known]
    keys = (*place, *own)
    where = ".".join(keys)
    others = len({c["loc"][:depth] for c in complaints} - {first["loc"][:depth]})
    more = f" (and {others} more)" if others else ""
    if unknown:
        home = [name for name, one in (sections or {}).items() if keys[-1] in one.model_fields and name != keys[0]]
        hint = suggest(keys[-1], valid) if valid else ""
        if home and len(keys) == 2:
            hint = f"; it belongs to [{home[0]}]"
        return f"unknown key '{where}'{hint}{more}"
    if first["type"] == "missing":
        return f"expected {'the section' if len(keys) == 1 else 'the key'} '{where}', which is missing{more}"
    if first["type"] == "value_error":
        line = str(first["msg"]).removeprefix("Value error, ")
        return f"{f'{where}: ' if where else ''}{line}{more}"
    alike = [c for c in complaints if c["loc"][:depth] == first["loc"][:depth]]
    choices = [word for c in alike for word in re.findall(r"'([^']*)'", str(c.get("ctx", {}).get("expected", "")))]
    hint = suggest(str(first["input"]), choices) if choices else ""
    hint = hint if "did you mean" in hint else ""
    wanted = " or ".join(dict.fromkeys(map(_expected, alike)))
    return f"{where}: expected {wanted}, got {shown(first['input'])}{hint}{more}"


def _place(kind: Any, keys: Sequence[str | int]) -> tuple[list[str], list[str]]:
    """Those of pydantic's keys that lead to a setting, and the names that are valid in the place of the last.

    Args:
        kind: a recipe, one of its sections, or a class with hyperparameters. keys: below a setting that pydantic could
            read in several ways, they go on with the kinds that it tried.
    """
    found: list[str] = []
    valid: list[str] = []
    remaining = list(keys)
    while remaining:
        key = remaining.pop(0)
        found.append(str(key))
        valid = _fields(kind)
        field = kind.__pydantic_fields__.get(key)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        if remaining and field is not None and get_origin(field.annotation) is dict:
            found.append(str(remaining.pop(0)))  # a name of the user's own
            valid = []
        inner = [one for one in kinds if isinstance(one, type) and hasattr(one, "__pydantic_fields__")]
        if not inner or (issubclass(inner[0], BaseModel) and inner[0].model_config.get("extra") == "allow"):
            break
        kind = inner[0]
    return found + [str(key) for key in itertools.takewhile(lambda key: isinstance(key, int), remaining)], valid


def shown(value: Any) -> str:
    """A value as TOML writes it, shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return "a table"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _fields(kind: Any) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return [field.alias or name for name, field in kind.model_fields.items()]


def _expected(complaint: Any) -> str:
    """What one of pydantic's complaints would have liked."""
    kind = str(complaint["type"])
    context = complaint.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"])
    if kind in _BOUNDS:
        word, key = _BOUNDS[kind]
        return f"{word} {context[key]:g}"
    if kind == "too_short":
        fewest = context["min_length"]
        return f"at least {fewest} {'entry' if fewest == 1 else 'entries'}"
    return _KINDS.get(kind.partition("_")[0], str(complaint["msg"]))
