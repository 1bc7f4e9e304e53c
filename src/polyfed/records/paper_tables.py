"""The papers' numbers as printed.

``published.csv`` holds one a line: paper, table, setting, dataset, method, quantity, mean, spread, unit, footnote (one
or more names of ``published-footnotes.csv``, with blanks between), stage (in which we score what the paper means; empty
for a run's own). `polyfed.report.paper_results` puts ours beside them.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent  # where both files lie


@dataclass(frozen=True)
class PaperNumber:
    """One printed number. mean, spread: in `unit`; None where the paper prints none. footnotes: names. stage: or "".

    place: ``"fedgh/table3"``.
    """

    paper: str
    table: str
    setting: str
    dataset: str
    method: str
    quantity: str
    mean: float | None
    spread: float | None
    unit: str
    footnotes: tuple[str, ...]
    stage: str

    @property
    def place(self) -> str:
        return f"{self.paper}/{self.table}"


def entries() -> tuple[PaperNumber, ...]:
    """All printed numbers, in the file's order."""
    return _entries(SOURCE)


@functools.lru_cache(maxsize=2)
def _entries(source: Path) -> tuple[PaperNumber, ...]:
    with (source / "published.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_entry(line) for line in csv.DictReader(file))


def _entry(line: Mapping[str, str]) -> PaperNumber:
    entry: dict[str, Any] = {key: value for key, value in line.items() if key != "footnote"}
    entry |= {key: float(line[key]) if line[key] else None for key in ("mean", "spread")}
    return PaperNumber(**entry, footnotes=tuple(line["footnote"].split()))


@functools.lru_cache(maxsize=2)
def read_footnotes(source: Path) -> dict[str, str]:
    """Name -> text, of all footnotes in a folder (`SOURCE`)."""
    with (source / "published-footnotes.csv").open(encoding="utf-8", newline="") as file:
        return {line["footnote"]: line["text"] for line in csv.DictReader(file)}


def tables() -> tuple[str, ...]:
    """The tables that there are: ``"fedgh/table3"``."""
    return tuple(dict.fromkeys(entry.place for entry in entries()))
