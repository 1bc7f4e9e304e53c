"""The site's pages of results, made of what is stored; the repository holds the figures and these programs only.

    python scripts/results_pages.py --store RUNS...   # stores the tables of comparisons, folders of `polyfed compare`

Each file of docs/results/tables has a page, each folder docs/results/benchmark-SUITE has one as `polyfed benchmark`
writes it, and docs/results/tables itself has a list of all. Pages link to the file or the folder; the site turns such a
link to the page that is made of it (scripts/documentation.py).
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from polyfed.config.protocol import Protocol
from polyfed.escaping import markdown_text
from polyfed.report.benchmark_page import to_markdown as benchmark_page
from polyfed.report.benchmark_results import SettingResult, read_results
from polyfed.report.comparison import compare_runs
from polyfed.report.comparison_tables import sub_tables
from polyfed.report.html_report import read_command
from polyfed.report.run_records import load_runs
from polyfed.report.text_tables import Column, markdown_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
FOLDER = RESULTS / "tables"
SUITES = ("rows", "worth", "small", "sizes", "longer", "papers")
EXPLAINED_ONCE = ("accuracy in % after", "by ...:", "two seeds:", "beside the paper:", "scaled down:")  # notes
READING = "[How to read the tables](../tables.md#how-to-read-the-tables)"
HOW_TO_READ = """\
## How to read the tables

- Accuracy is that of the last round, in the [stage](../evaluation.md) named: `personal` is the model that a client
  keeps, `received` the one that the server would send next.
- ± is the sample standard deviation over seeds. Differences to `local` are paired by seed, in percentage points.
- "std clients", "min client" and "lowest tenth" are taken over clients and averaged over seeds. Bytes are those of a
  whole run.
- Which rows a cap keeps is drawn. Stored figures of CIFAR-10, Fashion-MNIST and Sentiment140 are older and of the first
  rows of each class. Their files are in random order: a linear model cannot tell the earlier rows of a class from the
  later ones. So they stand, but no row can be added to them.
- "By ..." is the accuracy of the same models in the same stage with the method's other predictor.
- "Differs" marks more than three spreads from the paper's number, the root of the sum of both squares. "Scaled down"
  means another size than the paper's."""
VERSIONS = ("polyfed", "python", "torch", "numpy")
_CONTROL = re.compile(r"local|pooled(-\w+)?|.+-alone")  # rows that are no method's own


class Page(NamedTuple):
    """A page of the site: its place below docs/, and its text."""

    place: str
    text: str


@dataclass(frozen=True)
class Table:
    """One table: its caption (empty for the main one), its alignment row and its rows of cells, heading first."""

    caption: str
    alignment: list[str]
    rows: list[list[str]]

    def column(self, name: str, row: str) -> str:
        """The cell of a row in a column, not bold; empty where the table has none."""
        cells = next((cells for cells in self.rows[1:] if cells[0] == row), None)
        return cells[self.rows[0].index(name)].strip("*") if cells and name in self.rows[0] else ""

    def to_markdown(self) -> str:
        """As a page has it."""
        rows = [self.rows[0], self.alignment, *self.rows[1:]]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@dataclass(frozen=True)
class Measurement:
    """Tables of one experiment.

    Attributes:
        title: "fedgh/table3-small: cifar10, 10 clients". about: paragraphs on what was run, and with what.
        commands: that made it. notes: what else is to be known, a sentence each.
    """

    title: str
    about: list[str]
    commands: list[str]
    tables: list[Table]
    notes: list[str]

    def cell(self, row: str, column: str) -> str:
        """A row's cell in the first table that has the column; "" where none has."""
        return next((cell for table in self.tables if (cell := table.column(column, row))), "")

    @property
    def seeds(self) -> int:
        """How many seeds a comparison has; 0 where its text does not say."""
        found = re.search(r"seeds? ([\d, ]*\d)\. ", " ".join(self.about))
        return len(found[1].split(", ")) if found else 0


@functools.cache
def measurements() -> dict[str, Measurement]:
    """All that is stored in docs/results/tables, by the files' names."""
    return {path.stem: _read(path) for path in sorted(FOLDER.glob("*.json"))}


def _read(path: Path) -> Measurement:
    found = json.loads(path.read_text(encoding="utf-8"))
    return Measurement(**(found | {"tables": [Table(**table) for table in found["tables"]]}))


@functools.cache
def settings(suite: str) -> dict[str, SettingResult]:
    """The settings of a suite that have figures, in the order of its protocol."""
    names = list(Protocol.load(ROOT / "suites" / suite).settings)
    return {one.setting: one for one in read_results(RESULTS / f"benchmark-{suite}", names)}


