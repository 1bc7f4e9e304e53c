"""Write the pages of notes on published figures and of other papers' figures.

    python scripts/beside_papers.py            # after docs/results or published.csv has changed

The papers' numbers are those of ``polyfed.report.paper_results``; ours are read from ``docs/results/tables``,
``docs/results/overheads.md`` and ``docs/results/any-architecture.md``. A figure that was not measured here is named by
its table only.
"""

from __future__ import annotations

import csv
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from results_pages import stored

from polyfed.registry import METHODS
from polyfed.report import paper_results
from polyfed.report.paper_results import PaperNumber
from polyfed.results.paper_tables import SOURCE

DOCS = Path(__file__).resolve().parent.parent / "docs"
TITLE = "## Published results"
QUANTITIES = ("accuracy", "bytes per client and round", "parameters sent")
OTHERS = {"fedtgp": "FedTGP", "fedkwaz": "FedKWAZ", "fedfree": "FedFree", "fedre": "FedRE"}  # that no recipe follows
PAPERS = {"fedhenn": "FedHeNN", "fedgh": "FedGH", "fedin": "FedIN", **OTHERS}
NOTES = DOCS / "results" / "published.md"
OTHER_PAPERS = DOCS / "results" / "other-papers.md"
OTHERS_LINK = "[side by side](../results/other-papers.md)"
NOTES_LINK = "[notes](../results/published.md)"
FIGURES_LINK = "[figures](../../src/polyfed/results/published.csv)"
_RESULTS = "[results](../results.md)"
SOURCES = {
    "accuracy": (_RESULTS,),
    "bytes per client and round": (_RESULTS, "[any architecture](../results/any-architecture.md)"),
    "parameters sent": ("[communication and memory](../results/overheads.md)",),
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
def _published(method: str) -> list[PaperNumber]:
    """The papers' numbers for a method and its variants."""
    return [entry for entry in paper_results.entries() if entry.quantity in QUANTITIES and _is_of(entry.method, method)]


def _is_of(row: str, method: str) -> bool:
    """Whether a paper's row is a method's or a variant's."""
    return row == method or (row.startswith(f"{method}-") and row not in METHODS)


def _measured(entry: PaperNumber, known: Ours) -> str:
    return known.get((entry.place, entry.setting, entry.dataset, entry.quantity, entry.method), NOT_MEASURED)


def _notes(known: Ours) -> dict[str, int]:
    """The numbers of the notes that any page refers to, by name, in the file's order."""
    shown = [one for name in METHODS for one in _published(name) if _measured(one, known) != NOT_MEASURED]
    used = {name for entry in shown for name in entry.footnotes}
    with (SOURCE / "published-footnotes.csv").open(encoding="utf-8", newline="") as file:
        names = [line["footnote"] for line in csv.DictReader(file)]
    return {name: number for number, name in enumerate((name for name in names if name in used), start=1)}


def _printed(entry: PaperNumber, notes: Mapping[str, int]) -> str:
    """The number as printed, with its spread and the numbers of its notes."""
    marks = ", ".join(str(number) for number in sorted(notes[name] for name in entry.footnotes))
    spread = "" if entry.spread is None else f" ± {_number(entry.spread)}"
    return f"{_number(entry.mean)}{spread}{f' [{marks}]' if marks else ''}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if round(value, 1) == value else f"{value:.2f}"


def _row(entry: PaperNumber, measured: str, notes: Mapping[str, int]) -> tuple[str, ...]:
    where = f"{PAPERS[entry.paper]}, {entry.table.replace('table', 'table ')}"
    data = ", ".join(part for part in (entry.dataset, entry.setting) if part)
    return where, f"`{entry.method}`", data, f"{entry.quantity} [{entry.unit}]", _printed(entry, notes), measured


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """As Markdown; the column of the papers' rows is left out where all are the same."""
    head = ("paper", "row", "data", "quantity", "published", "ours")
    shown = [index for index in range(len(head)) if index != 1 or len({row[1] for row in rows}) > 1]
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line[index] for index in shown)} |" for line in lines)


def _tables(entries: Sequence[PaperNumber]) -> str:
    """For example: FedHeNN, table 1; FedIN, tables 1 and 2."""
    found: dict[str, dict[str, None]] = {}
    for entry in entries:
        told = entry.table.removeprefix("table").replace("text", "the text").replace("summary", "of a summary")
        found.setdefault(PAPERS[entry.paper], {})[told] = None
    return "; ".join(f"{paper}, {_listed([*numbers])}" for paper, numbers in found.items())


def _listed(numbers: Sequence[str]) -> str:
    *before, last = numbers
    return f"tables {', '.join(before)} and {last}" if before else f"table {last}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def section(method: str, known: Ours) -> str:
    """The section of one method's page, from its heading on."""
    entries = _published(method)
    pairs = [(entry, _measured(entry, known)) for entry in entries]
    notes = _notes(known)
    rows = [_row(entry, measured, notes) for entry, measured in pairs if measured != NOT_MEASURED]
    others = [entry for entry, measured in pairs if measured == NOT_MEASURED]
    paragraphs = [TITLE]
    if rows:
        sources = dict.fromkeys(link for e, told in pairs if told != NOT_MEASURED for link in SOURCES[e.quantity])
        paragraphs += [_wrapped(f"Ours: {', '.join(sources)}. Numbers in brackets: {NOTES_LINK}."), _table(rows)]
    if others:
        about = "Other figures" if rows else "Published"
        links = f"{FIGURES_LINK}, {OTHERS_LINK}" if any(e.paper in OTHERS for e in others) else FIGURES_LINK
        paragraphs.append(_wrapped(f"{about}, {NOT_MEASURED}: {_tables(others)} ({links})."))
    if not entries:
        paragraphs.append(
            f"FedHeNN, FedGH and FedIN publish no figures of this method; those of its own paper were {NOT_MEASURED}."
        )
    return "\n\n".join(paragraphs) + "\n"


