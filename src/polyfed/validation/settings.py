"""What sections of a recipe have in common: they are read-only, checked when they are made, and errors are one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from polyfed.validation.effect import idle, without_effect
from polyfed.validation.error_lines import in_one_line, one_line


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
