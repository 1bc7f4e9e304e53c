"""Settings that are read-only and checked when they are made; errors are one line.

`Settings` is the class of a recipe's sections. Hyperparameters are the fields of a method's class, and of the tables
that it has:

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
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from polyfed.validation.effect import idle, without_effect
from polyfed.validation.error_lines import WrongSettings, in_one_line, one_line

__all__ = ["Settings", "flat_fields", "flat_settings", "hyperparameters", "repr_of_changes", "table"]


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


# sections of a recipe -----------------------------------------------------------------------------------------------


class Settings(BaseModel):
    """Strict and frozen: an unknown key, a wrong type or a setting without effect is an error, never a guess."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)
    _place: ClassVar[tuple[str, ...] | None] = None  # what a recipe calls it; None: as the class, in small letters
    _switches: ClassVar[tuple[str, ...]] = ()  # keys that are off at their default
    _sections: ClassVar[dict[str, type[BaseModel]]] = {}  # of a recipe, to tell where a misplaced key belongs

    if not TYPE_CHECKING:  # where types are checked, each class has its own
        __init__ = in_one_line(BaseModel.__init__, lambda kind, complaints: _error_line(kind, complaints))

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """What a text of the settings tells: those that are not the default."""
        fields = type(self).model_fields
        for name, value in super().__repr_args__():
            if name not in fields or value != fields[name].get_default(call_default_factory=True):
                yield name, value

    def __str__(self) -> str:
        return repr(self)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values, which are not checked; raises TypeError for a name that is no setting."""
        unknown = set(update or ()) - set(type(self).model_fields)
        if unknown:
            raise TypeError(f"expected settings of {type(self).__name__}, got {', '.join(sorted(unknown))}")
        return super().model_copy(update=update, deep=deep)

    def effective(self) -> dict[str, Any]:
        """What a run folder keeps: no None, and nothing that is switched off or that has no effect."""
        return self.model_dump(exclude_none=True, exclude=self._inactive_keys())

    def _inactive_keys(self) -> set[str]:
        """The keys that are switched off, or have no effect beside the others."""
        fields = type(self).model_fields
        defaults = {key: fields[key].get_default(call_default_factory=True) for key in self._switches}
        off = {key for key, default in defaults.items() if getattr(self, key) == default}
        return off | set(idle(fields, vars(self)))

    @model_validator(mode="after")
    def _all_act(self) -> Self:
        if idle_keys := without_effect(type(self).model_fields, vars(self), self.model_fields_set):
            raise ValueError(idle_keys)
        return self


def _error_line(kind: type[Settings], complaints: ValidationError) -> str:
    """The line that a recipe gives, of settings made in Python."""
    place = (kind.__name__.lower(),) if kind._place is None else kind._place
    return one_line(complaints, kind, place, sections=Settings._sections)
