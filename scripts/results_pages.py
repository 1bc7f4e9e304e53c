"""The site's pages of results, made of what is stored; the repository holds the figures and these programs only.

    python scripts/results_pages.py --read PAGE.md   # stores what `polyfed report RUNS... --results PAGE.md` wrote

Each file of docs/results/tables has a page, each folder docs/results/benchmark-SUITE has one as `polyfed benchmark`
writes it, and docs/results/tables itself has a list of all. Pages link to the file or the folder; the site turns such a
link to the page that is made of it (scripts/documentation.py).
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from polyfed.config.protocol import Protocol
from polyfed.report.benchmark_page import to_markdown as benchmark_page
from polyfed.report.benchmark_results import SettingResult, read_processor_time, read_results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
FOLDER = RESULTS / "tables"
SUITES = ("worth", "small", "sizes", "longer", "papers")
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
def read_page(text: str) -> dict[str, Measurement]:
    """Name -> what a page has that `polyfed report RUNS... --results PAGE.md` wrote."""
    return dict(_read_part(part) for part in text.split("\n## ")[1:])


def _read_part(part: str) -> tuple[str, Measurement]:
    lines = part.strip().splitlines()
    heading = re.fullmatch(r"[^:]+: (\S+, \d+ clients?)(?: \(\d+\))?", lines[0])
    folder = next((found[1] for line in lines if (found := re.search(r"    polyfed .*--out runs/(\S+)", line))), None)
    if heading is None or folder is None:
        raise ValueError(f"expected 'PLACE: DATASET, N clients' and a command with --out runs/..., got '{lines[0]}'")
    dataset = heading[1].partition(",")[0]
    notes = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    return folder.replace("/", "-"), Measurement(
        title=f"{folder}: {heading[1]}",
        about=[line for line in lines if line.startswith((f"{dataset} (", "Models: ", "Run on "))],
        commands=[line.strip() for line in lines if line.startswith("    polyfed ")],
        tables=list(_read_tables(lines)),
        notes=[note for note in notes if not note.startswith(EXPLAINED_ONCE)],
    )


def _read_tables(lines: Sequence[str]) -> Iterator[Table]:
    for number, line in enumerate(lines):
        if not line.startswith("|") or lines[number - 1].startswith("|"):
            continue
        caption = lines[number - 2] if lines[number - 2].endswith(":") else ""
        end = next((at for at in range(number, len(lines)) if not lines[at].startswith("|")), len(lines))
        rows = [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in lines[number:end]]
        yield Table(caption, rows[1], [rows[0], *rows[2:]])


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
    spent = read_processor_time(folder)
    page = benchmark_page(protocol.title, list(found.values()), spent, list(protocol.settings), protocol.primary)
    title, _, rest = page.partition("\n")
    files = " · ".join(f"[{name}]({folder.name}/{name}.json)" for name in [*found, "processor-seconds"])
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
    """Store what a page has."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--read", type=Path, metavar="PAGE.md", required=True, help="Store what this page has.")
    page: Path = options.parse_args().read
    for name, one in read_page(page.read_text(encoding="utf-8")).items():
        text = json.dumps(asdict(one), indent=1, ensure_ascii=False) + "\n"
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
