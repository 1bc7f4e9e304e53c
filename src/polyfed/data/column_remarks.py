"""What is odd about the columns of a table that clients learn from: another unit at one client, ids, constants.

Shapes: N rows, F features.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyfed.data.samples import LabeledSamples, OwnColumns, TableColumns

_NAMED = 3  # columns, or clients, of a line; of more, how many
_FEWEST = 5  # rows of a client by which its unit is known
_FEWEST_IDS = 20  # rows in which another value in every row is odd
_FACTOR = 100.0  # between units: a thousand for milli and kilo, give or take what clients differ by
_LIKE_AN_ID = re.compile(r"(.*[_\W])?(id|ids|nr|no|num|number|key|uuid|index)", re.IGNORECASE)


def remarks(
    names: Sequence[str], columns: TableColumns, rows: Sequence[LabeledSamples], titles: Sequence[str]
) -> list[str]:
    """A line for each kind of oddity, with the columns that have it.

    Args:
        names: of the features. columns: what they are. rows: each client's training rows, x (N, F) as stored.
        titles: of the clients.
    """
    flags = dict(columns.flags)
    found: dict[str, list[str]] = {"unit": [], "id": [], "constant": []}
    for place, name in enumerate(names):
        is_category = bool(columns.categories and columns.categories[place])
        parts = [_present(samples, place, flags.get(place), is_category) for samples in rows]
        every = np.concatenate(parts)
        if place in flags.values() or not len(every):
            continue
        if (every == every[0]).all():
            found["constant"].append(f"'{name}'")
        elif (is_category or _LIKE_AN_ID.fullmatch(name)) and all(len({*part}) == len(part) for part in parts):
            if max(map(len, parts)) >= _FEWEST_IDS:
                found["id"].append(f"'{name}'")
        elif not is_category and (others := _in_another_unit(parts)):
            who = ", ".join(f"{titles[client]} has {size:.4g}" for client, size in others.items())
            found["unit"].append(f"'{name}' (median size): {who}")
    lines = {
        "unit": "columns in another unit at a client?",
        "id": "columns with another value in every row (ids?), which are learnt from:",
        "constant": "columns with the same value in every row:",
    }
    return [f"{line} {_listed(found[kind])}" for kind, line in lines.items() if found[kind]]


def lacking(names: Sequence[str], columns: Sequence[OwnColumns | None]) -> list[str]:
    """A line with the columns that some clients lack, and how many do. names: of the features."""
    own = [one for one in columns if one is not None]
    having = {place: sum(place in one.places for one in own) for one in own[:1] for place in range(len(one.widths))}
    found = [f"'{names[place]}' ({len(own) - count})" for place, count in having.items() if count < len(own)]
    return [f"columns that clients lack (how many of {len(own)}): {', '.join(found)}"] if found else []


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _present(samples: LabeledSamples, place: int, flag: int | None, is_category: bool) -> NDArray[np.float64]:
    values = samples.x[:, place].double().numpy()
    if flag is not None:
        values = values[samples.x[:, flag].numpy() == 0]
    return values[values > 0] if is_category else values


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
