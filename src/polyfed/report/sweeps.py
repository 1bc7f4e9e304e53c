"""The table of a sweep: a comparison of the combinations of settings, in which validation chooses one.

The choice is the highest validation accuracy of the method's main stage in the reported round, mean over seeds;
the first in order where several are equal. Test accuracies are shown and never chosen by.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from polyfed.escaping import csv_text
from polyfed.records.read import make_folder, write_whole
from polyfed.report.comparison import compare_group
from polyfed.report.comparison_tables import ComparisonGroup, section_text, sub_tables
from polyfed.report.grouping import Group, how_ended
from polyfed.report.run_records import RunRecord, format_setting
from polyfed.report.statistics import Estimate
from polyfed.report.text_tables import Column, format_mean_std


@dataclass(frozen=True)
class SweepCell:
    """One combination of settings and its finished runs.

    Attributes:
        settings: swept key -> value. runs: one per seed.
        words: the command line's words that ask for it, ``("--set", "method.header_lr=0.1")``.
    """

    settings: Mapping[str, Any]
    runs: Sequence[RunRecord]
    words: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class SweepTable:
    """A sweep.

    Attributes:
        keys: the swept settings, dotted. section: the comparison of their combinations.
        rows: those of the section, in the grid's order. Further columns: for each swept key, dotted, its value;
            validation: score on these data in the reported round, mean over seeds, with ``_std`` and ``_margin``
            (`polyfed.report.statistics`); chosen: whether it is the one chosen by validation.
        chosen: the swept settings chosen by validation; None where no combination was run with all seeds.
        chosen_options: the chosen settings as the command line takes them; "" where nothing is chosen.
    """

    keys: tuple[str, ...]
    section: ComparisonGroup
    rows: pd.DataFrame
    chosen: dict[str, Any] | None
    chosen_options: str

    def __repr__(self) -> str:
        return to_text(self)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Each dotted key's last part, where that tells it from the others; else the whole key."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def named(settings: Mapping[str, Any]) -> str:
    """``"lr=0.1, epochs=5"``."""
    names = short_names(list(settings))
    return ", ".join(f"{names[key]}={format_setting(value)}" for key, value in settings.items())


def build_table(cells: Sequence[SweepCell], seeds: Sequence[int], notes: Sequence[str] = ()) -> SweepTable | None:
    """The table of a sweep, with the choice made; None where no run was finished.

    Args:
        cells: those of the grid, in order. seeds: with which each was to be run. notes: what else a reader must know.
    """
    known = [cell for cell in cells if cell.runs]
    if not known:
        return None
    names = [named(cell.settings) for cell in known]
    runs = {
        name: [dataclasses.replace(run, name=name) for run in cell.runs]
        for name, cell in zip(names, known, strict=True)
    }
    evaluation = known[0].runs[0].result.evaluation
    section = compare_group(Group(runs, _about(known), tuple(sorted(seeds)), evaluation, tuple(how_ended(runs))))
    validation = [Estimate.of({run.seed: run.figure("validation") for run in cell.runs}) for cell in known]
    further = [{**one.named("validation"), **cell.settings} for one, cell in zip(validation, known, strict=True)]
    rows = section.rows.join(pd.DataFrame(further, dtype=object))
    is_whole = rows["seeds"].map(len) == len(seeds)
    may_be_chosen = rows["validation"][is_whole & (rows["nothing_learnt"] == 0)].dropna()
    best = section.score.best(may_be_chosen) if len(may_be_chosen) else None
    place = next(iter(may_be_chosen.index[may_be_chosen == best]), None)
    choice = section.score.of_it("the choice is by validation accuracy, never by test accuracy")
    lost = [f"not to be chosen, as a seed is missing: {name}" for name in rows["name"][~is_whole]]
    return SweepTable(
        keys=tuple(known[0].settings),
        section=dataclasses.replace(section, notes=(*section.notes, choice, *lost, *notes)),
        rows=rows.assign(chosen=rows.index == place),
        chosen=None if place is None else dict(known[place].settings),
        chosen_options="" if place is None else shlex.join(known[place].words),
    )


def _about(cells: Sequence[SweepCell]) -> str:
    """What all rows have in common: ``"fedgh on cifar10, 10 clients, 10 rounds"``."""
    runs = [run for cell in cells for run in cell.runs]
    facts = [(run.label_or_method, run.result.dataset, run.result.clients, run.result.rounds) for run in runs]
    methods, datasets, clients, rounds = (" or ".join(dict.fromkeys(map(str, one))) for one in zip(*facts, strict=True))
    return f"{methods} on {datasets}, {clients} clients, {rounds} rounds"


def to_text(table: SweepTable, width: int = 100) -> str:
    """Aligned plain text, and the chosen settings ready for the command line."""
    rows = table.rows
    settings = [Column(name, list(map(format_setting, rows[key]))) for key, name in short_names(table.keys).items()]
    validation = list(map(Estimate, rows["validation"], rows["validation_std"]))
    chosen = rows["chosen"].map({True: "yes", False: ""}).mask(rows["nothing_learnt"] > 0, "nothing learnt")
    (title, (_, *scores)), *more = sub_tables(table.section, metrics=False)
    columns = [
        *settings,
        Column("validation", format_mean_std(validation, score=table.section.score)),
        *scores,
        Column("chosen", list(chosen), words=True),
    ]
    text = section_text(table.section, [(title, columns), *more], width, leading=len(settings))
    return f"{text}\nchosen by validation: {table.chosen_options or 'none'}\n"


def to_csv(table: SweepTable) -> str:
    """A line per row, exact; the swept settings under their whole keys; None is empty."""
    shown = table.rows.assign(**{key: table.rows[key].map(format_setting) for key in table.keys})
    for key in ("seeds", "difference_seeds"):
        shown[key] = [" ".join(map(str, seeds)) for seeds in shown[key]]
    return csv_text(list(shown), shown.to_dict("records"))


def write(table: SweepTable, folder: str | Path) -> Path:
    """``sweep.csv`` in the folder (made if missing), whole or not at all."""
    return write_whole(make_folder(folder) / "sweep.csv", to_csv(table).encode("utf-8"))
