"""Columns of a table that clients learn from, which one client may have in another unit.

Shapes: N rows, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyfed.data.samples import LabeledSamples, TableColumns

_NAMED = 3  # columns, or clients, of a line; of more, how many
_FEWEST = 5  # rows of a client by which its unit is known
_FACTOR = 100.0  # between units: a thousand for milli and kilo, give or take what clients differ by


def remarks(
    names: Sequence[str], columns: TableColumns, rows: Sequence[LabeledSamples], titles: Sequence[str]
) -> list[str]:
    """A line with the columns that a client seems to have in another unit; none where there are none.

    Args:
        names: of the features. columns: what they are. rows: each client's training rows, x (N, F) as stored.
        titles: of the clients.
    """
    flags = dict(columns.flags)
    found = []
    for place, name in enumerate(names):
        if place in flags.values() or (columns.categories and columns.categories[place]):
            continue
        others = _in_another_unit([_present(samples, place, flags.get(place)) for samples in rows])
        if others:
            who = ", ".join(f"{titles[client]} has {size:.4g}" for client, size in others.items())
            found.append(f"'{name}' (median size): {who}")
    if not found:
        return []
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return [f"columns in another unit at a client? {', '.join(found[:_NAMED])}{more}"]


def _present(samples: LabeledSamples, place: int, flag: int | None) -> NDArray[np.float64]:
    """The values of a column that are not missing."""
    values = samples.x[:, place].double().numpy()
    return values if flag is None else values[samples.x[:, flag].numpy() == 0]


def _in_another_unit(parts: Sequence[NDArray[np.float64]]) -> dict[int, float]:
    """Client -> median size of its values, of those whose values are far larger than the others', else far smaller."""
    sizes = {client: float(np.median(np.abs(part))) for client, part in enumerate(parts) if len(part) >= _FEWEST}
    usual = {
        client: float(np.median([size for other, size in sizes.items() if other != client] or [0.0]))
        for client in sizes
    }
    larger = {client: size for client, size in sizes.items() if 0 < _FACTOR * usual[client] <= size}
    smaller = {client: size for client, size in sizes.items() if 0 < _FACTOR * size <= usual[client]}
    return larger or smaller
