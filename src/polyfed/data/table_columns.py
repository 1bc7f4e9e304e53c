"""A table's columns that are no plain numbers: categories, and numbers that may be missing.

A category is stored as a whole number, 0 for a value that is missing or that the training side does not have. A number
that may be missing has a column of its own at the end of the row, 1 where it is missing, else 0.

Shapes: N rows, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from polyfed.data.samples import LabeledSamples


@dataclass(frozen=True)
class TableColumns:
    """What the features of a table are.

    Args:
        categories: per feature, the names of its categories, of which the i-th is stored as i + 1; () for a number.
        flags: (F1, F2): feature F2 says where feature F1 is missing.
    """

    categories: tuple[tuple[str, ...], ...] = ()
    flags: tuple[tuple[int, int], ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """Per feature, how many numbers stand for categories; () where no feature has any."""
        if not any(self.categories):
            return ()
        return tuple(1 + len(names) if names else 0 for names in self.categories)

    def means(self, mean: Sequence[float]) -> list[float]:
        """The means (of all features) of those that may be missing: a network reads 0 for them."""
        return [float(mean[place]) for place, _ in self.flags]


def own_means(x: Tensor, columns: TableColumns, mean: Sequence[float]) -> list[float]:
    """What stands for the missing values of a client, in the order of `columns.flags`.

    Args:
        x: (N, F) the client's training rows.
        mean: per feature, by which all clients' inputs are centered. It stands for a feature of which the client has
            no value at all, and a network then reads 0.
    """
    values = []
    for place, flag in columns.flags:
        present = x[x[:, flag] == 0, place]
        values.append(float(present.double().mean()) if len(present) else float(mean[place]))
    return values


def fill_missing(samples: LabeledSamples, columns: TableColumns, values: Sequence[float]) -> LabeledSamples:
    """The samples with these values, in the order of `columns.flags`, where one is missing."""
    if not columns.flags:
        return samples
    x = samples.x.clone()
    for (place, flag), value in zip(columns.flags, values, strict=True):
        x[x[:, flag] == 1, place] = value
    return LabeledSamples(x, samples.y, samples.scale)
