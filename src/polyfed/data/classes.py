"""Classes: labels as numbers 0..C-1, what the classes are called, and what is odd about them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.data.samples import of_so_many
from polyfed.errors import ConfigError

Files = Sequence[tuple[object, Sequence[int]]]  # what a side was read from, and the numbers of its rows, or lines

_SIGNS = {"-1", "1"}  # the usual labels of two classes, beside 0 and 1
_WHOLE = re.compile(r"-?[0-9]+")
_DIGITS = 18  # of numbers in which gaps are looked for
_NAMED = 12  # classes by name; of more, how many


def encode_labels(
    raw: Mapping[str, NDArray[Any]],
    column: str,
    names: tuple[str, ...] | None = None,
    files: Mapping[str, Files] | None = None,
) -> tuple[dict[str, NDArray[np.int64]], tuple[str, ...]]:
    """Labels as 0..C-1 and the classes' names.

    Labels are kept as they are where the files name the classes or where they are whole numbers that fill 0..C-1.
    Otherwise (0 and 4, or strings) the sorted different values of both sides become 0..C-1, their spelling the names. A
    number below 0 is refused, unless all labels are -1 and 1.

    Args:
        raw: side -> (N,) labels, int64 or strings. column: where they stood.
        names: of the classes, if the files name them.
        files: side -> what it was read from, to name the row of a label that is refused.
    """
    values = np.unique(np.concatenate(list(raw.values())))
    expected = f"from 0 on in column '{column}'"
    if values.dtype == np.int64:
        if names is not None:
            expected = f"0..{len(names) - 1} in column '{column}', which names {len(names)} classes"
        elif np.array_equal(values, np.arange(len(values))):
            names = tuple(map(str, values))
        if names is not None:
            _check_labels(raw, range(len(names)), expected, files or {})
            return {side: labels.astype(np.int64) for side, labels in raw.items()}, names
    spelt = tuple(map(str, values))
    if negative_name(spelt) is not None:
        _check_labels(raw, [value for value in values.tolist() if int(value) >= 0], expected, files or {})
    return {side: np.searchsorted(values, labels).astype(np.int64) for side, labels in raw.items()}, spelt


def _check_labels(
    raw: Mapping[str, NDArray[Any]], known: Sequence[Any], expected: str, files: Mapping[str, Files]
) -> None:
    """Refuse labels that are not known, by the first such row."""
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
    if different <= _SIGNS or not all(_WHOLE.fullmatch(name) for name in different):
        return None
    return next((name for name in sorted(different) if name.startswith("-")), None)


def natural_sort(names: Iterable[str]) -> tuple[str, ...]:
    """Names without repetition, sorted; by value where all are whole numbers."""
    different = set(names)
    numbers = all(name.isascii() and name.isdigit() for name in different)
    return tuple(sorted(different, key=lambda name: (int(name) if numbers else 0, name)))


def remarks(names: Sequence[str], trained: Collection[int], tested: Collection[int]) -> list[str]:
    """A line for each thing that is odd.

    Args:
        names: what the classes are called, class 0 first.
        trained: the classes that anybody trains on. tested: those that anybody has test rows of.

    >>> for line in remarks(["0", "1", "9"], trained={0}, tested={0, 2}): print(line)
    labels are numbers with gaps: 0, 1, 9 became the classes 0 to 2; a stray one is a class of its own
    classes with test rows that nobody trains on (1): 2 (9)
    classes that nobody trains on or is tested on (1): 1
    """
    unknown = [number for number in range(len(names)) if number not in trained]
    return [
        *_gaps(names),
        *_listed("classes with test rows that nobody trains on", [n for n in unknown if n in tested], names),
        *_listed("classes that nobody trains on or is tested on", [n for n in unknown if n not in tested], names),
    ]


def _gaps(names: Sequence[str]) -> Iterator[str]:
    """Where numbers that do not follow each other were taken for classes."""
    if not all(_WHOLE.fullmatch(name) and len(name) <= _DIGITS for name in names):
        return
    numbers = sorted(map(int, names))
    if any(after - before > 1 for before, after in pairwise(numbers)):
        yield (
            f"labels are numbers with gaps: {_ranges(numbers)} became the classes 0 to {len(names) - 1}; a stray one "
            "is a class of its own"
        )


def _listed(what: str, classes: Sequence[int], names: Sequence[str]) -> Iterator[str]:
    if not classes:
        return
    listed = _ranges(classes)
    if any(names[number] != str(number) for number in classes):
        listed = _few(
            str(number) if names[number] == str(number) else f"{number} ({names[number]})" for number in classes
        )
    yield f"{what} ({len(classes)}): {listed}"


def _ranges(numbers: Sequence[int]) -> str:
    """Whole numbers in order, those that follow each other as a range: "0 to 19, 25"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    texts = []
    for run in runs:
        apart = len(run) == 1 or run[1] == run[0] + 1
        texts.append(", ".join(map(str, run)) if apart else f"{run[0]} to {run[1]}")
    return _few(texts)


def _few(texts: Iterable[str]) -> str:
    """At most `_NAMED` of them."""
    given = list(texts)
    more = len(given) - _NAMED
    return ", ".join(given[:_NAMED]) + (f" and {more} more" if more > 0 else "")
