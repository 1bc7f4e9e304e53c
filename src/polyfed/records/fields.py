"""What the values of a run's files may be: the kinds of single values, and the base class of their models.

A file may come from anywhere, so values are taken as JSON has them and never converted: true is no number, 1.5 no
whole number. A value that does not fit is named in one line with its place: ``'accuracy.personal.mean': expected a
number, got 'high'``.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from polyfed.records.main_score import RMSE, as_accuracy

T = TypeVar("T")
R = TypeVar("R", bound="Record")

_LARGEST = 2**63  # from here on numbers are no counts and no measurements, and tables cannot show them
LARGEST_SCORE = 1e100  # of scores in any unit, as training may diverge; squares and sums of such are finite
_LONGEST = 60  # characters of a value, or of a key, in an error


@dataclass(frozen=True)
class FieldType:
    """A kind of single value, to be put into `Annotated`.

    Attributes:
        name: "a number", for errors. fits: whether a value is of this kind.
    """

    name: str
    fits: Callable[[Any], bool]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def check(self, value: Any) -> Any:
        """The value itself.

        Raises:
            PydanticCustomError: it is none of this kind.
        """
        if not self.fits(value):
            raise PydanticCustomError("kind", "{name}", {"name": self.name})
        return value


def _is_number(value: Any, below: float = _LARGEST) -> bool:
    """NaN passes, as older runs have some."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) >= below


def _is_loss(value: Any) -> bool:
    return isinstance(value, float) or _is_number(value)


def _is_score(value: Any) -> bool:
    return _is_number(value, LARGEST_SCORE)


def _is_figure(value: Any) -> bool:
    return _is_score(value) or value in (math.inf, -math.inf)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST


Number = Annotated[float, FieldType("a number", _is_number)]
Loss = Annotated[float, FieldType("a number", _is_loss)]  # of any size, as training may diverge
Score = Annotated[float, FieldType("a number", _is_score)]
Figure = Annotated[float, FieldType("a number", _is_figure)]  # a user's own may be infinite
Count = Annotated[int, FieldType("a whole number", _is_count)]
Flag = Annotated[bool, FieldType("true or false", lambda value: isinstance(value, bool))]
Text = Annotated[str, FieldType("a text", lambda value: isinstance(value, str))]


def number_between(low: float, high: float) -> FieldType:
    """A number from `low` to `high`."""
    name = f"a number from {low:g} to {high:g}"
    return FieldType(name, lambda value: _is_number(value) and low <= value <= high)


def count_between(low: int, high: int) -> FieldType:
    """A whole number from `low` to `high`."""
    name = f"a whole number from {low} to {high}"
    return FieldType(name, lambda value: _is_count(value) and low <= value <= high)


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise PydanticCustomError("null", "a value")
    return value


# None is what a key that is not there becomes; null in the file is refused
IfPresent = Annotated[T | None, BeforeValidator(_refuse_null)]


class Record(BaseModel):
    """An object of a file. Keys that no field names are ignored: a later version may have written them."""

    model_config = ConfigDict(frozen=True, extra="ignore", validate_default=False, defer_build=True)


class ScoredRecord(Record):
    """A record with a main score, the accuracy or the RMSE."""

    @model_validator(mode="before")
    @classmethod
    def _under_one_name(cls, value: Any) -> Any:
        """The RMSE as the attributes of the accuracy."""
        if not isinstance(value, Mapping) or RMSE.name not in value:
            return value
        return as_accuracy(value)


def validated(model: type[R], value: Any, place: str = "") -> R:
    """The value as the model has it. place: where it lies in its file, for the error.

    Raises:
        ValueError: it does not fit; says where, what was expected and what is there.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ValueError(_line(error, place)) from None
    except RecursionError:
        raise ValueError("nested too deep") from None


_EXPECTED = {
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "string_type": "a text",
}


def _line(error: ValidationError, place: str) -> str:
    """The first thing that does not fit, in one line."""
    first: Mapping[str, Any] = error.errors(include_url=False)[0]
    steps = list(first["loc"])
    if steps[-1:] == ["[key]"]:  # a key, and not its value, does not fit
        del steps[-2:]
    if first["type"] == "missing":
        expected = f"the key '{steps.pop()}'"
        got = "none"
    else:
        expected = _EXPECTED.get(first["type"]) or first.get("ctx", {}).get("expected") or first["msg"]
        got = f"{_SHORT.repr(first['input']):.{_LONGEST}}"
    where = _path(place, steps)
    text = f"expected {expected}, got {got}"
    return f"'{where}': {text}" if where else text


def _path(place: str, steps: Sequence[int | str]) -> str:
    """Keys and places in lists on the way to a value: ``releases[0].unit``."""
    path = place
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step:.{_LONGEST}}"
    return path.removeprefix(".")


_SHORT = reprlib.Repr()  # cut long, deep and large values
_SHORT.maxstring = _LONGEST
_SHORT.maxlong = _LONGEST
_SHORT.maxother = _LONGEST
_SHORT.maxlevel = 2
