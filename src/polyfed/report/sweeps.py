"""The table of a sweep: a row per combination of settings, Local beside it, the one chosen by validation marked.

The choice is the highest validation accuracy of the method's main stage in the reported round, mean over seeds;
the first in order where several are equal. Test accuracies are shown and never chosen by.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from polyfed.errors import ConfigError
from polyfed.escaping import csv_text, json_text, markdown_text, visible
from polyfed.markup import notes, paragraph
from polyfed.places import check_name, shown_place
from polyfed.report.atomic_files import make_folder, write_whole
from polyfed.report.comparison_tables import columns_as_html, latex_table
from polyfed.report.grouping import Group
from polyfed.report.run_records import RunRecord, format_setting
from polyfed.report.statistics import Estimate, finite, mean_of
from polyfed.report.text_tables import (
    Column,
    duration,
    format_mean_std,
    markdown_table,
    scored,
    size,
    text_blocks,
    wrapped,
)
from polyfed.results.fields import Count, Flag, Loss, Record, Setting, Text, one_of, validated
from polyfed.results.main_score import ACCURACY, RMSE, MainScore
from polyfed.results.read import SWEEP, check_links, parse_json


class SweepRun(Record):
    """One run of a row. validation, test: its score on these data, in the reported round."""

    seed: Count
    path: Text
    validation: Loss | None
    test: Loss | None


class SweepRow(Record):
    """One combination over its seeds. Accuracies in [0, 1]; None is "not known". Means and deviations are over seeds.

    Attributes:
        settings: swept key -> value. method, stage: what was run and scored. seeds: those averaged over.
        validation, validation_std: score on validation data in the reported round.
        test, test_std: score on test data in that round.
        best: test score in the round that was best on validation data.
        local: Local's test score with the same settings otherwise, on the seeds that both have.
        difference, difference_std: test score minus Local's, paired by seed.
        bytes_up, bytes_down, seconds: of one whole run. refused: uploads refused, summed over the runs.
        chosen: whether it is the one chosen by validation.
        words: the command line's words that ask for it, ``("--set", "method.header_lr=0.1")``; none for Local.
        runs: each run's own figures.
        nothing_learnt: in how many of the runs clients' work did not count, or diverged; such a row is not chosen.
    """

    settings: dict[str, Setting]
    method: Text
    stage: Text
    seeds: tuple[Count, ...]
    validation: Loss | None
    validation_std: Loss | None
    test: Loss | None
    test_std: Loss | None
    best: Loss | None
    local: Loss | None
    difference: Loss | None
    difference_std: Loss | None
    bytes_up: Loss | None
    bytes_down: Loss | None
    seconds: Loss | None
    refused: Count
    words: tuple[Text, ...]
    runs: tuple[SweepRun, ...]
    chosen: Flag
    nothing_learnt: Count


class SweepTable(Record):
    """A sweep, as ``sweep.json`` holds it. keys: the swept settings. rows: Local's first, then in the grid's order.

    score_name: of what is called score in the rows.
    """

    keys: tuple[Text, ...]
    score_name: Annotated[str, one_of(ACCURACY.name, RMSE.name)]
    caption: Text
    notes: tuple[Text, ...]
    rows: tuple[SweepRow, ...]

    @property
    def score(self) -> MainScore:
        """The main score."""
        return RMSE if self.score_name == RMSE.name else ACCURACY

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


@dataclass(frozen=True)
class SweepCell:
    """One combination of settings and its finished runs.

    Attributes:
        settings: swept key -> value; a run of Local has no values for the hyperparameters of another method.
        runs: one per seed. complete: whether no seed is missing.
        beside: the runs of Local with the same settings otherwise; none for Local itself.
        words: as of `SweepRow`.
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
    validation = [Estimate.of(_validation(cell.runs)).mean for cell in known]
    may_be_chosen = [
        value is not None and cell.complete and bool(cell.words) and not any(r.result.nothing_learnt for r in cell.runs)
        for cell, value in zip(known, validation, strict=True)
    ]
    values = [value for value, may in zip(validation, may_be_chosen, strict=True) if may and value is not None]
    best = score.best(values) if values else None
    chosen = next((at for at, value in enumerate(validation) if may_be_chosen[at] and value == best), None)
    rows = tuple(_row(cell, at == chosen) for at, cell in enumerate(known))
    scoring = score.of_it(f"Accuracy: {group.scoring(None)}, {group.evaluation.when}.")
    lost = [f"not to be chosen, as a seed is missing: {named(keys, c.settings)}" for c in grid if not c.complete]
    lost += _unlearnt(keys, grid)
    return SweepTable(
        keys=tuple(keys),
        score_name=score.name,
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


def _validation(runs: Sequence[RunRecord]) -> dict[int, float | None]:
    """Seed -> the validation score of the main stage in the reported round."""
    return {run.seed: finite(run.result.validation) for run in runs}


def _row(cell: SweepCell, chosen: bool) -> SweepRow:
    first = cell.runs[0]
    results = [run.result for run in cell.runs]
    scores = {run.seed: finite(run.result.accuracy) for run in cell.runs}
    local = {run.seed: finite(run.result.accuracy) for run in cell.beside}
    by_seed = _validation(cell.runs)
    validation = Estimate.of(by_seed)
    test = Estimate.of(scores)
    difference = Estimate.difference(scores, local)
    of_run = ("bytes_up", "bytes_down", "seconds")
    return SweepRow(
        settings=dict(cell.settings),
        method=first.label_or_method,
        stage=first.stage,
        seeds=tuple(scores),
        validation=validation.mean,
        validation_std=validation.std,
        test=test.mean,
        test_std=test.std,
        best=mean_of([result.accuracy_best_by_validation for result in results]),
        local=mean_of([local[seed] for seed in difference.seeds]),
        difference=difference.mean,
        difference_std=difference.std,
        **{key: mean_of([getattr(result, key) for result in results]) for key in of_run},
        refused=sum(result.refused or 0 for result in results),
        words=cell.words,
        runs=tuple(
            SweepRun(seed=run.seed, path=shown_place(run.path), validation=by_seed[run.seed], test=scores[run.seed])
            for run in cell.runs
        ),
        chosen=chosen,
        nothing_learnt=sum(bool(result.nothing_learnt) for result in results),
    )


def _about(group: Group) -> str:
    """What all rows have in common: ``"fedgh on cifar10, 10 clients, 10 rounds, seeds 0, 1"``."""
    facts = [(run.label_or_method, run.result.dataset, run.result.clients, run.result.rounds) for run in group.runs]
    methods, datasets, clients, rounds = (" or ".join(dict.fromkeys(map(str, one))) for one in zip(*facts, strict=True))
    return f"{methods} on {datasets}, {clients} clients, {rounds} rounds, {group.seeds_text()}"


def _about_columns(rows: Iterable[SweepRow], score: MainScore) -> str:
    note = "accuracies in %" if score.is_share else f"{score.title} (low is good)"
    note += "; ± is the sample standard deviation over seeds" if any(len(row.seeds) > 1 for row in rows) else ""
    if any(row.difference is not None for row in rows):
        unit = "in percentage points" if score.is_share else "below zero where it is better"
        note += f"; the difference to Local, with the same settings otherwise, is {unit}"
    return score.of_it(f"{note}; the choice is by validation accuracy, never by test accuracy")


# reading ----------------------------------------------------------------------------------------------------------


def is_sweep(folder: str | Path) -> bool:
    """Whether `polyfed sweep` has left its table there."""
    check_name(folder)
    return (Path(folder) / SWEEP).exists()


def read_sweep(folder: str | Path) -> SweepTable:
    """The table of a finished sweep.

    Raises:
        ConfigError: no ``sweep.json`` there, not one of this version, or a link.
    """
    check_links(Path(folder))
    path = Path(folder) / SWEEP
    try:
        table = validated(SweepTable, parse_json(path.read_bytes()))
        _check_settings(table)
    except OSError as error:
        raise ConfigError(f"expected the folder of a sweep, got {folder}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"expected {path} as `polyfed sweep` writes it, got another: {error}") from None
    return table


def chosen_runs(folders: Iterable[Path]) -> set[Path]:
    """The folders, of those of runs, that a sweep above them has chosen."""
    found: set[Path] = set()
    for above in {folder.parent.parent for folder in folders}:
        chosen = read_sweep(above).chosen if is_sweep(above) else None
        found |= {above.joinpath(*Path(run.path).parts[-2:]) for run in chosen.runs} if chosen else set()
    return found


def _check_settings(table: SweepTable) -> None:
    """Whether there are rows, and each that asks for a combination has a value for each swept key."""
    if not table.rows:
        raise ValueError("expected rows, got none")
    for row in table.rows:
        missing = [key for key in table.keys if key not in row.settings]
        if row.words and missing:
            raise ValueError(f"expected '{missing[0]:.40}' in the settings of each row, got a row without it")


# showing ----------------------------------------------------------------------------------------------------------


def _columns(table: SweepTable) -> list[Column]:
    """The columns; the chosen row is bold in all of them, where a format can, and says so in the last."""
    rows = table.rows
    score = table.score

    def spread(name: str, sign: str = "") -> list[str]:
        pairs = [Estimate(getattr(row, name), getattr(row, f"{name}_std")) for row in rows]
        return format_mean_std(pairs, sign, score)

    columns = [
        Column("test", spread("test")),
        Column("best by\nvalid.", [scored(row.best, score) for row in rows]),
        Column("vs Local", spread("difference", "+")),
        Column("bytes\nup", [size(row.bytes_up) for row in rows]),
        Column("bytes\ndown", [size(row.bytes_down) for row in rows]),
        Column("time", [duration(row.seconds) for row in rows]),
        Column("refused", [str(row.refused or "-") for row in rows]),
    ]
    words = {True: "yes", False: ""}
    chosen = ["nothing learnt" if row.nothing_learnt else words[row.chosen] for row in rows]
    bold = frozenset(at for at, row in enumerate(rows) if row.chosen)
    shown = [
        Column("method", [row.method for row in rows], words=True),
        *(
            Column(name, [format_setting(row.settings[key]) if key in row.settings else "-" for row in rows])
            for key, name in short_names(table.keys).items()
        ),
        Column("validation", spread("validation")),
        *(column for column in columns if not column.is_empty),
        Column("chosen", chosen, words=True),
    ]
    return [replace(column, bold=bold) for column in shown]


def to_text(table: SweepTable, width: int = 100) -> str:
    """Aligned plain text, and the chosen settings ready for the command line."""
    shown = text_blocks(_columns(table), width, leading=1 + len(table.keys))
    lines = [wrapped(table.caption, width), "", shown, "", *(wrapped(note, width) for note in table.notes)]
    return "\n".join([*lines, "", f"chosen by validation: {table.chosen_options or 'none'}"]) + "\n"


def to_markdown(table: SweepTable) -> str:
    """GitHub's table under its caption."""
    below = "\n".join(f"- {markdown_text(note)}" for note in table.notes)
    options = visible(" ".join(table.chosen_options.split())).replace("`", "'")
    chosen = f"Chosen by validation: `{options}`\n" if options else "Nothing was chosen.\n"
    return f"**{markdown_text(table.caption)}**\n\n{markdown_table(_columns(table))}\n\n{chosen}\n{below}\n"


def to_html(table: SweepTable) -> str:
    """For notebooks: the table, and what is chosen."""
    chosen = paragraph(f"Chosen by validation: {table.chosen_options or 'none'}", strong=True)
    return "".join([chosen, paragraph(table.caption), columns_as_html(_columns(table)), notes(table.notes)])


def to_latex(table: SweepTable) -> str:
    """A ``table`` with ``booktabs`` rules."""
    return f"% needs \\usepackage{{booktabs,adjustbox}}\n{latex_table(table.caption, _columns(table), table.notes)}"


def to_csv(table: SweepTable) -> str:
    """A line per row, exact; the swept settings under their whole keys; None is empty."""
    rest = [name for name in SweepRow.model_fields if name not in ("settings", "method", "words", "runs")]
    lines = [
        vars(row)
        | {"seeds": " ".join(map(str, row.seeds))}
        | {key: format_setting(value) for key, value in row.settings.items()}
        for row in table.rows
    ]
    return csv_text(["method", *table.keys, *rest], lines)


def to_json(table: SweepTable) -> str:
    """Everything, exact, with each run."""
    return json_text(table.model_dump(mode="json"), indent=2) + "\n"


def write(table: SweepTable, folder: str | Path) -> list[Path]:
    """``sweep.md``, ``.csv``, ``.json`` and ``.tex`` in the folder (made if missing), each whole or not at all."""
    path = make_folder(folder)
    texts = {"md": to_markdown(table), "csv": to_csv(table), "json": to_json(table), "tex": to_latex(table)}
    return [write_whole(path / f"sweep.{form}", text.encode("utf-8")) for form, text in texts.items()]
