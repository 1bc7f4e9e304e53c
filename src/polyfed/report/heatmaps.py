"""Matrices that a report shows as heat maps: found in run folders, checked, as many as a page can hold.

Two kinds: the confusion of the main stage (``confusion`` in result.json, where the run recorded it), and the matrices
that an analysis left in the run's own folder, ``analysis/*.json``: every object in such a file that holds a ``matrix``
(lists of numbers or null, one for each row), and beside it, where they are known, ``about`` (a sentence), ``labels`` or
``rows`` and ``columns`` (names), ``row_axis`` and ``column_axis`` (what rows and columns are). Of a file of several
runs, objects with a ``name`` and a ``seed``, what lies in that of the run itself is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyfed.errors import ConfigError
from polyfed.report.grouping import Group
from polyfed.report.run_records import RunRecord
from polyfed.report.statistics import finite, finite_ones
from polyfed.results.read import ANALYSIS, parse_json

Holder = Mapping[str, Any]  # a matrix, and what is known of it


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
    alike: dict[str, list[tuple[str, RunRecord, Holder]]] = {}
    ranges: dict[str, list[float]] = {}  # kind -> its lowest and highest value
    for run in sorted(group.runs, key=lambda run: run.seed):
        for kind, holder in (*_confusion(run), *_analyses(run)):  # methods that share a seed share its label table
            alike.setdefault(json.dumps([kind, run.seed, holder["matrix"]]), []).append((kind, run, holder))
            known = [*finite_ones(value for row in holder["matrix"] for value in row), *ranges.get(kind, [])]
            ranges[kind] = [min(known), max(known)]
    maps: list[dict[str, Any]] = []
    for same in alike.values():
        kind, run, holder = same[0]
        matrix = holder["matrix"]
        size = len(matrix) * len(matrix[0])
        if size <= cells:
            cells -= size
            whose = [run.name] if len(same) == 1 else []
            maps.append(
                {
                    "title": ", ".join([kind, *whose, f"seed {run.seed}"]),
                    "about": str(holder.get("about", "")),
                    "rows": _names(holder, "rows", len(matrix)),
                    "columns": _names(holder, "columns", len(matrix[0])),
                    "row_axis": str(holder.get("row_axis", "")),
                    "column_axis": str(holder.get("column_axis", "")),
                    "values": [[None if value is None else round(value, 3) for value in row] for row in matrix],
                    "low": ranges[kind][0],
                    "high": ranges[kind][1],
                }
            )
    left_out = len(alike) - len(maps)
    return {"maps": maps, "note": f"{left_out} more heat maps have no room on this page." if left_out else ""}


def _names(holder: Holder, key: str, count: int) -> list[str]:
    """Names of the rows or columns; numbers where there are not as many names."""
    names = holder.get(key, holder.get("labels"))
    return list(map(str, names if isinstance(names, list) and len(names) == count else range(count)))


def _is_matrix(value: Any) -> bool:
    """Rows of one length, of numbers and null, with at least one number."""
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        return False
    if len({len(row) for row in value}) != 1:
        return False
    known = [cell for row in value for cell in row if cell is not None]
    return bool(known) and all(finite(cell) is not None for cell in known)


def _confusion(run: RunRecord) -> Iterator[tuple[str, Holder]]:
    counts = run.result.confusion
    if _is_matrix(counts):
        when = run.result.evaluation.when
        about = f"Test samples by true and predicted class, stage {run.stage}, summed over clients, {when}."
        axes = {"row_axis": "true class", "column_axis": "predicted class"}
        yield "confusion", {"matrix": counts, "about": about, **axes}


def _analyses(run: RunRecord) -> Iterator[tuple[str, Holder]]:
    for path in sorted(run.path.glob(f"{ANALYSIS}/*.json")):
        found = list(_holders(read_json(path), "", None))
        several = len({whose for _, whose, _ in found}) > 1
        for key, whose, holder in found:
            if not several or whose == (run.name, run.seed):
                yield f"{path.stem} {key}".strip().replace("_", " "), holder


def read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _holders(
    content: Any, key: str, whose: tuple[Any, Any] | None
) -> Iterator[tuple[str, tuple[Any, Any] | None, Holder]]:
    """Every object with a matrix, wherever in the file: the key that it lies under, whose it is, itself."""
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
