"""What is odd about the columns of a table that clients learn from: another unit at one client, ids, constants.

Shapes: N rows, F features.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyfed.data.samples import LabeledSamples, TableColumns

_NAMED = 3  # columns, or clients, of a line; of more, how many
_FEWEST = 5  # rows of a client by which its unit is known
_FEWEST_IDS = 20  # rows in which another value in every row is odd
_FACTOR = 100.0  # between units: a thousand for milli and kilo, give or take what clients differ by
_COLLISIONS = 3.0  # expected equal pairs of whole numbers within their range: without any they are no measurements
_LIKE_AN_ID = re.compile(r"(.*[_\W])?(id|ids|nr|no|num|number|key|uuid|index)", re.IGNORECASE)

_Parts = Sequence[NDArray[np.float64]]  # a column's values at each client, without missing ones


class _Unit(NamedTuple):
    """A client whose values are of another size. own, others: medians."""

    client: int
    own: float
    others: float


def remarks(
    names: Sequence[str], columns: TableColumns, rows: Sequence[LabeledSamples], titles: Sequence[str]
) -> list[str]:
    """A line for each kind of oddity, with the columns that have it.

    Args:
        names: of the features. columns: what they are. rows: each client's training rows, x (N, F) as stored.
        titles: of the clients.
    """
    flags = dict(columns.flags)
    units: list[str] = []
    ids: list[str] = []
    constants: list[str] = []
    for place, name in enumerate(names):
        if place in flags.values():
            continue
        is_category = bool(columns.categories and columns.categories[place])
        parts = list(_present(rows, place, flags.get(place), is_category))
        every = np.concatenate(parts) if parts else np.zeros(0)
        if not len(every):
            continue
        if (every == every[0]).all():
            constants.append(f"'{name}'")
        elif _are_ids(name, parts, is_category):
            ids.append(f"'{name}'")
        elif not is_category and (found := _units(parts)):
            who = ", ".join(f"{titles[one.client]} has {one.own:.4g}" for one in found[:_NAMED])
            units.append(f"'{name}' (median): {who}{_more(found)}, the others {found[0].others:.4g}")
    lines = []
    if units:
        lines.append(f"columns in another unit at a client? {'; '.join(units[:_NAMED])}{_more(units)}")
    if ids:
        lines.append(f"columns with another value in every row (ids?), which are learnt from: {_listed(ids)}")
    if constants:
        lines.append(f"columns with the same value in every row: {_listed(constants)}")
    return lines


def _present(
    rows: Sequence[LabeledSamples], place: int, flag: int | None, is_category: bool
) -> Iterator[NDArray[np.float64]]:
    for samples in rows:
        values = samples.x[:, place].double().numpy()
        if flag is not None:
            values = values[samples.x[:, flag].numpy() == 0]
        yield values[values > 0] if is_category else values


def _are_ids(name: str, parts: _Parts, is_category: bool) -> bool:
    """Whether no two rows of any client have one value, and chance or the name says that this is no measurement."""
    if max(map(len, parts)) < _FEWEST_IDS or any(len(np.unique(values)) < len(values) for values in parts):
        return False
    if is_category or _LIKE_AN_ID.fullmatch(name):
        return True
    if any((values != np.round(values)).any() for values in parts):
        return False
    pairs = [len(values) * (len(values) - 1) / 2 / (1 + np.ptp(values)) for values in parts if len(values)]
    return bool(sum(pairs) >= _COLLISIONS)


def _units(parts: _Parts) -> list[_Unit]:
    """The clients whose values are far larger than the others', or, without any, far smaller."""
    known = [client for client, values in enumerate(parts) if len(values) >= _FEWEST]
    medians = {client: float(np.median(parts[client])) for client in known}
    sizes = {client: _sizes(parts[client]) for client in known}
    larger: list[_Unit] = []
    smaller: list[_Unit] = []
    for client in known:
        others = [other for other in known if other != client]
        ratios = [_ratio(sizes[client][kind], [sizes[other][kind] for other in others]) for kind in (0, 1)]
        known_ratios = [ratio for ratio in ratios if ratio is not None]
        unit = _Unit(client, medians[client], float(np.median([medians[other] for other in others] or [0.0])))
        if known_ratios and min(known_ratios) >= _FACTOR:
            larger.append(unit)
        elif known_ratios and max(known_ratios) <= 1 / _FACTOR:
            smaller.append(unit)
    return larger or smaller


def _sizes(values: NDArray[np.float64]) -> tuple[float, float]:
    """How far values are from 0, and how far from one another."""
    return float(np.median(np.abs(values))), float(np.mean(np.abs(values - np.median(values))))


def _ratio(own: float, others: Sequence[float]) -> float | None:
    """To the others' median; None where one of both is 0."""
    usual = float(np.median(others)) if others else 0.0
    return own / usual if own and usual else None


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:_NAMED])}{_more(names)}"


def _more(found: Sequence[Any]) -> str:
    return f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
