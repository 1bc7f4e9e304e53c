"""Matrices that a report shows as heat maps: found in run folders, checked, as many as a page can hold.

Two kinds: the confusion of the main stage (``confusion`` in result.json, where the run recorded it), and the matrices
that an analysis left in the run's own folder, ``analysis/*.json``: every object in such a file that holds a ``matrix``
(lists of numbers or null, one for each row), and beside it, where they are known, ``about`` (a sentence), ``labels`` or
``rows`` and ``columns`` (names), ``row_axis`` and ``column_axis`` (what rows and columns are). Of a file of several
runs, objects with a ``name`` and a ``seed``, what lies in that of the run itself is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.errors import ConfigError
from polyfed.report.grouping import Group
from polyfed.report.run_records import RunRecord
from polyfed.report.text_tables import finite, finite_ones
from polyfed.results.read import ANALYSIS, parse_json

__all__ = ["heat_maps"]

_FILES = f"{ANALYSIS}/*.json"


Matrix = list[list[float | None]]


@dataclass(frozen=True)
class _Found:
    """A matrix of one run.

    Attributes:
        kind: what it is of, in words. matrix: rows of one length. about: a sentence.
        rows, columns: names. row_axis, column_axis: what rows and columns are.
    """

    kind: str
    run: RunRecord
    matrix: Matrix
    about: str
    rows: list[str]
    columns: list[str]
    row_axis: str
    column_axis: str

    @classmethod
    def of(cls, kind: str, run: RunRecord, holder: Mapping[str, Any]) -> _Found:
        """holder: what an analysis wrote: a matrix, and what is known of it."""
        matrix = list(holder["matrix"])
        return cls(
            kind,
            run,
            matrix,
            about=str(holder.get("about", "")),
            rows=_names(holder, "rows", len(matrix)),
            columns=_names(holder, "columns", len(matrix[0])),
            row_axis=str(holder.get("row_axis", "")),
            column_axis=str(holder.get("column_axis", "")),
        )


def heat_maps(group: Group, cells: int) -> dict[str, Any]:
    """The heat maps of comparable runs, seed by seed, as far as they have room.

    Args:
        group: the runs.
        cells: how many all of them may have together.

    Returns:
        ``maps``: title, about, names of rows and columns, what rows and columns are, values (None: not known), and
        the lowest and highest of all maps of a kind, so that equal shades are equal values; ``note``: what was left
        out, or "".

    Raises:
        ConfigError: a file of an analysis is broken (names the file).
    """
    alike: dict[str, list[_Found]] = {}
    for seed in group.seeds:
        for run in (run for run in group.runs if run.seed == seed):
            for one in (*_confusion(run), *_analyzes(run)):  # methods that share a seed share its label table
                alike.setdefault(json.dumps([one.kind, seed, one.matrix]), []).append(one)
    ranges = _ranges([same[0] for same in alike.values()])
    maps: list[dict[str, Any]] = []
    left_out = 0
    for same in alike.values():
        size = len(same[0].matrix) * len(same[0].matrix[0])
        left_out += size > cells
        if size <= cells:
            cells -= size
            maps.append(_map(same, *ranges[same[0].kind]))
    return {"maps": maps, "note": f"{left_out} more heat maps have no room on this page." if left_out else ""}


def _ranges(found: Sequence[_Found]) -> dict[str, tuple[float, float]]:
    """Of each kind the lowest and the highest value."""
    ranges: dict[str, tuple[float, float]] = {}
    for one in found:
        known = [*finite_ones(value for row in one.matrix for value in row), *ranges.get(one.kind, ())]
        ranges[one.kind] = (min(known), max(known))
    return ranges


def _map(same: Sequence[_Found], low: float, high: float) -> dict[str, Any]:
    """One heat map, of the only run that has it, or of several that have the same."""
    first = same[0]
    whose = [first.run.name] if len(same) == 1 else []
    return {
        "title": ", ".join([first.kind, *whose, f"seed {first.run.seed}"]),
        "about": first.about,
        "rows": first.rows,
        "columns": first.columns,
        "row_axis": first.row_axis,
        "column_axis": first.column_axis,
        "values": [[_short(value) for value in row] for row in first.matrix],
        "low": low,
        "high": high,
    }


def _names(holder: Mapping[str, Any], key: str, count: int) -> list[str]:
    """Names of the rows or columns; numbers where there are not as many names."""
    names = holder.get(key, holder.get("labels"))
    return list(map(str, names if isinstance(names, list) and len(names) == count else range(count)))


def _short(value: float | None) -> float | None:
    if value is None:
        return None
    rounded = round(value, 3)
    return int(rounded) if rounded == int(rounded) else rounded


def _is_matrix(value: Any) -> bool:
    """Rows of one length, of numbers and null, with at least one number."""
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        return False
    if len({len(row) for row in value}) != 1:
        return False
    cells = [cell for row in value for cell in row]
    known = [cell for cell in cells if cell is not None]
    return bool(known) and all(finite(cell) is not None for cell in known)


def _confusion(run: RunRecord) -> Iterator[_Found]:
    counts = run.result.confusion
    if _is_matrix(counts):
        about = f"Test samples by true and predicted class, stage {run.stage}, summed over clients, last round."
        axes = {"row_axis": "true class", "column_axis": "predicted class"}
        yield _Found.of("confusion", run, {"matrix": counts, "about": about, **axes})


def _analyzes(run: RunRecord) -> Iterator[_Found]:
    for path in sorted(run.path.glob(_FILES)):
        found = list(_holders(read_json(path), "", None))
        several = len({whose for _, whose, _ in found}) > 1
        for key, whose, holder in found:
            if not several or whose == (run.name, run.seed):
                yield _Found.of(f"{path.stem} {key}".strip().replace("_", " "), run, holder)


def read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _holders(
    content: Any, key: str, whose: tuple[Any, Any] | None
) -> Iterator[tuple[str, tuple[Any, Any] | None, Mapping[str, Any]]]:
    """Every object with a matrix, wherever in the file: the key that it lies under, whose it is said to be, itself."""
    if isinstance(content, list):
        for inner in content:
            if isinstance(inner, Mapping):
                yield from _holders(inner, key, whose)
    elif isinstance(content, Mapping):
        name = content.get("name")
        seed = content.get("seed")
        if isinstance(name, str) and isinstance(seed, int):
            whose = (name, seed)
        if _is_matrix(content.get("matrix")):
            yield key, whose, content
        for inner_key, inner in content.items():
            yield from _holders(inner, str(inner_key), whose)
