"""The site's page of the papers' published figures: ours beside them where we have any, then all as printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from results_pages import Table, measurements

from polyfed.records.paper_tables import SOURCE, PaperNumber, entries, read_footnotes
from polyfed.report.text_tables import Column, markdown_table

PLACE = "results/published.md"
SOURCES = (SOURCE / "published.csv", SOURCE / "published-footnotes.csv")  # that the page is made of
PAPERS = {"fedhenn": "FedHeNN", "fedgh": "FedGH", "fedin": "FedIN", "fedtgp": "FedTGP", "fedkwaz": "FedKWAZ"}
PAPERS["fedfree"] = "FedFree"

ABOUT = """\
# Published figures

What six papers print of methods that polyfed has, and what was measured here at a smaller size. Ours are last rounds;
most papers report the best of hundreds. Numbers in brackets: [notes](#notes).

## Ours beside them

"Differs" marks a difference of more than three spreads, the root of the sum of both squares. Of what is scaled down,
nothing is judged."""

PRINTED = """\
## As printed

± is as the paper prints it. FedTGP and FedKWAZ report the best of 1000 rounds by the test accuracy itself, FedFree the
last of 200."""


def page() -> str:
    """The whole text."""
    notes = {name: number for number, name in enumerate(read_footnotes(SOURCE), start=1)}
    parts = [ABOUT, *_beside(), PRINTED]
    for paper, name in PAPERS.items():
        parts.append(f"### {name}")
        found = [entry for entry in entries() if entry.paper == paper]
        for (table, dataset, quantity, unit), group in groupby(sorted(found, key=_place), key=_place):
            parts += [f"{table}: {dataset}, {quantity} [{unit}]", markdown_table(list(_pivot(list(group), notes)))]
    parts += ["## Notes", "\n".join(f"{notes[name]}. {text}" for name, text in read_footnotes(SOURCE).items())]
    return "\n\n".join(parts) + "\n"


def _place(entry: PaperNumber) -> tuple[str, str, str, str]:
    return entry.table, entry.dataset, entry.quantity, entry.unit


def _beside() -> Iterator[str]:
    """The stored tables "Beside the paper: PLACE, SETTING: QUANTITY [UNIT]:", those of one caption and data in one."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for name, one in measurements().items():
        folder, _, data = one.title.partition(": ")
        for table in one.tables:
            about = table.caption.removeprefix("Beside the paper: ").removesuffix(":")
            if about != table.caption.removesuffix(":"):
                rows = [(*cells, f"[{folder}](tables/{name}.md)") for cells in _measured(table)]
                found.setdefault(f"{about}, {data.partition(',')[0]}", []).extend(rows)
    for caption, rows in sorted(found.items()):
        lines = [("method", "ours", "printed", "mark", "measured in"), (":--", "--:", "--:", ":--", ":--"), *rows]
        yield f"{caption}:"
        yield "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _measured(table: Table) -> Iterator[tuple[str, ...]]:
    """The rows that have a figure of ours."""
    for row in table.rows[1:]:
        cells = dict(zip(table.rows[0], row, strict=True))
        if cells["ours"] != "-":
            printed = cells["paper"].partition(" [")[0]  # notes have other numbers there
            yield row[0], cells["ours"], printed, cells["mark"]


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
