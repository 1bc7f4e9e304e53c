"""Both sides of a source under one numbering, and how rows of it are drawn, split and capped class by class.

Rows with numbers to predict count as rows of one class.

Shapes: N samples, C classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data.dataset import DatasetSource
from polyfed.data.partition import Rows, balanced_counts, proportional_counts
from polyfed.data.samples import LabeledSamples
from polyfed.errors import ConfigError
from polyfed.registry import suggest


class PooledRows:
    """Both sides of a source under one numbering: training rows first, then test rows."""

    def __init__(self, source: DatasetSource) -> None:
        self.source = source
        self._sides = [samples for _, samples in source.splits()]
        labels = torch.cat([side.y for side in self._sides])
        if source.is_regression:
            labels = torch.zeros(len(labels), dtype=torch.int64)
        self.y: Rows = labels.numpy()
        self.classes = source.classes or 1
        self.size = len(self.y)

    def column(self, name: str | None, rows: Rows) -> NDArray[Any]:
        """The further values of `rows` (training rows, test rows, or both) in a column.

        Raises:
            ConfigError: no name, no such column, or one that a side lacks.
        """
        if name is None:
            raise ConfigError("partition 'by_group' expects group_by, the column to deal by, got none")
        sides = (("training", self.source.train_columns), ("test", self.source.test_columns))
        used = [np.any(rows < len(self._sides[0])), np.any(rows >= len(self._sides[0]))]
        found = []
        for (what, columns), needed, side in zip(sides, used, self._sides, strict=False):
            if needed and name not in columns:
                hint = suggest(name, columns) if columns else ""
                more = "; with test = 'global' it needs none" if what == "test" else hint
                raise ConfigError(f"the {what} side of '{self.source.name}' has no column '{name}' to deal by{more}")
            found.append(columns[name] if needed else np.empty(len(side), dtype=np.int64))
        if all(used) and found[0].dtype.kind != found[1].dtype.kind:
            raise ConfigError(
                f"expected '{name}' of both sides of '{self.source.name}' in one type, got numbers and text"
            )
        values: NDArray[Any] = np.concatenate([part for part, needed in zip(found, used, strict=False) if needed])
        return values[rows if used[0] else rows - len(self._sides[0])]

    def columns(self, rows: Rows) -> dict[str, NDArray[Any]]:
        """All further columns that every side of `rows` has."""
        held = set(self.source.train_columns)
        if np.any(rows >= len(self._sides[0])):
            held &= set(self.source.test_columns)
        return {name: self.column(name, rows) for name in sorted(held)}

    def select(self, rows: Rows) -> LabeledSamples:
        """The samples at `rows` (sorted), copied."""
        first = len(self._sides[0])
        here = self._sides[0].select(torch.from_numpy(rows[rows < first]))
        if not np.any(rows >= first):
            return here
        there = self._sides[1].select(torch.from_numpy(rows[rows >= first] - first))
        return there if not len(here) else LabeledSamples(torch.cat([here.x, there.x]), torch.cat([here.y, there.y]))


def draw_balanced(y: Rows, count: int, generator: np.random.Generator) -> Rows:
    """`count` random rows, equally many of each class as far as they go; sorted."""
    take_C = balanced_counts(np.bincount(y), count)
    drawn = [generator.permutation(np.flatnonzero(y == label))[:take] for label, take in enumerate(take_C)]
    return np.sort(np.concatenate(drawn))


def split_rows(
    rows: Rows, y: Rows, parts: tuple[int, int, int], generator: np.random.Generator | None
) -> tuple[Rows, Rows, Rows]:
    """Cut rows into three sets by a ratio, class by class; each class's parts are its quotas rounded down or up.

    What rounding leaves over in a class goes to the sets that lie furthest behind their quota over the classes so far
    (then to the first), so that the sets' sizes follow the ratio too. Sorted.
    """
    ratio = np.array(parts) / sum(parts)
    behind = np.zeros(3)
    sets: tuple[list[Rows], list[Rows], list[Rows]] = ([], [], [])
    for label in np.unique(y[rows]):
        mine = rows[y[rows] == label]
        mine = mine if generator is None else generator.permutation(mine)
        quota = len(mine) * ratio
        sizes = np.floor(quota + 1e-9).astype(np.int64)
        open_sets = quota - sizes > 1e-9
        behind += quota - sizes
        order = np.lexsort((np.arange(3), -np.round(behind, 9), ~open_sets))[: len(mine) - int(sizes.sum())]
        sizes[order] += 1
        behind[order] -= 1
        for chosen, part in zip(sets, np.split(mine, np.cumsum(sizes)[:2]), strict=True):
            chosen.append(part)
    none = rows[:0]
    train, validation, test = (np.sort(np.concatenate(s)) if s else none for s in sets)
    return train, validation, test


def cap_rows(rows: Rows, y: Rows, most: int | None) -> Rows:
    """At most `most` rows: the first ones of each class, the classes in the proportion they have."""
    if most is None or len(rows) <= most:
        return rows
    labels, counts = np.unique(y[rows], return_counts=True)
    take = proportional_counts(counts.astype(np.int64), most)
    return np.sort(np.concatenate([rows[y[rows] == label][:n] for label, n in zip(labels, take, strict=True)]))
