"""How a table's cells are spelt, and its columns that are no plain numbers: categories, numbers that may be missing.

A category is stored as a whole number, 0 for a value that is missing or that the training side does not have. A number
that may be missing has a column of its own at the end of the row, 1 where it is missing, else 0.

Shapes: N rows, F features.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from polyfed.data.samples import LabeledSamples
from polyfed.errors import ConfigError

FLAG = "{} is missing"  # what the column is called that says so
MISSING = ("", "na", "n/a", "nan", "?")  # how a missing value is spelt, in lower case
_SIGNS = {".": ",", ",": "."}  # before decimals, and the other one
_WITH_DECIMALS = re.compile(r"[+-]?\d+[.,]\d+")


@dataclass(frozen=True)
class CellFormat:
    """How cells are spelt.

    Args:
        decimal: what stands before decimals, a point or a comma.
        missing: what stands for a missing value besides `MISSING`, in upper or lower case.
    """

    decimal: str = "."
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.decimal not in _SIGNS:
            raise ConfigError(f"expected decimal '.' or ',', got {self.decimal!r}")

    @property
    def other_sign(self) -> str:
        """What stands before decimals elsewhere."""
        return _SIGNS[self.decimal]

    def is_missing(self, cell: str) -> bool:
        """Whether a cell holds no value.

        >>> [CellFormat(missing=("never",)).is_missing(cell) for cell in ("NA", "Never", "0")]
        [True, True, False]
        """
        spelt = cell.strip().lower()
        return spelt in MISSING or any(spelt == word.lower() for word in self.missing)

    def number(self, cell: str) -> float | None:
        """A cell's number; None where it holds none.

        >>> [CellFormat(decimal).number(cell) for decimal in ".," for cell in ("1.5", "1,5", "2")]
        [1.5, None, 2.0, None, 1.5, 2.0]
        """
        if "_" in cell or self.other_sign in cell:
            return None
        try:
            return float(cell.replace(",", "."))
        except ValueError:
            return None

    def whole(self, cells: Sequence[str]) -> list[int] | None:
        """Whole numbers, also spelt 3.0; None where one cell is none."""
        values = [self.number(cell) for cell in cells]
        if all(value is not None and value.is_integer() and abs(value) < 2**53 for value in values):
            return [int(value) for value in values if value is not None]
        return None

    def plain(self, cell: str) -> str:
        """A label's usual spelling: 3 for 3.0, and points before decimals."""
        whole = self.whole([cell])
        if whole is not None:
            return str(whole[0])
        return cell if self.number(cell) is None else cell.replace(",", ".")

    def has_other_decimals(self, cell: str) -> bool:
        """Whether a cell is a number with the other sign before decimals."""
        return self.other_sign in cell and _WITH_DECIMALS.fullmatch(cell) is not None

    def holds_numbers(self, cells: Iterable[str]) -> bool:
        """Whether a column has a number, or nothing but numbers with the other sign before decimals.

        >>> [CellFormat().holds_numbers(cells) for cells in (["1,5", "", "-0,25"], ["a", "2"], ["1,5", "b"])]
        [True, True, False]
        """
        present = [cell for cell in cells if not self.is_missing(cell)]
        if any(self.number(cell) is not None for cell in present):
            return True
        return bool(present) and all(map(self.has_other_decimals, present))

    def category(self, cell: str, names: Mapping[str, int]) -> int:
        """The number of a cell's category; 0 for one that is missing or unknown."""
        return 0 if self.is_missing(cell) else names.get(cell, 0)


USUAL = CellFormat()


@dataclass(frozen=True)
class TableColumns:
    """What the features of a table are.

    Args:
        categories: per feature, the names of its categories, of which the i-th is stored as i + 1; () for a number.
        flags: (F1, F2): feature F2 says where feature F1 is missing.
        cells: how they were spelt.
    """

    categories: tuple[tuple[str, ...], ...] = ()
    flags: tuple[tuple[int, int], ...] = ()
    cells: CellFormat = USUAL

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
