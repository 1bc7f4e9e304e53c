"""What a reader must know of the classes of a task: numbers with gaps, and classes that nobody trains on."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

_WHOLE = re.compile(r"-?[0-9]{1,18}")
_TOLD = 12  # classes by name; of more, how many


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
    if not all(_WHOLE.fullmatch(name) for name in names):
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
    told = _ranges(classes)
    if any(names[number] != str(number) for number in classes):
        told = _few(
            str(number) if names[number] == str(number) else f"{number} ({names[number]})" for number in classes
        )
    yield f"{what} ({len(classes)}): {told}"


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
    """At most `_TOLD` of them."""
    given = list(texts)
    more = len(given) - _TOLD
    return ", ".join(given[:_TOLD]) + (f" and {more} more" if more > 0 else "")
