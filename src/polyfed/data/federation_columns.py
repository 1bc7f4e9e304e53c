"""The columns of a federation whose clients' tables differ: which there are, in which unit, and what files call them.

A recipe names them in ``[data.features]``. A file has some of them, under the name that the recipe gives or one of
``names``; behind a name may stand the unit in brackets, "weight [lb]", else the values are in the recipe's.

    [data.features]
    age = { unit = "years" }
    weight = { unit = "kg", names = ["body mass"], convert = { lb = 0.45359237 } }
    temperature = { unit = "C", convert = { F = [0.555555556, -17.7777778] } }    # times, then plus
    sex = { categories = ["f", "m"] }

Shapes: N rows, F features.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator

from polyfed.data.samples import LabeledSamples, OwnColumns, TableColumns, as_number, is_missing
from polyfed.data.transforms import Prepare
from polyfed.errors import ConfigError, suggest
from polyfed.validation.settings import Settings

_HEADER = re.compile(r"(?P<name>.*\S)\s*\[(?P<unit>[^\[\]]*)\]")
_Factor = Annotated[float, Field(allow_inf_nan=False)]


class Feature(Settings):
    """One column of the federation: a number in a unit, or a category."""

    _place = ("data", "features")

    unit: str | None = Field(None, description="of a number, as in all files but those whose header names another")
    names: list[str] = Field([], description="what files may call it beside its own name")
    convert: dict[str, _Factor | Annotated[list[_Factor], Field(min_length=2, max_length=2)]] = Field(
        {}, description="other units: the factor to this one, or a factor and what is added then"
    )
    categories: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="all categories, in order; default: it is a number"
    )

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Feature:
        if self.categories is not None and (self.unit or self.convert):
            raise ValueError("expects a unit of a number, or categories, got both")
        if self.convert and self.unit is None:
            raise ValueError("convert expects the unit that it converts to, got none")
        if any((how[0] if isinstance(how, list) else how) == 0 for how in self.convert.values()):
            raise ValueError("convert expects factors other than 0, got 0")
        if self.unit in self.convert:
            raise ValueError(f"convert expects other units than '{self.unit}', got it")
        return self

    def converted(self, cell: str, unit: str) -> str:
        """A cell of a file in another unit; what is no number stays, and is refused where it is read."""
        value = as_number(cell)
        if value is None or is_missing(cell):
            return cell
        how = self.convert[unit]
        factor, added = how if isinstance(how, list) else (how, 0.0)
        return repr(value * factor + added)


def align(frame: Any, features: Mapping[str, Feature], where: object) -> Any:
    """A file's cells (a frame of text) under the federation's names and in its units; other columns stay.

    Args:
        where: the cells are from, for messages.

    Raises:
        ConfigError: two columns that are one, or a unit that the recipe neither has nor converts.
    """
    if not features:
        return frame
    called = {other: name for name, feature in features.items() for other in (name, *feature.names)}
    taken: dict[str, str] = {}
    cells = {}
    for header in frame.columns:
        match = _HEADER.fullmatch(header)
        spelt, unit = (match["name"], match["unit"].strip()) if match and header not in called else (header, None)
        name = called.get(spelt)
        if name is None:
            cells[header] = frame[header]
            continue
        if name in taken:
            raise ConfigError(f"expected one column '{name}' in {where}, got '{taken[name]}' and '{header}'")
        taken[name] = header
        cells[name] = _in_unit(frame[header], features[name], name, unit, where)
    return type(frame)(cells, index=frame.index)


def _in_unit(cells: Any, feature: Feature, name: str, unit: str | None, where: object) -> Any:
    if unit is None or unit == (feature.unit or ""):
        return cells
    if unit not in feature.convert:
        known = [*([feature.unit] if feature.unit else []), *feature.convert]
        expected = f"in {' or '.join(map(repr, known))}" if known else "without a unit"
        hint = "" if feature.categories else f"; data.features.{name}.convert says how other units become its own"
        raise ConfigError(
            f"expected column '{name}' {expected} in {where}, got '{unit}'{suggest(unit, known) if known else ''}{hint}"
        )
    return cells.map(lambda cell: feature.converted(cell, unit))


# what one client has of them -----------------------------------------------------------------------------------------


def own_columns(x: Any, columns: TableColumns, names: tuple[str, ...], prepare: Prepare) -> OwnColumns:
    """The columns in which a client has a value.

    Args:
        x: (N, F) the client's training rows with all columns of the federation. columns, names, prepare: of these.
    """
    flags = dict(columns.flags)
    count = len(names) - len(flags)
    categories = columns.categories or ((),) * len(names)
    # where clients have different columns each number has a feature that says whether it is missing
    has = [bool((x[:, flags[j]] == 0).any()) if j in flags else bool((x[:, j] > 0).any()) for j in range(count)]
    places = [j for j in range(count) if has[j]]
    flagged = [j for j in places if j in flags]
    kept = [*places, *(flags[j] for j in flagged)]
    pairs = tuple((places.index(j), len(places) + number) for number, j in enumerate(flagged))
    own = TableColumns(tuple(categories[j] for j in kept) if any(categories) else (), pairs, columns.own_means)
    widths = tuple(len(categories[j]) for j in range(count))
    prepare = prepare.of_features(kept)
    return OwnColumns(tuple(places), widths, tuple(names[j] for j in kept), own, tuple(kept), prepare.mean, prepare.std)


def with_all_columns(rows: LabeledSamples, own: OwnColumns | None, names: Sequence[str]) -> LabeledSamples:
    """A client's rows with all features of the federation: 0 in those that it lacks, which are said to be missing.

    Args:
        own: its columns; None: it has all. names: of the federation's features.
    """
    if own is None:
        return rows
    x = torch.zeros(len(rows), len(names))
    x[:, len(own.widths) :] = 1
    x[:, own.features] = rows.x
    return LabeledSamples(x, rows.y, rows.scale)
