"""A comparison as people and machines read it: aligned text, Markdown, CSV.

CSV holds accuracies in [0, 1] and exact bytes; the other formats show per cent and KiB/MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.escaping import csv_text, markdown_text
from polyfed.records.main_score import ACCURACY, RMSE, MainScore
from polyfed.records.read import make_folder, write_whole
from polyfed.report import client_scores
from polyfed.report.grouping import Group
from polyfed.report.statistics import Estimate
from polyfed.report.text_tables import (
    NOT_KNOWN,
    Column,
    duration,
    format_mean_std,
    formatted,
    interval,
    markdown_table,
    scored,
    size,
    text_blocks,
    wrapped,
)

if TYPE_CHECKING:
    import pandas as pd

_BY_ARCHITECTURE = "Accuracy in % by architecture"
_OVER_SEEDS = "95 % intervals of the mean over seeds, in %; differences are paired by seed, in percentage points"
_WORTH = "What federation is worth: gain over Local = gain alone + federated gain, in percentage points, paired by seed"
_TIME = "time"
_METRICS = {
    "balanced_accuracy": "balanced\naccuracy",
    "f1": "macro\nF1",
    "auc": "macro\nAUC",
    "calibration_error": "calibration\nerror",
}
_HEADINGS = {"mae": "MAE", "r2": "R2"}  # figures that are no shares, but known here
_CLASSES = {"own": "own\nclasses", "missing": "missing\nclasses"}
_HELD_OUT = {"received": "held out,\nreceived", "after_training": "held out,\ntrained"}
SubTable = tuple[str, list[Column]]  # title and columns


# what is shown ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ComparisonGroup:
    """One table: comparable runs under one caption.

    Attributes:
        group: the runs. caption: data, clients, rounds, seeds, what the accuracies are, and what is scaled down.
        facts: the same for machines.
        rows: a frame with a line for each method or variant, Local first. Scores are in [0, 1], means over seeds, each
            with ``_std`` and ``_margin`` over seeds; None is "not known". name: method or label, with the
            hyperparameters that tell variants apart. method: its registered name. control: what the row is a control
            for; "" for a method itself. stage, seeds: what was scored. accuracy (or rmse): the main score;
            accuracy_best_by_validation: of the round that was best on validation data. difference: minus Local's,
            paired by seed (difference_seeds).
            std_clients, worst_client, bottom_decile; bytes_up, bytes_down, seconds, simulated_seconds; refused (summed
            over runs), nothing_learnt (in how many runs). by_stage_NAME, by_predictor_NAME, by_classes_NAME,
            held_out_NAME, by_architecture_NAME, metric_NAME, epsilon_UNIT: as far as all of the row's runs have them.
            target_...: `polyfed.report.statistics.to_target`. gain, gain_alone, federated_gain:
            `polyfed.report.findings.Gains`.
        published: beside what papers print (`polyfed.report.paper_results.compare_with_paper`).
        notes: what the columns mean, what a reader must know about these runs, the papers' footnotes.
        footnotes: a footnote's name -> its number among the notes.
        leader: the row that leads in the main score (`polyfed.report.statistics.leader`); None: nobody does.
        clients: what each client has of each row (`polyfed.report.client_scores.scores_of_clients`).
    """

    group: Group
    caption: str
    facts: Mapping[str, Any]
    rows: pd.DataFrame
    published: pd.DataFrame
    notes: tuple[str, ...]
    footnotes: Mapping[str, int]
    leader: str | None
    clients: pd.DataFrame

    @property
    def score(self) -> MainScore:
        """What the rows' accuracies are: where numbers are predicted, the RMSE."""
        return self.group.score

    def keys_of(self, group: str) -> list[str]:
        """The names of a group of figures that any row has."""
        return [column.removeprefix(f"{group}_") for column in self.rows if column.startswith(f"{group}_")]

    def column(self, key: str) -> list[Any]:
        """The cells of a column of the rows; None where there is none."""
        return list(self.rows[key]) if key in self.rows else [None] * len(self.rows)

    def estimates(self, key: str) -> list[Estimate]:
        """A mean of each row, with its spread and margin."""
        return list(map(Estimate, *(self.column(f"{key}{end}") for end in ("", "_std", "_margin"))))


