"""Write the pages of docs/results/tables and the table of docs/results.md from the stored comparisons.

    python scripts/results_pages.py                  # after a file docs/results/tables/*.json has changed
    python scripts/results_pages.py --read PAGE.md   # first store what `polyfed report RUNS... --results PAGE.md` wrote

Each comparison is one JSON file with its tables; its page lies beside it. In docs/results.md the table stands between
``<!-- begin table -->`` and ``<!-- end table -->``; all else there is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "results.md"
FOLDER = DOCS / "results" / "tables"
BEGIN = "<!-- begin table -->\n"
END = "<!-- end table -->"
EXPLAINED_ONCE = ("accuracy in % after", "by ...:", "two seeds:", "beside the paper:", "scaled down:")  # notes
_CONTROL = re.compile(r"local|local-longer-\d+|pooled(-\w+)?|.+-alone")  # rows that are no method's own
_OTHER_STAGE = re.compile(r"(\S+): its stage (\w+) is compared with Local's stage (\w+)")


@dataclass(frozen=True)
class Table:
    """One table: its caption (empty for the main one), its alignment row and its rows of cells, heading first."""

    caption: str
    alignment: list[str]
    rows: list[list[str]]

    def column(self, name: str, method: str) -> str:
        """The cell of a method in a column, not bold; empty where the table has none."""
        cells = next((row for row in self.rows[1:] if row[0] == method), None)
        return cells[self.rows[0].index(name)].strip("*") if cells and name in self.rows[0] else ""


@dataclass(frozen=True)
class Comparison:
    """What one `polyfed compare` measured, as `polyfed report` printed it."""

    dataset: str
    clients: int
    setting: str
    models: str
    versions: str
    command: str
    tables: list[Table]
    notes: list[str]

    @property
    def folder(self) -> str:
        """Where the runs went: "fedgh/table3-small"."""
        found = re.search(r"--out runs/(\S+)", self.command)
        if found is None:
            raise ValueError(f"expected '--out runs/...' in the command, got '{self.command}'")
        return found[1]

    @property
    def name(self) -> str:
        """The name of its files."""
        return self.folder.replace("/", "-")


# reading ------------------------------------------------------------------------------------------------------------
def stored() -> list[Comparison]:
    """All comparisons, in the order of their files' names."""
    return [_from_json(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]


def _from_json(text: str) -> Comparison:
    found = json.loads(text)
    return Comparison(**(found | {"tables": [Table(**table) for table in found["tables"]]}))


def read_page(text: str) -> list[Comparison]:
    """The comparisons on a page that `polyfed report RUNS... --results PAGE.md` wrote."""
    return [_read_part(part) for part in text.split("\n## ")[1:]]


def _read_part(part: str) -> Comparison:
    lines = part.strip().splitlines()
    heading = re.fullmatch(r"[^:]+: (\S+), (\d+) clients?(?: \(\d+\))?", lines[0])
    if heading is None:
        raise ValueError(f"expected 'PLACE: DATASET, N clients' as a heading, got '{lines[0]}'")
    return Comparison(
        dataset=heading[1],
        clients=int(heading[2]),
        setting=next(line for line in lines if line.startswith(f"{heading[1]} (")),
        models=next((line for line in lines if line.startswith("Models: ")), ""),
        versions=next(line for line in lines if line.startswith("Run on ")),
        command=next((line.strip() for line in lines if line.startswith("    polyfed ")), ""),
        tables=list(_read_tables(lines)),
        notes=[line.removeprefix("- ") for line in lines if line.startswith("- ")],
    )


def _read_tables(lines: Sequence[str]) -> Iterator[Table]:
    for number, line in enumerate(lines):
        if not line.startswith("|") or lines[number - 1].startswith("|"):
            continue
        caption = lines[number - 2] if lines[number - 2].endswith(":") else ""
        end = next((at for at in range(number, len(lines)) if not lines[at].startswith("|")), len(lines))
        rows = [_cells(row) for row in lines[number:end]]
        yield Table(caption, rows[1], [rows[0], *rows[2:]])


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


# writing ------------------------------------------------------------------------------------------------------------
def pages() -> dict[Path, str]:
    """Every file that this script writes, with its text."""
    found = stored()
    texts = {FOLDER / f"{one.name}.md": _page(one) for one in found}
    return texts | {PAGE: _with_summary(PAGE.read_text(encoding="utf-8"), found)}


def store(comparisons: Sequence[Comparison]) -> None:
    """Write each comparison's JSON file."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for one in comparisons:
        text = json.dumps(asdict(one), indent=1, ensure_ascii=False) + "\n"
        (FOLDER / f"{one.name}.json").write_text(text, encoding="utf-8")


def _page(one: Comparison) -> str:
    about = [line for line in (one.setting, one.models, one.versions) if line]
    parts = [
        f"# {one.folder}: {one.dataset}, {one.clients} clients\n",
        "\n".join(about) + "\n",
        f"    {one.command}\n",
        f"[How to read these tables](../../results.md#how-to-read-the-tables); [the same as JSON]({one.name}.json).\n",
    ]
    for table in one.tables:
        parts += [f"{table.caption}\n"] if table.caption else []
        parts.append(to_markdown(table) + "\n")
    if notes := "\n".join(f"- {note}" for note in _shown_notes(one.notes)):
        parts.append(notes + "\n")
    return "\n".join(parts)


def to_markdown(table: Table) -> str:
    """A table as a page has it."""
    rows = [table.rows[0], table.alignment, *table.rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown_notes(notes: Sequence[str]) -> Iterator[str]:
    """Without those that hold for all pages; one note for all methods that are compared across stages."""
    across = [found for note in notes if (found := _OTHER_STAGE.fullmatch(note))]
    if across:
        names = ", ".join(found[1] for found in across)
        yield f"vs Local compares the stage {across[0][2]} of {names} with Local's stage {across[0][3]}"
    for note in notes:
        if not note.startswith(EXPLAINED_ONCE) and not _OTHER_STAGE.fullmatch(note):
            yield note


class Best(NamedTuple):
    """The method with the highest accuracy on a page, Local and the other controls aside."""

    name: str
    accuracy: str
    difference: str
    interval: str


def _best(one: Comparison) -> Best:
    main = one.tables[0]
    methods = [row[0] for row in main.rows[1:] if not _CONTROL.fullmatch(row[0])]
    name = max(methods, key=lambda method: float(main.column("accuracy", method).split()[0]))
    interval = next((cell for table in one.tables if (cell := table.column("minus Local", name))), "")
    return Best(name, main.column("accuracy", name), main.column("vs Local", name), interval)


def seeds_of(one: Comparison) -> int:
    """How many seeds a comparison has."""
    seeds = re.search(r"seeds? ([\d, ]*\d)\. ", one.setting)
    return len(seeds[1].split(", ")) if seeds else 0


def _with_summary(text: str, comparisons: Sequence[Comparison]) -> str:
    if BEGIN not in text or END not in text:
        raise ValueError(f"expected '{BEGIN.strip()}' and '{END}' on the page, got none")
    before, _, rest = text.partition(BEGIN)
    lines = [
        "| tables | data | clients | seeds | `local` | best method | its accuracy | vs `local` | 95 % interval |",
        "| :-- | :-- | --: | --: | --: | :-- | --: | --: | --: |",
    ]
    for one in comparisons:
        best = _best(one)
        cells = [
            f"[{one.folder}](results/tables/{one.name}.md)",
            one.dataset,
            str(one.clients),
            str(seeds_of(one) or ""),
            one.tables[0].column("accuracy", "local"),
            best.name,
            best.accuracy,
            best.difference,
            best.interval,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return before + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


def main() -> None:
    """Store what a page has, if one is given; write all pages."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--read", type=Path, metavar="PAGE.md", help="Store the comparisons of this page first.")
    page: Path | None = options.parse_args().read
    if page is not None:
        store(read_page(page.read_text(encoding="utf-8")))
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
