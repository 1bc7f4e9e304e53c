"""The site's page of the papers' published figures: ours beside them where we have any, then all as printed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from results_pages import Table, measurements

from polyfed.report.text_tables import Column, markdown_table
from polyfed.results.paper_tables import SOURCE, PaperNumber, entries, read_footnotes

PLACE = "results/published.md"
SOURCES = (SOURCE / "published.csv", SOURCE / "published-footnotes.csv")  # that the page is made of
PAPERS = {"fedhenn": "FedHeNN", "fedgh": "FedGH", "fedin": "FedIN", "fedtgp": "FedTGP", "fedkwaz": "FedKWAZ"}
PAPERS |= {"fedfree": "FedFree", "fedre": "FedRE"}
_BESIDE = re.compile(r"Beside the paper: ([^,:]+)(?:, ([^:]+))?: (.+):")

ABOUT = """\
# Published figures

What seven papers print of methods that polyfed has, and what was measured here at a smaller size. Ours are last rounds;
most papers report the best of hundreds. Numbers in brackets: [notes](#notes).

## Ours beside them

"Differs" marks a difference of more than three spreads, the root of the sum of both squares. Of what is scaled down,
nothing is judged."""

PRINTED = """\
## As printed

± is as the paper prints it. FedTGP and FedKWAZ report the best of 1000 rounds by the test accuracy itself, FedFree the
last of 200. FedRE's figures are those of a summary."""


def page() -> str:
    """The whole text."""
    notes = {name: number for number, name in enumerate(read_footnotes(SOURCE), start=1)}
    parts = [ABOUT, markdown_table(_beside()), PRINTED]
    for paper, name in PAPERS.items():
        parts.append(f"### {name}")
        found = [entry for entry in entries() if entry.paper == paper]
        for (table, dataset, quantity, unit), group in groupby(sorted(found, key=_place), key=_place):
            parts += [f"{table}: {dataset}, {quantity} [{unit}]", markdown_table(list(_pivot(list(group), notes)))]
    parts += ["## Notes", "\n".join(f"{notes[name]}. {text}" for name, text in read_footnotes(SOURCE).items())]
    return "\n\n".join(parts) + "\n"


def _place(entry: PaperNumber) -> tuple[str, str, str, str]:
    return entry.table, entry.dataset, entry.quantity, entry.unit


def _beside() -> list[Column]:
    rows = list(_rows_beside())
    headings = ("paper's table", "setting", "data", "quantity", "method", "ours", "printed", "mark", "measured in")
    return [
        Column(heading, list(cells), words=heading not in ("ours", "printed"))
        for heading, cells in zip(headings, zip(*rows, strict=True), strict=True)
    ]


def _rows_beside() -> Iterator[tuple[str, ...]]:
    """The rows of stored tables "Beside the paper: PLACE, SETTING: QUANTITY [UNIT]:" that have figures of ours."""
    for one in measurements().values():
        for table in one.tables:
            if title := _BESIDE.fullmatch(table.caption):
                folder, _, data = one.title.partition(": ")
                place = (title[1], title[2] or "", data.partition(",")[0], title[3])
                yield from (place + cells + (folder,) for cells in _cells(table) if cells[1] != "-")


def _cells(table: Table) -> Iterator[tuple[str, ...]]:
    for row in table.rows[1:]:
        cells = dict(zip(table.rows[0], row, strict=True))
        yield row[0], cells["ours"], cells["paper"].partition(" [")[0], cells["mark"]  # notes have other numbers there


def _pivot(found: Sequence[PaperNumber], notes: Mapping[str, int]) -> Iterator[Column]:
    """A row for each method, a column for each setting."""
    methods = list(dict.fromkeys(entry.method for entry in found))
    yield Column("method", methods, words=True)
    for setting in dict.fromkeys(entry.setting for entry in found):
        printed = {entry.method: _printed(entry, notes) for entry in found if entry.setting == setting}
        yield Column(setting or "printed", [printed.get(name, "") for name in methods])


def _printed(entry: PaperNumber, notes: Mapping[str, int]) -> str:
    """The number as printed, with its spread and the numbers of its notes."""
    marks = ", ".join(str(notes[name]) for name in entry.footnotes)
    spread = "" if entry.spread is None else f" ± {entry.spread:g}"
    return f"{'-' if entry.mean is None else f'{entry.mean:g}'}{spread}{f' [{marks}]' if marks else ''}"