@dataclass(frozen=True)
class Table:
    """The comparison: one section for each set of comparable runs, and notes on runs left out."""

    sections: tuple[ComparisonGroup, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return to_text(self)


# columns ----------------------------------------------------------------------------------------------------------
def columns_of(section: ComparisonGroup, metrics: bool = False) -> list[Column]:
    """What people see, with the other figures on request. Columns in which nothing is known are left out, and scores
    that are the same as others.
    """
    columns = [_names_of(section)]
    seeds = [" ".join(map(str, one)) for one in section.column("seeds")]
    columns += [
        Column(heading, cells, words=True)
        for heading, cells in (("stage", section.column("stage")), ("seeds", seeds))
        if len(set(cells)) > 1
    ]
    accuracy, *others = _scores(section, metrics)
    numbers = [
        Column("vs Local", format_mean_std(section.estimates("difference"), "+", section.score)),
        *others,
        *(
            Column(f"epsilon\n{unit}", _figures(section, f"epsilon_{unit}", ".3g"))
            for unit in section.keys_of("epsilon")
        ),
        Column("bytes\nup", list(map(size, section.column("bytes_up")))),
        Column("bytes\ndown", list(map(size, section.column("bytes_down")))),
        Column(_TIME, list(map(duration, section.column("seconds")))),
        Column("simulated\ntime", list(map(duration, section.column("simulated_seconds")))),
        Column("refused", [str(count or NOT_KNOWN) for count in section.column("refused")]),
    ]
    return [*columns, accuracy, *(column for column in numbers if not column.is_empty)]


def _names_of(section: ComparisonGroup) -> Column:
    """The rows' names, and behind one that its accuracy is that of networks as they began."""
    names = []
    for name, seeds, lost in zip(*map(section.column, ("name", "seeds", "nothing_learnt")), strict=True):
        some = f" in {lost} of {len(seeds)} runs" if lost < len(seeds) else ""
        names.append(f"{name} (nothing learnt{some})" if lost else name)
    return Column("method", names, words=True)


def _scores(section: ComparisonGroup, metrics: bool) -> list[Column]:
    score = section.score

    def of(heading: str, key: str) -> Column:
        return Column(heading, [scored(value, score) for value in section.column(key)])

    own = set(section.column("stage"))
    stages = [stage for stage in section.keys_of("by_stage") if own != {stage}]
    main = format_mean_std(section.estimates(score.name), score=score)
    leading = frozenset(at for at, name in enumerate(section.column("name")) if name == section.leader)
    columns = [
        Column(score.title, main, bold=leading),
        of("std\nclients", "std_clients"),
        of("max\nclient" if score.lower_is_better else "min\nclient", "worst_client"),
        of("best by\nvalid.", f"{score.name}_best_by_validation"),
        *(of(stage, f"by_stage_{stage}") for stage in stages),
        *(of(f"by\n{key}", f"by_predictor_{key}") for key in section.keys_of("by_predictor")),
        *(of(heading, f"by_classes_{part}") for part, heading in _CLASSES.items()),
        *(of(heading, f"held_out_{stage}") for stage, heading in _HELD_OUT.items()),
    ]
    if metrics:
        return [*columns, *_metrics_of(section)]
    return [*columns, *(_own_metric(section, name) for name in score.metrics if score is RMSE)]


def _metrics_of(section: ComparisonGroup) -> list[Column]:
    """The figures beside the main score; those of the user's own, whose unit nobody knows here, as they are."""
    worst = "highest\ntenth" if section.score.lower_is_better else "lowest\ntenth"
    tenth = Column(worst, [scored(value, section.score) for value in section.column("bottom_decile")])
    shares = [
        Column(h, [scored(value, ACCURACY) for value in section.column(f"metric_{key}")]) for key, h in _METRICS.items()
    ]
    own = sorted(set(section.keys_of("metric")) - set(_METRICS))
    return [tenth, *shares, *(_own_metric(section, name) for name in own)]


def _own_metric(section: ComparisonGroup, name: str) -> Column:
    """A figure that is no share."""
    digits = "#.4g" if name == "mae" else ".4g"  # as many as the RMSE has
    return Column(_HEADINGS.get(name, name), _figures(section, f"metric_{name}", digits))


def _figures(section: ComparisonGroup, key: str, digits: str) -> list[str]:
    return [formatted(value, digits) for value in section.column(key)]


# further tables ---------------------------------------------------------------------------------------------------
def sub_tables(section: ComparisonGroup, metrics: bool = True) -> list[SubTable]:
    """What people see of a section: the table under its caption (no title), then those with titles of their own.

    Args:
        metrics: also the figures beside the main score, and the main score by architecture.
    """
    further = [*_gain_tables(section), *_interval_tables(section), *_target_tables(section)]
    known = [(title, [column for column in columns if not column.is_empty]) for title, columns in further]
    by_architecture = _architecture_tables(section) if metrics else []
    return [("", columns_of(section, metrics)), *known, *_paper_tables(section), *by_architecture]


def _gain_tables(section: ComparisonGroup) -> Iterator[SubTable]:
    """Gains alone and together; nothing where no method ran alone, too."""
    columns = [Column("method", section.column("name"), words=True)]
    for key, heading, of in (
        ("gain", "gain over\nLocal", "interval\nof gain"),
        ("gain_alone", "gain\nalone", "interval\nalone"),
        ("federated_gain", "federated\ngain", "interval\nfederated"),
    ):
        gains = section.estimates(key)
        columns.append(Column(heading, [scored(one.mean, section.score, "+") for one in gains]))
        columns.append(Column(of, [interval(one, section.score) for one in gains]))
    known = [at for at, gain in enumerate(section.column("gain")) if gain is not None]
    if known:
        yield (
            section.score.of_it(_WORTH),
            [replace(column, cells=[column.cells[at] for at in known]) for column in columns],
        )


def _interval_tables(section: ComparisonGroup) -> Iterator[SubTable]:
    score = section.score
    last = Column(score.title, [interval(one, score, "") for one in section.estimates(score.name)])
    validated = section.estimates(f"{score.name}_best_by_validation")
    best = Column("best by\nvalid.", [interval(one, score, "") for one in validated])
    columns = [
        _names_of(section),
        *([last] if best.cells == last.cells else [last, best]),
        Column("minus\nLocal", [interval(one, score) for one in section.estimates("difference")]),
    ]
    if not last.is_empty:
        yield score.of_it(_OVER_SEEDS), columns


def _target_tables(section: ComparisonGroup) -> Iterator[SubTable]:
    """Rounds, bytes and seconds; nothing where no target was asked for."""
    if "target_accuracy" not in section.rows:
        return
    reached, runs = (section.column(f"target_{key}") for key in ("reached", "runs"))
    columns = [
        _names_of(section),
        Column("seeds that\nreached it", [f"{some} of {every}" for some, every in zip(reached, runs, strict=True)]),
        Column("rounds", [_number(one.mean, one.std, 1) for one in section.estimates("target_rounds")]),
        Column("bytes", list(map(size, section.column("target_bytes")))),
        Column(_TIME, list(map(duration, section.column("target_seconds")))),
        Column("simulated\ntime", list(map(duration, section.column("target_simulated_seconds")))),
    ]
    yield (
        f"To reach an accuracy of {scored(section.column('target_accuracy')[0], ACCURACY)} %, means over seeds",
        columns,
    )


def _paper_tables(section: ComparisonGroup) -> Iterator[SubTable]:
    """Ours beside the papers', a table for each of their tables and quantities; only rows that they have."""
    keys = ["place", "setting", "quantity", "unit"]
    for (place, setting, quantity, unit), found in section.published.groupby(keys, sort=False):
        decimals = 1 if unit == "rounds" else 2
        ours, theirs = (
            [_number(mean, spread, decimals) for mean, spread in zip(found[key], found[f"{key}_std"], strict=True)]
            for key in ("ours", "paper")
        )
        numbers = [sorted(section.footnotes[name] for name in names) for names in found["footnotes"]]
        theirs = [f"{text} {own}" if own else text for text, own in zip(theirs, numbers, strict=True)]
        differences = [formatted(one, f"+.{decimals}f") for one in found["difference"]]
        columns = [
            Column("method", list(found["name"]), words=True),
            Column("stage", list(found["stage"]), words=True),
            Column("seeds", list(found["seeds"]), words=True),
            Column("ours", ours),
            Column("paper", theirs),
            Column("difference", differences),
            Column("mark", [mark or NOT_KNOWN for mark in found["mark"]], words=True),
        ]
        where = ", ".join(part for part in (place, setting) if part)
        yield f"Beside the paper: {where}: {quantity}{f' [{unit}]' if unit not in ('', 'rounds') else ''}", columns


def _number(mean: float | None, spread: float | None, decimals: int) -> str:
    """``"12.3 ± 0.6"``; a spread that is not known stays away."""
    form = f".{decimals}f"
    return formatted(mean, form) + (f" ± {formatted(spread, form)}" if None not in (mean, spread) else "")


def _architecture_tables(section: ComparisonGroup) -> list[SubTable]:
    """The accuracies by architecture; nothing where all clients have the same."""
    names = section.keys_of("by_architecture")
    values = {name: section.column(f"by_architecture_{name}") for name in names}
    columns = [Column(name, [scored(value, section.score) for value in found]) for name, found in values.items()]
    return [(section.score.of_it(_BY_ARCHITECTURE), [_names_of(section), *columns])] if len(names) > 1 else []


# for machines -----------------------------------------------------------------------------------------------------
def to_csv(table: Table) -> str:
    """All sections in one sheet: a line per row, with the evaluation in columns of its own; None is empty."""
    lines: list[dict[str, Any]] = []
    for number, section in enumerate(table.sections, start=1):
        lines += [{"table": number, **section.facts, **row} for row in section.rows.to_dict("records")]
    for line in lines:
        line |= {key: " ".join(map(str, value)) for key, value in line.items() if isinstance(value, list)}
    heads = dict.fromkeys(head for line in lines for head, value in line.items() if value not in (None, ""))
    return csv_text(list(heads), lines)


# for people -------------------------------------------------------------------------------------------------------
def to_markdown(table: Table) -> str:
    """GitHub's tables, each under its caption; what leads a column is bold."""
    blocks = []
    for section in table.sections:
        (_, main), *more = sub_tables(section)
        parts = [f"**{markdown_text(section.caption)}**", markdown_table(main)]
        parts += [text for title, columns in more for text in (f"{markdown_text(title)}:", markdown_table(columns))]
        blocks.append("\n\n".join([*parts, _markdown_list(section.notes)]))
    if table.notes:
        blocks.append(_markdown_list(table.notes))
    return "\n".join(blocks)


def _markdown_list(texts: Iterable[str]) -> str:
    return "\n".join(f"- {markdown_text(text)}" for text in texts) + "\n"


def to_text(table: Table, width: int = 100, clients: bool = False) -> str:
    """Aligned plain text; long names wrap so that it fits ``width`` columns where the numbers leave room.

    Args:
        table: what to show.
        width: columns to aim for.
        clients: also a line for each client.
    """
    blocks: list[str] = []
    for section in table.sections:
        tables = sub_tables(section, metrics=False)
        if clients and len(section.clients):
            columns = client_scores.client_columns(section.clients, section.score)
            tables.append((section.score.of_it(client_scores.ABOUT), columns))
        blocks.append(section_text(section, tables, width))
    if table.notes:
        blocks.append("\n".join(wrapped(f"note: {note}", width) for note in table.notes) + "\n")
    return "\n".join(blocks)


def section_text(section: ComparisonGroup, tables: Sequence[SubTable], width: int, leading: int = 1) -> str:
    """A section as aligned plain text. tables: `sub_tables`. leading: columns of the first that say what a row is."""
    (_, main), *more = tables
    texts = [wrapped(section.caption, width), text_blocks(main, width, leading)]
    texts += [f"{wrapped(f'{title}:', width)}\n\n{text_blocks(columns, width)}" for title, columns in more]
    texts.append("\n".join(wrapped(note, width) for note in section.notes))
    return "\n\n".join(texts) + "\n"


def write(table: Table, folder: str | Path) -> list[Path]:
    """Write ``comparison.md``, ``.csv`` and ``comparison-clients.csv`` into the folder (made if
    missing), each whole or not at all.
    """
    path = make_folder(folder)
    texts = {".md": to_markdown(table), ".csv": to_csv(table)}
    texts["-clients.csv"] = client_scores.to_csv([(section.clients, section.score) for section in table.sections])
    return [write_whole(path / f"comparison{end}", text.encode("utf-8")) for end, text in texts.items()]
