"""Classes: labels as numbers 0..C-1, what the classes are called, and what is odd about them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.errors import ConfigError

_SIGNS = {"-1", "1"}  # the usual labels of two classes, beside 0 and 1
_WHOLE = re.compile(r"-?[0-9]+")
_NAMED = 12  # classes by name; of more, how many


def encode_labels(
    raw: Mapping[str, NDArray[Any]], column: str, names: tuple[str, ...] | None = None
) -> tuple[dict[str, NDArray[np.int64]], tuple[str, ...]]:
    """Labels as 0..C-1 and the classes' names.

    Labels are kept as they are where the files name the classes or where they are whole numbers that fill 0..C-1.
    Otherwise (0 and 4, or strings) the sorted different values of both sides become 0..C-1, their spelling the names. A
    number below 0 is refused, unless all labels are -1 and 1.

    Args:
        raw: side -> (N,) labels, int64 or strings. column: where they stood.
        names: of the classes, if the files name them.
    """
    values = np.unique(np.concatenate(list(raw.values())))
    spelt = tuple(map(str, values))
    expected = "from 0 on"
    wrong = negative_name(spelt)
    if names is not None and values.dtype == np.int64:
        expected = f"0..{len(names) - 1}, as the files name {len(names)} classes,"
        wrong = next((str(value) for value in values if not 0 <= value < len(names)), None)
    if wrong is not None:
        hint = "; -1 often means that there is none" if wrong == "-1" else ""
        raise ConfigError(
            f"expected labels {expected} in column '{column}', got {wrong}{hint}; drop such rows, or name the column "
            "of the labels in label_column"
        )
    if values.dtype == np.int64 and (names is not None or np.array_equal(values, np.arange(len(values)))):
        return {side: labels.astype(np.int64) for side, labels in raw.items()}, names or spelt
    return {side: np.searchsorted(values, labels).astype(np.int64) for side, labels in raw.items()}, spelt


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
        trained: the classes with training rows at any client. tested: those with test rows at any.

    >>> for line in remarks(["0", "1", "9"], trained={0}, tested={0, 2}): print(line)
    classes with test rows that nobody trains on (1): 2 (9)
    classes that nobody trains on or is tested on (1): 1
    """
    lines = []
    unknown = [number for number in range(len(names)) if number not in trained]
    for what, classes in (
        ("classes with test rows that nobody trains on", [number for number in unknown if number in tested]),
        ("classes that nobody trains on or is tested on", [number for number in unknown if number not in tested]),
    ):
        if classes:
            spelt = [f"{n}" if names[n] == str(n) else f"{n} ({names[n]})" for n in classes[:_NAMED]]
            more = f" and {len(classes) - _NAMED} more" if len(classes) > _NAMED else ""
            lines.append(f"{what} ({len(classes)}): {', '.join(spelt)}{more}")
    return lines
