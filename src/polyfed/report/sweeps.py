"""The table of a sweep: a row per combination of settings, Local beside it, the one chosen by validation marked.

The choice is the highest validation accuracy of the method's main stage in the reported round, mean over seeds;
the first in order where several are equal. Test accuracies are shown and never chosen by.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from polyfed.escaping import csv_text
from polyfed.records.main_score import MainScore
from polyfed.records.read import make_folder, write_whole
from polyfed.report.grouping import Group
from polyfed.report.run_records import RunRecord, format_setting
from polyfed.report.statistics import Estimate, mean_of
from polyfed.report.text_tables import (
    NOT_KNOWN,
    Column,
    duration,
    format_mean_std,
    scored,
    size,
    text_blocks,
    wrapped,
)


@dataclass(frozen=True, eq=False)
class SweepTable:
    """A sweep.

    Attributes:
        keys: the swept settings, dotted. score: of what is called score below. caption, notes: in words.
        rows: a frame, Local's rows first, then in the grid's order. Scores in [0, 1]; None is "not known". method,
            stage, seeds: what was run and scored. A column for each key: its value. validation, test: score on these
            data in the reported round, mean over seeds. best: test score in the round that was best on validation data.
            local: Local's test score with the same settings otherwise, on the seeds that both have; difference: from
            it, paired by seed. Beside validation, test and difference ``_std`` and ``_margin`` over seeds
            (`polyfed.report.statistics`). bytes_up, bytes_down, seconds: of one whole run. refused: uploads, over all
            runs. nothing_learnt: in how many of the runs clients' work did not count, or diverged; such a row is not
            chosen. options: the settings as the command line takes them; "" for Local. chosen: whether it is the one
            chosen by validation.
    """

    keys: tuple[str, ...]
    score: MainScore
    caption: str
    notes: tuple[str, ...]
    rows: pd.DataFrame

    @property
    def chosen(self) -> dict[str, Any] | None:
        """The swept settings chosen by validation; None where no combination was run with all seeds."""
        chosen = self.rows[self.rows["chosen"].astype(bool)]
        return None if chosen.empty else {key: chosen[key].iloc[0] for key in self.keys}

    @property
    def chosen_options(self) -> str:
        """The chosen settings as the command line takes them; empty where nothing is chosen."""
        return "".join(self.rows["options"][self.rows["chosen"].astype(bool)])

    def __repr__(self) -> str:
        return to_text(self)


@dataclass(frozen=True)
class SweepCell:
    """One combination of settings and its finished runs.

    Attributes:
        settings: swept key -> value; a run of Local has no values for the hyperparameters of another method.
        runs: one per seed. complete: whether no seed is missing.
        beside: the runs of Local with the same settings otherwise; none for Local itself.
        words: the command line's words that ask for it, ``("--set", "method.header_lr=0.1")``; none for Local.
    """

    settings: Mapping[str, Any]
    runs: Sequence[RunRecord]
    complete: bool = True
    beside: Sequence[RunRecord] = ()
    words: tuple[str, ...] = ()


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Each dotted key's last part, where that tells it from the others; else the whole key."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def named(keys: Sequence[str], settings: Mapping[str, Any]) -> str:
    """``"lr=0.1, epochs=5"``."""
    names = short_names(keys)
    return ", ".join(f"{names[key]}={format_setting(settings[key])}" for key in keys if key in settings)


# building ---------------------------------------------------------------------------------------------------------


def build_table(keys: Sequence[str], cells: Sequence[SweepCell], notes: Sequence[str] = ()) -> SweepTable | None:
    """The table of a sweep, with the choice made; None where no run was finished.

    Args:
        keys: the swept settings, dotted.
        cells: Local's first, then those of the grid, in order.
        notes: what else a reader must know.
    """
    known = [cell for cell in cells if cell.runs]
    if not known:
        return None
    grid = [cell for cell in known if cell.words]
    group = _group(grid or known)
    score = group.score
    rows = pd.DataFrame([_row(keys, cell) for cell in known], dtype=object)
    complete = pd.Series([cell.complete for cell in known])
    may_be_chosen = rows["validation"][(rows["options"] != "") & complete & (rows["nothing_learnt"] == 0)].dropna()
    best = score.best(may_be_chosen) if len(may_be_chosen) else None
    rows["chosen"] = rows.index == next(iter(may_be_chosen.index[may_be_chosen == best]), None)
    scoring = score.of_it(f"Accuracy: {group.scoring(None)}, {group.evaluation.when}.")
    lost = [f"not to be chosen, as a seed is missing: {named(keys, c.settings)}" for c in grid if not c.complete]
    lost += _unlearnt(keys, grid)
    return SweepTable(
        keys=tuple(keys),
        score=score,
        caption=f"{_about(group)}. {scoring}{group.preset_text()}",
        notes=(_about_columns(rows, score), *lost, *notes),
        rows=rows,
    )


def _unlearnt(keys: Sequence[str], grid: Sequence[SweepCell]) -> Iterator[str]:
    """With which settings nothing was learnt, and why with the first of them."""
    found = {
        named(keys, cell.settings): next(filter(None, (run.result.nothing_learnt for run in cell.runs)), "")
        for cell in grid
    }
    lost = [settings for settings, why in found.items() if why]
    if lost:
        more = f"; the same, in other numbers: {'; '.join(lost[1:])}" if lost[1:] else ""
        yield f"not to be chosen, {lost[0]}: {found[lost[0]]}{more}"


def _group(cells: Sequence[SweepCell]) -> Group:
    rows = {str(number): list(cell.runs) for number, cell in enumerate(cells)}
    seeds = tuple(sorted({run.seed for cell in cells for run in cell.runs}))
    return Group(rows, "", seeds, cells[0].runs[0].result.evaluation)


def _row(keys: Sequence[str], cell: SweepCell) -> dict[str, Any]:
    first = cell.runs[0]
    score = first.result.main_score.name
    validation = {run.seed: run.figure("validation") for run in cell.runs}
    test = {run.seed: run.figure(score) for run in cell.runs}
    local = {run.seed: run.figure(score) for run in cell.beside}
    difference = Estimate.difference(test, local)
    return {
        "method": first.label_or_method,
        **{key: cell.settings.get(key) for key in keys},
        "stage": first.stage,
        "seeds": tuple(test),
        **Estimate.of(validation).named("validation"),
        **Estimate.of(test).named("test"),
        "best": mean_of([run.figure(f"{score}_best_by_validation") for run in cell.runs]),
        "local": mean_of([local[seed] for seed in difference.seeds]),
        **difference.named("difference"),
        **{key: mean_of([run.figure(key) for run in cell.runs]) for key in ("bytes_up", "bytes_down", "seconds")},
        "refused": int(sum(run.figure("refused") or 0 for run in cell.runs)),
        "nothing_learnt": sum(bool(run.result.nothing_learnt) for run in cell.runs),
        "options": shlex.join(cell.words),
    }


def _about(group: Group) -> str:
    """What all rows have in common: ``"fedgh on cifar10, 10 clients, 10 rounds, seeds 0, 1"``."""
    facts = [(run.label_or_method, run.result.dataset, run.result.clients, run.result.rounds) for run in group.runs]
    methods, datasets, clients, rounds = (" or ".join(dict.fromkeys(map(str, one))) for one in zip(*facts, strict=True))
    return f"{methods} on {datasets}, {clients} clients, {rounds} rounds, {group.seeds_text()}"


def _about_columns(rows: pd.DataFrame, score: MainScore) -> str:
    note = "accuracies in %" if score.is_share else f"{score.title} (low is good)"
    note += "; ± is the sample standard deviation over seeds" if rows["seeds"].map(len).max() > 1 else ""
    if rows["difference"].notna().any():
        unit = "in percentage points" if score.is_share else "below zero where it is better"
        note += f"; the difference to Local, with the same settings otherwise, is {unit}"
    return score.of_it(f"{note}; the choice is by validation accuracy, never by test accuracy")


# showing ----------------------------------------------------------------------------------------------------------


def _columns(table: SweepTable) -> list[Column]:
    """The columns; the last says which row is chosen."""
    rows = table.rows
    score = table.score

    def spread(name: str, sign: str = "") -> list[str]:
        return format_mean_std(list(map(Estimate, rows[name], rows[f"{name}_std"])), sign, score)

    columns = [
        Column("test", spread("test")),
        Column("best by\nvalid.", [scored(value, score) for value in rows["best"]]),
        Column("vs Local", spread("difference", "+")),
        Column("bytes\nup", list(map(size, rows["bytes_up"]))),
        Column("bytes\ndown", list(map(size, rows["bytes_down"]))),
        Column("time", list(map(duration, rows["seconds"]))),
        Column("refused", [str(count or NOT_KNOWN) for count in rows["refused"]]),
    ]
    chosen = rows["chosen"].map({True: "yes", False: ""}).mask(rows["nothing_learnt"] > 0, "nothing learnt")
    return [
        Column("method", list(rows["method"]), words=True),
        *(
            Column(name, [NOT_KNOWN if value is None else format_setting(value) for value in rows[key]])
            for key, name in short_names(table.keys).items()
        ),
        Column("validation", spread("validation")),
        *(column for column in columns if not column.is_empty),
        Column("chosen", list(chosen), words=True),
    ]


def to_text(table: SweepTable, width: int = 100) -> str:
    """Aligned plain text, and the chosen settings ready for the command line."""
    shown = text_blocks(_columns(table), width, leading=1 + len(table.keys))
    lines = [wrapped(table.caption, width), "", shown, "", *(wrapped(note, width) for note in table.notes)]
    return "\n".join([*lines, "", f"chosen by validation: {table.chosen_options or 'none'}"]) + "\n"


def to_csv(table: SweepTable) -> str:
    """A line per row, exact; the swept settings under their whole keys; None is empty."""
    shown = table.rows.drop(columns="options")
    shown["seeds"] = [" ".join(map(str, seeds)) for seeds in shown["seeds"]]
    for key in table.keys:
        shown[key] = [None if value is None else format_setting(value) for value in shown[key]]
    return csv_text(list(shown), shown.to_dict("records"))


def write(table: SweepTable, folder: str | Path) -> Path:
    """``sweep.csv`` in the folder (made if missing), whole or not at all."""
    return write_whole(make_folder(folder) / "sweep.csv", to_csv(table).encode("utf-8"))