def notes_page(known: Ours) -> str:
    """The page with the notes that the methods' pages refer to."""
    lines = [f"{number}. {paper_results.footnote(name)}" for name, number in _notes(known).items()]
    about = (
        "The methods' pages refer to these notes by number. They compare with the tables of the FedHeNN, FedGH and\n"
        "FedIN papers only ([all figures as printed](../../src/polyfed/results/published.csv)); other papers' tables\n"
        'stand [side by side](other-papers.md). "Scaled down" means a smaller experiment than the paper\'s.'
    )
    return "\n".join(["# Notes on the published figures", "", about, "", *lines]) + "\n"


# the same methods in other papers -------------------------------------------------------------------------------------
Column = tuple[str, str, str]  # paper, data set, setting
CIFAR10 = {
    "FedTGP: 20 clients, 2 classes": ("fedtgp", "cifar10", "num_clients=20, classes_per_client=2, architectures=8"),
    "FedTGP: 20, Dirichlet 0.1": ("fedtgp", "cifar10", "num_clients=20, dirichlet_alpha=0.1, architectures=8"),
    "FedKWAZ: 20, Dirichlet 0.1": ("fedkwaz", "cifar10", "num_clients=20, dirichlet_alpha=0.1, architectures=8"),
    "FedFree: 10, 1 class": ("fedfree", "cifar10", "num_clients=10, classes_per_client=1, architectures=8"),
    "FedFree: 20": ("fedfree", "cifar10", "num_clients=20, classes_per_client=1, architectures=8"),
    "FedFree: 100": ("fedfree", "cifar10", "num_clients=100, classes_per_client=1, architectures=8"),
    "FedRE: 10, pathological": ("fedre", "cifar10", "num_clients=10, partition=pathological"),
    "FedRE: 10, practical": ("fedre", "cifar10", "num_clients=10, partition=practical"),
}
SAME_SETTING = {
    "2 networks": "num_clients=20, dirichlet_alpha=0.1, architectures=2",
    "4 networks": "num_clients=20, dirichlet_alpha=0.1, architectures=4",
    "9 networks": "num_clients=20, dirichlet_alpha=0.1, architectures=9",
    "8 networks, 4 heads": "num_clients=20, dirichlet_alpha=0.1, architectures=8, classifiers=4",
    "8 networks, 50 clients": "num_clients=50, dirichlet_alpha=0.1, architectures=8, client_fraction=0.5",
    "8 networks, 100 clients": "num_clients=100, dirichlet_alpha=0.1, architectures=8, client_fraction=0.5",
}


def _accuracies(column: Column) -> dict[str, PaperNumber]:
    """A paper's accuracies of one data set and setting, by method."""
    return {e.method: e for e in paper_results.entries() if (e.paper, e.dataset, e.setting) == column}


def _shown(entry: PaperNumber | None) -> str:
    return "" if entry is None or entry.mean is None else f"{entry.mean:.2f}"


def _side_by_side(columns: Mapping[str, Mapping[str, str]]) -> str:
    """As Markdown, Local first. columns: heading -> method -> what is shown."""
    methods = dict.fromkeys(["local", *(name for shown in columns.values() for name in shown)])
    lines = [["", *columns], ["---", *["--:"] * len(columns)]]
    lines += [[f"`{name}`", *(shown.get(name, "") for shown in columns.values())] for name in methods]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cifar10() -> str:
    """One data set in several papers."""
    return _side_by_side(
        {
            heading: {name: _shown(entry) for name, entry in _accuracies(column).items() if name in METHODS}
            for heading, column in CIFAR10.items()
        }
    )


def _same_settings() -> str:
    """The settings that two papers have in common: FedTGP's figure, then FedKWAZ's."""
    columns = {}
    for heading, setting in SAME_SETTING.items():
        first, second = (_accuracies((paper, "cifar100", setting)) for paper in ("fedtgp", "fedkwaz"))
        columns[heading] = {
            name: f"{_shown(first.get(name)) or '-'} / {_shown(entry) or '-'}"
            for name, entry in second.items()
            if name in METHODS
        }
    return _side_by_side(columns)


def with_tables(text: str) -> str:
    """The page of other papers' figures with its tables as they should be: the first one below each heading."""
    for heading, table in (("CIFAR-10", _cifar10()), ("CIFAR-100: one setting in two papers", _same_settings())):
        before, found, after = text.partition(f"## {heading}\n")
        if not found:
            raise SystemExit(f"expected a section '{heading}' on the page {OTHER_PAPERS.name}")
        begin = after.index("|")
        end = after.index("\n\n", begin)
        text = before + found + after[:begin] + table + after[end:]
    return text


if __name__ == "__main__":
    measured = ours()
    NOTES.write_text(notes_page(measured), encoding="utf-8")
    OTHER_PAPERS.write_text(with_tables(OTHER_PAPERS.read_text(encoding="utf-8")), encoding="utf-8")
