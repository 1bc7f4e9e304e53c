"""Write the section "Published results" of every method's page: the papers' figures next to ours.

    python scripts/beside_papers.py            # after docs/results or paper_results.csv has changed

The papers' numbers are those of ``polyfed.report.paper_results``; ours are read from ``docs/results/tables``,
``docs/results/overheads.md`` and ``docs/results/any-architecture.md``. Where there is none, "not measured" is written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from results_pages import stored

from polyfed.registry import METHODS
from polyfed.report import paper_results
from polyfed.report.paper_results import PaperNumber

DOCS = Path(__file__).resolve().parent.parent / "docs"
TITLE = "## Published results"
QUANTITIES = ("accuracy", "bytes per client and round", "parameters sent")
PAPERS = {"fedhenn": "FedHeNN", "fedgh": "FedGH", "fedin": "FedIN"}
_RESULTS = "[results](../results.md)"
SOURCES = {
    "accuracy": (_RESULTS,),
    "bytes per client and round": (_RESULTS, "[any architecture](../results/any-architecture.md)"),
    "parameters sent": ("[what methods send and hold](../results/overheads.md)",),
}
_BESIDE = re.compile(r"Beside the paper: ([^,:]+)(?:, ([^:]+))?: ([^:\[]+?)(?: \[[^\]]*\])?:")
NOT_MEASURED = "not measured"
Key = tuple[str, str, str, str, str]  # place, setting, data set, quantity, the paper's row
Ours = dict[Key, str]


# ours ---------------------------------------------------------------------------------------------------------------
def ours() -> Ours:
    """What was measured here, by what it stands beside; from all three sources."""
    return dict([*_sent_for_any_architecture(), *_parameters_sent(), *_results()])


def _text(*path: str) -> str:
    return DOCS.joinpath(*path).read_text(encoding="utf-8")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _results() -> Iterator[tuple[Key, str]]:
    """The stored tables "Beside the paper: PLACE, SETTING: QUANTITY [UNIT]:"."""
    for comparison in stored():
        small = f"{paper_results.SCALED_DOWN}:" in comparison.setting
        for table in comparison.tables:
            title = re.fullmatch(
                r"Beside the paper: ([^,:]+)(?:, ([^:]+))?: ([^:\[]+?)(?: \[[^\]]*\])?:", table.caption
            )
            if title is None:
                continue
            place, setting, quantity = title[1], title[2] or "", title[3]
            for method, _, _, measured, *_ in table.rows[1:]:
                if measured != "-":
                    told = f"{measured} ({paper_results.SCALED_DOWN})" if small else measured
                    yield (place, setting, comparison.dataset, quantity, method), told


def _parameters_sent() -> Iterator[tuple[Key, str]]:
    """Table 3 of the FedIN paper: the first table of its page."""
    for line in _text("results", "overheads.md").partition("## Memory")[0].splitlines():
        cells = _cells(line)
        if len(cells) == 6 and cells[0].lower() in METHODS:
            yield ("fedin/table3", "", "", "parameters sent", cells[0].lower()), cells[2]


def _sent_for_any_architecture() -> Iterator[tuple[Key, str]]:
    """FedGH's table 3: CIFAR-10 as sent in runs, CIFAR-100 as sent in the methods' tests."""
    section = _text("results", "any-architecture.md").partition("## FedGH's table 3")[2].partition("\n## ")[0]
    for line in section.splitlines():
        cells = _cells(line)
        name = cells[0].lower().replace("-", "")
        if len(cells) == 5 and name in METHODS:
            for dataset, held, sent in (("cifar10", 2, cells[1]), ("cifar100", 10, f"{cells[3]} (in its test)")):
                if sent.split()[:1] not in ([], ["(in"]):
                    setting = f"num_clients=10, classes_per_client={held}"
                    yield ("fedgh/table3", setting, dataset, "bytes per client and round", name), sent


# theirs -------------------------------------------------------------------------------------------------------------
class Row(NamedTuple):
    """What the entries of one row have in common; they differ in the value of the setting's first key alone."""

    paper: str
    table: str
    name: str
    dataset: str
    key: str
    held: str
    quantity: str
    unit: str


