"""The table of a sweep: a row per combination of settings, Local beside it, the one chosen by validation marked.

The choice is the highest validation accuracy of the method's main stage in the last evaluated round, mean over seeds;
the first in order where several are equal. Test accuracies are shown and never chosen by.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.escaping import csv_text, json_text, markdown_text, visible
from polyfed.markup import notes, paragraph
from polyfed.markup import table as as_html
from polyfed.places import shown_place
from polyfed.report.atomic_files import make_folder, write_whole
from polyfed.report.grouping import Group
from polyfed.report.run_records import RunRecord, format_setting
from polyfed.report.statistics import paired_difference
from polyfed.report.text_tables import (
    Column,
    finite,
    format_mean_std,
    markdown_table,
    mean_of,
    min_width,
    render_text,
    scored,
    std_of,
    wrap_columns,
    wrapped,
)
from polyfed.results.main_score import ACCURACY, MainScore
from polyfed.results.stored_files import SweepRow, SweepRun
from polyfed.units import human_bytes, human_seconds

__all__ = ["SweepCell", "SweepRow", "SweepTable", "build_table", "named", "short_names", "to_text", "write"]

_COSTS = ("bytes\nup", "bytes\ndown", "time", "refused")


@dataclass(frozen=True)
class SweepCell:
    """One combination of settings and its finished runs.

    Attributes:
        settings: swept key -> value; a run of Local has no values for the hyperparameters of another method.
        runs: one per seed. complete: whether no seed is missing.
        beside: the runs of Local with the same settings otherwise; none for Local itself.
        words: the command line's words that ask for this combination, ``("--set", "method.header_lr=0.1")``.
    """

    settings: Mapping[str, Any]
    runs: Sequence[RunRecord]
    complete: bool = True
    beside: Sequence[RunRecord] = ()
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class SweepTable:
    """A sweep. keys: the swept settings. rows: Local's first, then in the order of the grid.

    score: what the accuracies are.
    """

    keys: tuple[str, ...]
    caption: str
    rows: tuple[SweepRow, ...]
    notes: tuple[str, ...]
    score: MainScore = ACCURACY

    @property
    def chosen(self) -> SweepRow | None:
        """The row chosen by validation; None where no combination was run with all seeds."""
        return next((row for row in self.rows if row.chosen), None)

    @property
    def chosen_options(self) -> str:
        """The chosen settings as the command line takes them; empty where nothing is chosen."""
        return "" if self.chosen is None else shlex.join(self.chosen.words)

    def __str__(self) -> str:
        return to_text(self)

    def __repr__(self) -> str:
        return f"SweepTable({', '.join(self.keys)}: {len(self.rows)} rows, chosen: {self.chosen_options or 'none'})"

    def _repr_html_(self) -> str:
        return to_html(self)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Each dotted key's last part, where that tells it from the others; else the whole key."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


# building ---------------------------------------------------------------------------------------------------------


def build_table(keys: Sequence[str], cells: Sequence[SweepCell], notes: Sequence[str] = ()) -> SweepTable | None:
    """The table of a sweep, with the choice made; None where no run was finished.

    Args:
        keys: the swept settings, dotted.
        cells: Local's first, then those of the grid, in order.
        notes: what else a reader must know.
    """
    found = [(cell, _row(cell)) for cell in cells if cell.runs]
    if not found:
        return None
    sound = [(cell, row) for cell, row in found if cell.complete and cell.words and not row.nothing_learnt]
    candidates = [row for _, row in sound if row.validation is not None]
    main = [cell for cell, _ in found if cell.words] or [cell for cell, _ in found]
    group = _group(main)
    score = group.score
    top = score.best(row.validation for row in candidates if row.validation is not None) if candidates else None
    best = next((row for row in candidates if row.validation == top), None)  # the first of equals
    rows = tuple(row.model_copy(update={"chosen": row is best}) for _, row in found)
    scored = score.of_it(f"Accuracy: {group.scoring(None)}, after the last round.")
    caption = f"{_about(main)}. {scored}{group.preset_text()}"
    several = any(len(row.seeds) > 1 for row in rows)
    what = "accuracies in %" if score.is_share else f"{score.title} (low is good)"
    told = what + ("; ± is the sample standard deviation over seeds" if several else "")
    if any(row.difference is not None for row in rows):
        unit = "in percentage points" if score.is_share else "below zero where it is better"
        told += f"; the difference to Local, with the same settings otherwise, is {unit}"
    told = score.of_it(f"{told}; the choice is by validation accuracy, never by test accuracy")
    left = [cell for cell, _ in found if cell.words and not cell.complete]
    lost = [f"not to be chosen, as a seed is missing: {named(keys, cell.settings)}" for cell in left]
    lost += [
        f"not to be chosen, {named(keys, cell.settings)}: {run.result.nothing_learnt}"
        for cell, _ in found
        for run in cell.runs
        if cell.words and run.result.nothing_learnt
    ]
    return SweepTable(tuple(keys), caption, rows, (told, *lost, *notes), score)


def _row(cell: SweepCell) -> SweepRow:
    first = cell.runs[0]
    results = [run.result for run in cell.runs]
    validation = [_validation(run) for run in cell.runs]
    accuracy = [finite(result.accuracy) for result in results]
    local = {run.seed: finite(run.result.accuracy) for run in cell.beside}
    difference = paired_difference({run.seed: a for run, a in zip(cell.runs, accuracy, strict=True)}, local)
    return SweepRow.model_construct(  # unchecked: a diverged figure may be too large for what is read
        settings=dict(cell.settings),
        method=first.label_or_method,
        stage=first.stage,
        seeds=tuple(run.seed for run in cell.runs),
        validation=mean_of(validation),
        validation_std=std_of(validation),
        accuracy=mean_of(accuracy),
        accuracy_std=std_of(accuracy),
        best=mean_of([result.accuracy_best_by_validation for result in results]),
        local=mean_of([local[seed] for seed in difference.seeds]),
        difference=difference.mean,
        difference_std=difference.std,
        bytes_up=mean_of([result.bytes_up for result in results]),
        bytes_down=mean_of([result.bytes_down for result in results]),
        seconds=mean_of([result.seconds for result in results]),
        refused=sum(result.refused or 0 for result in results),
        words=cell.words,
        runs=tuple(
            SweepRun(seed=run.seed, path=str(run.path), validation=v, accuracy=a)
            for run, v, a in zip(cell.runs, validation, accuracy, strict=True)
        ),
        nothing_learnt=sum(bool(result.nothing_learnt) for result in results),
    )


def _validation(run: RunRecord) -> float | None:
    """Validation accuracy of the main stage in the last evaluated round."""
    return next((finite(record.validation) for record in reversed(run.rounds) if record.evaluated), None)


def _group(cells: Sequence[SweepCell]) -> Group:
    runs = {str(number): list(cell.runs) for number, cell in enumerate(cells)}
    seeds = tuple(sorted({run.seed for cell in cells for run in cell.runs}))
    return Group(runs, "", seeds, cells[0].runs[0].result.evaluation)


def _about(cells: Sequence[SweepCell]) -> str:
    """What all rows have in common: ``"fedgh on cifar10, 10 clients, 10 rounds, seeds 0, 1"``."""
    runs = [run for cell in cells for run in cell.runs]
    methods = _alternatives(run.label_or_method for run in runs)
    parts = [
        _alternatives(run.result.dataset for run in runs),
        f"{_alternatives(run.result.clients for run in runs)} clients",
        f"{_alternatives(run.result.rounds for run in runs)} rounds",
        _group(cells).seeds_text(),
    ]
    return f"{methods} on {', '.join(parts)}"


def _alternatives(values: Iterable[object]) -> str:
    """``"2"``, ``"2 or 3"``: each value once."""
    return " or ".join(dict.fromkeys(map(str, values)))


def named(keys: Sequence[str], settings: Mapping[str, Any]) -> str:
    """``"lr=0.1, epochs=5"``."""
    names = short_names(keys)
    return ", ".join(f"{names[key]}={format_setting(settings[key])}" for key in keys if key in settings)


# showing ----------------------------------------------------------------------------------------------------------


def _columns(table: SweepTable) -> list[Column]:
    rows = table.rows
    names = short_names(table.keys)
    columns = [Column("method", [row.method for row in rows], words=True)]
    columns += [
        Column(names[key], [format_setting(row.settings[key]) if key in row.settings else "-" for row in rows])
        for key in table.keys
    ]
    score = table.score
    numbers = [
        ("validation", format_mean_std([(row.validation, row.validation_std) for row in rows], score=score)),
        ("test", format_mean_std([(row.accuracy, row.accuracy_std) for row in rows], score=score)),
        ("best by\nvalid.", [scored(row.best, score) for row in rows]),
        ("vs Local", format_mean_std([(row.difference, row.difference_std) for row in rows], "+", score)),
        (_COSTS[0], ["-" if row.bytes_up is None else human_bytes(row.bytes_up) for row in rows]),
        (_COSTS[1], ["-" if row.bytes_down is None else human_bytes(row.bytes_down) for row in rows]),
        (_COSTS[2], ["-" if row.seconds is None else human_seconds(row.seconds) for row in rows]),
        (_COSTS[3], [str(row.refused or "-") for row in rows]),
    ]
    columns += [Column(head, cells) for head, cells in numbers if head == "validation" or set(cells) != {"-"}]
    return [*columns, Column("chosen", [_said(row) for row in rows], words=True)]


def _said(row: SweepRow) -> str:
    """In the column of the choice."""
    if row.nothing_learnt:
        return "nothing learnt"
    return "yes" if row.chosen else ""


def to_text(table: SweepTable, width: int = 100) -> str:
    """Aligned plain text, and the chosen settings ready for the command line."""
    notes = [wrapped(note, width) for note in table.notes]
    lines = [wrapped(table.caption, width), "", "\n\n".join(_text_blocks(table, width)), "", *notes]
    return "\n".join([*lines, "", f"chosen by validation: {table.chosen_options or 'none'}"]) + "\n"


def _text_blocks(table: SweepTable, width: int) -> Iterator[str]:
    """The table in one block, or, where it is too wide, first what the choice is about, then the costs."""
    columns = _columns(table)
    if min_width(columns) > width:
        costs = [column for column in columns if column.heading in _COSTS]
        front = 1 + len(table.keys)
        for part in ([column for column in columns if column not in costs], [*columns[:front], *costs]):
            yield from (render_text(block, width) for block in wrap_columns(part, width, front))
    else:
        yield render_text(columns, width)


def to_markdown(table: SweepTable) -> str:
    """GitHub's table under its caption."""
    notes = "\n".join(f"- {markdown_text(note)}" for note in table.notes)
    options = visible(" ".join(table.chosen_options.split())).replace("`", "'")
    chosen = f"Chosen by validation: `{options}`\n" if options else "Nothing was chosen.\n"
    return f"**{markdown_text(table.caption)}**\n\n" + markdown_table(_columns(table)) + f"\n\n{chosen}\n{notes}\n"


