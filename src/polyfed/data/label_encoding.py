"""Labels as numbers 0..C-1, and what the classes are called."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.data.column_schema import Columns
from polyfed.data.samples import of_so_many
from polyfed.errors import ConfigError

_SIGNS = {-1, 1}  # the usual labels of two classes, beside 0 and 1
_WHOLE = re.compile(r"-?[0-9]+")

Files = Sequence[tuple[object, Sequence[int]]]  # what a side was read from, and the numbers of its rows, or lines


def encode_labels(
    raw: Mapping[str, NDArray[Any]], columns: Columns, files: Mapping[str, Files] | None = None
) -> tuple[dict[str, NDArray[np.int64]], tuple[str, ...]]:
    """Labels as 0..C-1 and the classes' names (see `read_folder`).

    Args:
        raw: side -> (N,) labels, int64 or strings.
        columns: where they stood, and the classes' names, if the files name them.
        files: side -> what it was read from, to name the row of a label that is refused.

    Raises:
        ConfigError: a number that is none of the named classes, or is below 0, unless all labels are -1 and 1.
    """
    values = np.unique(np.concatenate(list(raw.values())))
    names = columns.class_names
    if values.dtype == np.int64:
        if names is None and np.array_equal(values, np.arange(len(values))):
            names = tuple(str(value) for value in values)
        if names is not None:
            _check_labels(raw, set(range(len(names))), columns, files or {})
            return {side: marks.astype(np.int64) for side, marks in raw.items()}, names
    spelt = tuple(str(value) for value in values)
    if negative_name(spelt) is not None:
        _check_labels(raw, {value for value in values.tolist() if int(value) >= 0}, columns, files or {})
    return {side: np.searchsorted(values, marks).astype(np.int64) for side, marks in raw.items()}, spelt


def _check_labels(
    raw: Mapping[str, NDArray[Any]], known: Collection[Any], columns: Columns, files: Mapping[str, Files]
) -> None:
    """Refuse labels that are not known, by the first such row."""
    named = columns.class_names
    expected = f"from 0 on in column '{columns.label}'"
    if named is not None:
        expected = f"0..{len(named) - 1} in column '{columns.label}', which names {len(named)} classes"
    for side, labels in raw.items():
        rows = np.flatnonzero(~np.isin(labels, list(known)))
        if len(rows):
            first = labels[rows[0]]
            hint = "; -1 often means that there is none" if str(first) == "-1" else ""
            raise ConfigError(
                f"expected labels {expected}, got {first} in {_row_of(side, int(rows[0]), files.get(side, ()))}"
                f"{of_so_many(len(rows))}{hint}; drop such rows, or name the column of the labels in label_column"
            )


def _row_of(side: str, row: int, files: Files) -> str:
    """Where a side's row stands."""
    for file, numbers in files:
        if row < len(numbers):
            return f"{'row' if isinstance(numbers, range) else 'line'} {numbers[row]} of {file}"
        row -= len(numbers)
    return f"row {row} of the {'training' if side == 'train' else side} side"


def negative_name(names: Iterable[str]) -> str | None:
    """A class called by a number below 0, where all are called by numbers; None for the classes -1 and 1 alone."""
    different = set(names)
    if different <= {str(sign) for sign in _SIGNS} or not all(_WHOLE.fullmatch(name) for name in different):
        return None
    return next((name for name in sorted(different) if name.startswith("-")), None)


def natural_sort(names: Iterable[str]) -> tuple[str, ...]:
    """Names without repetition, sorted; by value where all are whole numbers."""
    different = set(names)
    numbers = all(name.isascii() and name.isdigit() for name in different)
    return tuple(sorted(different, key=lambda name: (int(name) if numbers else 0, name)))