def theirs(method: str) -> dict[Row, list[PaperNumber]]:
    """The papers' numbers for a method and its variants, by row of the section."""
    found: dict[Row, list[PaperNumber]] = {}
    for entry in paper_results.entries():
        if entry.quantity in QUANTITIES and (entry.method == method or entry.method.startswith(f"{method}-")):
            first, _, held = entry.setting.partition(", ")
            place = (entry.paper, entry.table, entry.method, entry.dataset)
            row = Row(*place, first.partition("=")[0], held, entry.quantity, entry.unit)
            found.setdefault(row, []).append(entry)
    return found


def _data(row: Row, entries: Sequence[PaperNumber]) -> str:
    values = "; ".join(entry.setting.partition(",")[0].partition("=")[2] for entry in entries)
    return ", ".join(part for part in (row.dataset, row.held, f"{row.key}={values}" if values else row.key) if part)


def _printed(entry: PaperNumber, notes: list[str]) -> str:
    """The number as printed, with its spread and its footnotes' marks; footnotes that are new join `notes`."""
    notes += [name for name in entry.footnotes if name not in notes]
    marks = ", ".join(map(str, sorted(notes.index(name) + 1 for name in entry.footnotes)))
    spread = "" if entry.spread is None else f" ± {_number(entry.spread)}"
    return f"{_number(entry.mean)}{spread}{f' [{marks}]' if marks else ''}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if round(value, 1) == value else f"{value:.2f}"


def _measured(entries: Sequence[PaperNumber], known: Ours) -> str:
    found = [known.get((e.place, e.setting, e.dataset, e.quantity, e.method)) for e in entries]
    return "; ".join(text or NOT_MEASURED for text in found) if any(found) else NOT_MEASURED


def section(method: str, known: Ours) -> str:
    """The section of one method's page, from its heading on."""
    rows, notes = theirs(method), list[str]()
    if not rows:
        kept = ", ".join(PAPERS.values())
        none = "have no row for this method, and the tables of its own paper were"
        return f"{TITLE}\n\nThe tables of {kept} {none}\n{NOT_MEASURED}.\n"
    lines = ["| paper | row | data | quantity | published | ours |", "| --- | --- | --- | --- | --- | --- |"]
    for row, entries in rows.items():
        where = f"{PAPERS[row.paper]}, {row.table.replace('table', 'table ')}"
        told = "; ".join(_printed(entry, notes) for entry in entries)
        quantity = f"{row.quantity} [{row.unit}]"
        here = _measured(entries, known)
        lines.append(f"| {where} | `{row.name}` | {_data(row, entries)} | {quantity} | {told} | {here} |")
    whose = "" if method in (*PAPERS, "local") else " The tables of its own paper were not measured."
    sources = ", ".join(dict.fromkeys(link for row in rows for link in SOURCES[row.quantity]))
    about = f"Published figures and ours for the same setting ({sources}).{whose}"
    foot = [f"- [{number}] {paper_results.footnote(name)}" for number, name in enumerate(notes, start=1)]
    return "\n".join([TITLE, "", about, "", *lines, *(["", *foot] if foot else [])]) + "\n"


def with_section(text: str, method: str, known: Ours) -> str:
    """A page's text with its section as it should be, before "Commands"."""
    rest = re.sub(rf"^{TITLE}\n.*?(?=^## )", "", text, flags=re.DOTALL | re.MULTILINE)
    before, heading, after = rest.partition("## Commands")
    if not heading:
        raise SystemExit(f"expected a section '## Commands' on the page of {method}")
    return f"{before}{section(method, known)}\n{heading}{after}"


if __name__ == "__main__":
    measured = ours()
    for name in METHODS:
        page = DOCS / "methods" / f"{name}.md"
        text = page.read_text(encoding="utf-8")
        if (new := with_section(text, name, measured)) != text:
            page.write_text(new, encoding="utf-8")