def to_html(table: SweepTable) -> str:
    """For notebooks: the table, and what is chosen."""
    columns = _columns(table)
    headings = [column.heading.replace("\n", " ") for column in columns]
    words = [place for place, column in enumerate(columns) if column.words]
    shown = as_html(headings, list(zip(*(column.cells for column in columns), strict=True)), words)
    chosen = paragraph(f"Chosen by validation: {table.chosen_options or 'none'}", strong=True)
    return "".join([chosen, paragraph(table.caption), shown, notes(table.notes)])


def to_csv(table: SweepTable) -> str:
    """A line per row, exact; the swept settings under their whole keys; None is empty."""
    plain = [_plain(row, table.score) for row in table.rows]
    rest = [name for name in plain[0] if name not in ("settings", "words", "runs")]
    lines = [
        {name: row[name] for name in rest}
        | {"seeds": " ".join(map(str, row["seeds"]))}
        | {key: format_setting(value) for key, value in row["settings"].items()}
        for row in plain
    ]
    return csv_text(["method", *table.keys, *rest[1:]], lines)


def to_json(table: SweepTable) -> str:
    """Everything, exact, with each run."""
    chosen = None if table.chosen is None else dict(table.chosen.settings)
    about = {
        "caption": table.caption,
        "keys": list(table.keys),
        "chosen": chosen,
        "chosen_options": table.chosen_options,
    }
    about |= {} if table.score is ACCURACY else {"score": table.score.name}
    content = {**about, "rows": [_plain(row, table.score) for row in table.rows], "notes": list(table.notes)}
    return json_text(content, indent=2) + "\n"


def _plain(row: SweepRow, score: MainScore) -> dict[str, Any]:
    runs = [score.renamed(run.model_dump() | {"path": shown_place(run.path)}) for run in row.runs]
    return score.renamed(vars(row) | {"settings": dict(row.settings), "runs": runs})


def write(table: SweepTable, folder: str | Path) -> list[Path]:
    """``sweep.md``, ``sweep.csv`` and ``sweep.json`` in the folder (made if missing), each whole or not at all.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    path = make_folder(folder)
    texts = {"md": to_markdown(table), "csv": to_csv(table), "json": to_json(table)}
    return [write_whole(path / f"sweep.{form}", text.encode("utf-8")) for form, text in texts.items()]
