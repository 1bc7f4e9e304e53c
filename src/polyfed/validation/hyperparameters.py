"""Hyperparameters: the fields of a method's class and of the tables that it has, checked when they are set.

    @hyperparameters
    class MeanKernel:
        rank: Annotated[int, Field(ge=1)] = 128  # columns of the factor

    @hyperparameters
    class FedHeNN(Method):
        eta0: Annotated[float, Field(ge=0)] = 0.001  # weight of the alignment
        kernel: Annotated[MeanKernel, table(MeanKernel)] = MeanKernel()

In a recipe `rank` is then a key of ``[method.kernel]``; its dotted name is "kernel.rank".
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from polyfed.validation.effect import without_effect
from polyfed.validation.error_lines import WrongSettings, in_one_line, one_line

__all__ = ["flat_fields", "flat_settings", "hyperparameters", "repr_of_changes", "table"]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def hyperparameters(cls: type[Any]) -> type[Any]:
    """Makes a class a frozen dataclass whose fields are checked: type, range, unknown names, NaN, and whether those act
    that were given (`validation.effect`).

    What is wrong with them is one line, a `ConfigError`.
    """
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    made: Any = pydantic_dataclass(frozen=True, kw_only=True, config=config, repr=False)(cls)
    made.__init__ = in_one_line(_all_acting(made.__init__), _line_of)
    if made.__repr__ is object.__repr__:
        made.__repr__ = repr_of_changes
    checked: type[Any] = made
    return checked


def table(kind: type[Any]) -> BeforeValidator:
    """Beside a field that is a table of settings: besides an object of `kind` it takes a mapping of its settings."""

    def made(given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        try:
            return kind(**given)
        except WrongSettings as problem:
            raise problem.complaints from None  # pydantic puts the field's name in front of each

    return BeforeValidator(made)


def flat_fields(kind: Any) -> dict[str, Any]:
    """Dotted name -> pydantic's field, of all settings of a class and of its tables."""
    found: dict[str, Any] = {}
    for name, field in getattr(kind, "__pydantic_fields__", {}).items():
        if dataclasses.is_dataclass(field.annotation):
            found |= {f"{name}.{inner}": own for inner, own in flat_fields(field.annotation).items()}
        else:
            found[name] = field
    return found


def flat_settings(settings: Any) -> dict[str, Any]:
    """Dotted name -> value, of all settings of an object and of its tables."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            found |= {f"{field.name}.{inner}": own for inner, own in flat_settings(value).items()}
        else:
            found[field.name] = value
    return found


def repr_of_changes(settings: Any) -> str:
    """The settings that are not at their defaults."""
    values = [(field.name, getattr(settings, field.name), field.default) for field in dataclasses.fields(settings)]
    changed = [f"{name}={value!r}" for name, value, default in values if value != default]
    return f"{type(settings).__name__}({', '.join(changed)})"


def _all_acting(init: Callable[..., None]) -> Callable[..., None]:
    """An ``__init__`` that also complains, as pydantic does, of a setting that was given and does nothing."""

    @functools.wraps(init)
    def checked(self: Any, **given: Any) -> None:
        init(self, **given)
        line = without_effect(flat_fields(type(self)), flat_settings(self), _flat_names(given))
        if line:
            problem: Any = {"type": "value_error", "loc": (), "input": given, "ctx": {"error": ValueError(line)}}
            raise ValidationError.from_exception_data(type(self).__name__, [problem])

    return checked


def _flat_names(given: Mapping[str, Any]) -> set[str]:
    """The dotted names of the settings that were given; of a table that is an object, of all."""
    names: set[str] = set()
    for name, value in given.items():
        inner = flat_settings(value) if dataclasses.is_dataclass(value) else value
        if isinstance(inner, Mapping):
            names |= {f"{name}.{key}" for key in inner}
        else:
            names.add(name)
    return names


def _line_of(kind: type[Any], complaints: ValidationError) -> str:
    """The line that a recipe gives, of settings made in Python."""
    names = [field.name for field in dataclasses.fields(kind)]
    return one_line(complaints, kind, (getattr(kind, "name", kind.__name__),), names)