# storing ------------------------------------------------------------------------------------------------------------
def read_comparison(folder: Path) -> Iterator[tuple[str, Measurement]]:
    """Name -> what a folder of a comparison has to tell, for each of its tables."""
    runs = load_runs(folder)
    command = read_command(folder)
    place = re.search(r"--out runs/(\S+)", command)
    if place is None:
        raise ValueError(f"expected a comparison made with --out runs/..., got {folder}: '{command}'")
    first = next(run for run in runs if run.finished)
    last = max((run.path / "result.json").stat().st_mtime for run in runs if run.finished)
    day = datetime.datetime.fromtimestamp(last, datetime.UTC).date().isoformat()
    versions = ", ".join(f"{name} {first.result.versions[name]}" for name in VERSIONS if name in first.result.versions)
    for section in compare_runs(runs).sections:
        about = [section.caption, f"Run on {day} with {versions}."]
        if networks := first.recipe.models.get("architectures"):
            about.insert(1, f"Models: {', '.join(networks)}.")
        (_, main), *more = sub_tables(section)
        tables = [_to_table("", main), *(_to_table(f"{markdown_text(title)}:", columns) for title, columns in more)]
        yield (
            place[1].replace("/", "-"),
            Measurement(
                title=f"{place[1]}: {section.facts['dataset']}, {section.facts['clients']} clients",
                about=list(map(markdown_text, about)),
                commands=[command],
                tables=tables,
                notes=[markdown_text(note) for note in section.notes if not note.startswith(EXPLAINED_ONCE)],
            ),
        )


def _to_table(caption: str, columns: Sequence[Column]) -> Table:
    heading, alignment, *rows = (
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in markdown_table(columns).splitlines()
    )
    return Table(caption, alignment, [heading, *rows])


# pages --------------------------------------------------------------------------------------------------------------
@functools.cache
def pages() -> Mapping[Path, Page]:
    """The file or the folder that a page is made of -> the page."""
    found = {FOLDER: Page("results/tables.md", _list_of_all())}
    for name, one in measurements().items():
        found[FOLDER / f"{name}.json"] = Page(f"results/tables/{name}.md", _page(name, one))
    for suite in SUITES:
        folder = RESULTS / f"benchmark-{suite}"
        page = Page(f"results/{folder.name}.md", _page_of_suite(suite))
        found |= {folder: page} | dict.fromkeys(folder.glob("*.json"), page)
    return found


def _page(name: str, one: Measurement) -> str:
    parts = [f"# {one.title}", *one.about, "\n".join(f"    {command}" for command in one.commands)]
    parts.append(f"{READING} · [JSON]({name}.json)")
    for table in one.tables:
        parts += [table.caption] if table.caption else []
        parts.append(table.to_markdown())
    parts.append("\n".join(f"- {note}" for note in one.notes))
    return "\n\n".join(filter(None, parts)) + "\n"


def _page_of_suite(suite: str) -> str:
    """As `polyfed benchmark` writes it, without figures."""
    protocol = Protocol.load(ROOT / "suites" / suite)
    folder = RESULTS / f"benchmark-{suite}"
    found = settings(suite)
    named = list(protocol.settings)
    page = benchmark_page(protocol.title, list(found.values()), named, protocol.primary, protocol.seen_before)
    title, _, rest = page.partition("\n")
    files = " · ".join(f"[{name}]({folder.name}/{name}.json)" for name in found)
    command = f"    polyfed benchmark suites/{suite} --results docs/results/{folder.name}"
    about = "The command runs all of it; what each part of this page is: [benchmarks]"
    return f"{title}\n\n{command}\n\n{about}(../benchmark.md#result). JSON: {files}\n{rest}"


def _list_of_all() -> str:
    """Suites, comparisons with their best method, and all else."""
    suites = "\n".join(f"- [{Protocol.load(ROOT / 'suites' / one).title}](benchmark-{one}.md)" for one in SUITES)
    lines = ["| comparison | `local` | best method | its accuracy | vs `local` | 95 % interval |"]
    lines.append("| :-- | --: | :-- | --: | --: | --: |")
    others = []
    for name, one in measurements().items():
        link = f"[{one.title}](tables/{name}.md)"
        if "vs Local" not in one.tables[0].rows[0]:
            others.append(f"- {link}")
            continue
        best = best_of(one)
        cells = [("local", "accuracy"), (best, "accuracy"), (best, "vs Local"), (best, "minus Local")]
        local, *figures = (one.cell(*place) for place in cells)
        lines.append(f"| {' | '.join([link, local, best, *figures])} |")
    about = (
        "A comparison is one `polyfed compare` of a scaled-down recipe. Its best method has the highest mean accuracy, "
        "controls aside: it is chosen after the fact, so that its lead is optimistic."
    )
    parts = ["# All tables", "## Benchmarks", suites, "## Comparisons", about, "\n".join(lines)]
    return "\n\n".join([*parts, "## Other measurements", "\n".join(others), HOW_TO_READ]) + "\n"


def best_of(one: Measurement) -> str:
    """The method with the highest accuracy, Local and the other controls aside."""
    methods = [row[0] for row in one.tables[0].rows[1:] if not _CONTROL.fullmatch(row[0])]
    return max(methods, key=lambda method: float(one.cell(method, "accuracy").split()[0]))


def main() -> None:
    """Store what folders of comparisons have."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--store", type=Path, nargs="+", metavar="RUNS", required=True, help="Store what these have.")
    for folder in options.parse_args().store:
        for name, one in read_comparison(folder):
            text = json.dumps(asdict(one), indent=1, ensure_ascii=False) + "\n"
            (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
