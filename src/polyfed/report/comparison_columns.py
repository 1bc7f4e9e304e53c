"""The columns in which people see a section of a comparison, and the tables below it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from polyfed.report.comparison_rows import ComparisonGroup, ComparisonRow
from polyfed.report.paper_results import PaperComparison
from polyfed.report.text_tables import Column, format_mean_std, interval, interval_of_score, percent, scored
from polyfed.results.main_score import RMSE
from polyfed.units import human_bytes, human_seconds

__all__ = [
    "COSTS",
    "METRICS",
    "SubTable",
    "architecture_tables",
    "columns_of",
    "decomposition_tables",
    "interval_tables",
    "metrics_of",
    "notes_of",
    "paper_tables",
    "repeated_columns",
    "sub_tables",
    "target_tables",
]

_BY_ARCHITECTURE = "Accuracy in % by architecture"
_OVER_SEEDS = "95 % intervals of the mean over seeds, in %; differences are paired by seed, in percentage points"
_WORTH = "What federation is worth: gain over Local = gain alone + federated gain, in percentage points, paired by seed"
_INTERVALS = {"gain": "interval\nof gain", "alone": "interval\nalone", "federated": "interval\nfederated"}
_REFUSED = "refused"
_SIMULATED = "simulated\ntime"
COSTS = ("bytes\nup", "bytes\ndown", "time", _REFUSED, _SIMULATED)
METRICS = {
    "balanced_accuracy": "balanced\naccuracy",
    "f1": "macro\nF1",
    "auc": "macro\nAUC",
    "calibration_error": "calibration\nerror",
}
_PLAIN = {"r2": "R2"}  # figures that are no shares, but known here
_CLASSES = {"own": "own\nclasses", "missing": "missing\nclasses"}
_HELD_OUT = {"received": "held out,\nreceived", "after_training": "held out,\ntrained"}

SubTable = tuple[str, list[Column]]


def columns_of(section: ComparisonGroup, metrics: bool = False) -> list[Column]:
    """What people see, with the other figures on request. Columns in which nothing is known are left out, and scores
    that are the same as others.
    """
    rows = section.rows
    columns = [_names_of(section)]
    if len({row.stage for row in rows}) > 1:
        columns.append(Column("stage", [row.stage for row in rows], words=True))
    if len({row.seeds for row in rows}) > 1:
        columns.append(Column("seeds", [" ".join(map(str, row.seeds)) for row in rows], words=True))
    repeated = repeated_columns(section, metrics)
    accuracy, *others = (column for column in _scores(section, metrics) if column.heading not in repeated)
    numbers = [
        Column("vs Local", format_mean_std([(r.difference, r.difference_std) for r in rows], "+", section.score)),
        *others,
        *(Column(f"epsilon\n{unit}", [_number(row.epsilon.get(unit)) for row in rows]) for unit in section.units),
        Column(COSTS[0], ["-" if row.bytes_up is None else human_bytes(row.bytes_up) for row in rows]),
        Column(COSTS[1], ["-" if row.bytes_down is None else human_bytes(row.bytes_down) for row in rows]),
        Column(COSTS[2], [_seconds(row.seconds) for row in rows]),
        Column(_SIMULATED, [_seconds(row.simulated_seconds) for row in rows]),
        Column(_REFUSED, [str(row.refused or "-") for row in rows]),
    ]
    return [*columns, accuracy, *(column for column in numbers if set(column.cells) != {"-"})]


def _scores(section: ComparisonGroup, metrics: bool) -> list[Column]:
    """The main score, and what else was scored."""
    rows = section.rows
    score = section.score

    def of(heading: str, values: Iterable[float | None], bold: str = "") -> Column:
        return Column(heading, [scored(value, score) for value in values], bold=_bold(section, bold))

    columns = [
        Column(
            score.title,
            format_mean_std([(row.accuracy, row.accuracy_std_seeds) for row in rows], score=score),
            bold=_bold(section, score.name),
        ),
        of("std\nclients", (row.accuracy_std_clients for row in rows)),
        of("max\nclient" if score.lower_is_better else "min\nclient", (row.accuracy_min_client for row in rows)),
        of("best by\nvalid.", (row.accuracy_best_by_validation for row in rows), "best_by_validation"),
        *(of(stage, (row.accuracy_by_stage.get(stage) for row in rows), stage) for stage in section.extra_stages),
        *(of(f"by\n{p}", (row.accuracy_by_predictor.get(p) for row in rows)) for p in section.predictors),
    ]
    columns += [of(heading, (row.accuracy_by_classes.get(part) for row in rows)) for part, heading in _CLASSES.items()]
    columns += [of(heading, (row.held_out.get(stage) for row in rows)) for stage, heading in _HELD_OUT.items()]
    if metrics:
        return [*columns, *metrics_of(section)]
    return [*columns, *(_own_metric(section, name) for name in score.metrics if score is RMSE)]


def _bold(section: ComparisonGroup, key: str) -> frozenset[int]:
    """The place of the row that leads a column, if one does."""
    return frozenset(at for at, row in enumerate(section.rows) if row.name == section.leaders.get(key))


def repeated_columns(section: ComparisonGroup, metrics: bool) -> dict[str, str]:
    """The scores that are those of a column before them in every row: heading -> that one's."""
    shown: dict[str, list[str]] = {}
    repeated: dict[str, str] = {}
    for column in _scores(section, metrics):
        values = [cell.partition(" ±")[0] for cell in column.cells]
        alike = [heading for heading, others in shown.items() if values == others and set(values) != {"-"}]
        if alike:
            repeated[column.heading] = alike[0]
        else:
            shown[column.heading] = values
    return repeated


def notes_of(section: ComparisonGroup, metrics: bool = True) -> list[str]:
    """The section's notes, and which columns are not shown."""
    repeated = repeated_columns(section, metrics)
    named = [f"{one} (as {other})".replace("\n", " ") for one, other in repeated.items()]
    left_out = [f"not shown, as another column says the same: {', '.join(named)}"] if named else []
    return [*section.notes, *left_out]


def _seconds(value: float | None) -> str:
    return "-" if value is None else human_seconds(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _names_of(section: ComparisonGroup) -> Column:
    return Column("method", [f"{row.name}{_learnt_nothing(row)}" for row in section.rows], words=True)


def _learnt_nothing(row: ComparisonRow) -> str:
    """Behind a row's name: that its accuracy is that of networks as they began."""
    if not row.nothing_learnt:
        return ""
    some = f" in {row.nothing_learnt} of {len(row.seeds)} runs" if row.nothing_learnt < len(row.seeds) else ""
    return f" (nothing learnt{some})"


def metrics_of(section: ComparisonGroup) -> list[Column]:
    """The figures beside the main score; those of the user's own, whose unit nobody knows here, as they are."""
    worst = "highest\ntenth" if section.score.lower_is_better else "lowest\ntenth"
    tenth = Column(worst, [scored(row.accuracy_bottom_decile, section.score) for row in section.rows])
    others = [(h, [percent(row.metrics.get(key)) for row in section.rows]) for key, h in METRICS.items()]
    own = sorted({name for row in section.rows for name in row.metrics} - set(METRICS))
    shares = [Column(heading, cells) for heading, cells in others]
    return [tenth, *shares, *(_own_metric(section, name) for name in own)]


def _own_metric(section: ComparisonGroup, name: str) -> Column:
    """A figure that is no share."""
    cells = [f"{row.metrics[name]:.4g}" if name in row.metrics else "-" for row in section.rows]
    return Column(_PLAIN.get(name, name), cells)


def architecture_tables(section: ComparisonGroup) -> list[SubTable]:
    """The accuracies by architecture; nothing where all clients have the same."""
    names = list(dict.fromkeys(name for row in section.rows for name in row.accuracy_per_architecture))
    cells = {n: [scored(row.accuracy_per_architecture.get(n), section.score) for row in section.rows] for n in names}
    columns = [_names_of(section), *(Column(name, cells[name]) for name in names)]
    return [(section.score.of_it(_BY_ARCHITECTURE), columns)] if len(names) > 1 else []


def interval_tables(section: ComparisonGroup) -> list[SubTable]:
    """The intervals; nothing where no row has seeds enough."""
    rows = section.rows
    if all(row.accuracy_margin is None for row in rows):
        return []
    score = section.score
    last = [interval_of_score(row.accuracy, row.accuracy_margin, score) for row in rows]
    best = [interval_of_score(row.accuracy_best_by_validation, row.accuracy_best_margin, score) for row in rows]
    rivals = [row.against_rival for row in rows]
    columns = [
        Column(score.title, last),
        *([] if best == last else [Column("best by\nvalid.", best)]),
        Column("minus\nLocal", [interval(row.difference, row.difference_margin, "+", score) for row in rows]),
        Column("best\nrival", [row.rival or "-" for row in rows], words=True),
        Column("minus\nrival", format_mean_std([(one.mean, one.std) for one in rivals], "+", score)),
        Column("interval", [interval(one.mean, one.margin, "+", score) for one in rivals]),
    ]
    return [
        (score.of_it(_OVER_SEEDS), [_names_of(section), *(column for column in columns if set(column.cells) != {"-"})])
    ]


def decomposition_tables(section: ComparisonGroup) -> list[SubTable]:
    """Gains alone and together; nothing where no method ran alone, too."""
    found = section.decompositions
    if not found:
        return []
    parts = {"gain over\nLocal": "gain", "gain\nalone": "alone", "federated\ngain": "federated"}
    columns = [Column("method", [one.name for one in found], words=True)]
    for heading, part in parts.items():
        differences = [getattr(one, part) for one in found]
        columns.append(Column(heading, [scored(one.mean, section.score, "+") for one in differences]))
        intervals = [interval(one.mean, one.margin, "+", section.score) for one in differences]
        columns.append(Column(_INTERVALS[part], intervals))
    columns.append(Column("minus Local\nof its steps", [scored(one.longer.mean, section.score, "+") for one in found]))
    columns.append(Column("way to\npooled", ["-" if one.way is None else f"{100 * one.way:.0f} %" for one in found]))
    return [(section.score.of_it(_WORTH), [column for column in columns if set(column.cells) != {"-"}])]


def target_tables(section: ComparisonGroup) -> list[SubTable]:
    """Rounds, bytes and seconds; nothing where no target was asked for."""
    needed = [row.to_target for row in section.rows]
    found = [one for one in needed if one is not None]
    if not found:
        return []
    rounds = [(None, None) if one is None else (one.rounds, one.rounds_std) for one in needed]
    columns = [
        _names_of(section),
        Column("seeds that\nreached it", ["-" if one is None else f"{one.reached} of {one.runs}" for one in needed]),
        Column("below it\nagain", ["-" if one is None or not one.reached else str(one.lost) for one in needed]),
        Column("rounds", _numbers(rounds, 1)),
        Column("bytes", ["-" if one is None or one.bytes is None else human_bytes(one.bytes) for one in needed]),
        Column("time", [_seconds(None if one is None else one.seconds) for one in needed]),
    ]
    simulated = Column(_SIMULATED, [_seconds(None if one is None else one.simulated_seconds) for one in needed])
    columns += [simulated] if set(simulated.cells) != {"-"} else []
    return [(f"To reach an accuracy of {percent(found[0].accuracy)} %, means over seeds", columns)]


def _numbers(pairs: Sequence[tuple[float | None, float | None]], decimals: int) -> list[str]:
    """``"12.3 ± 0.6"``; a spread that is not known stays away."""
    cells = []
    for mean, spread in pairs:
        cell = "-" if mean is None else f"{mean:.{decimals}f}"
        if mean is not None and spread is not None:
            cell += f" ± {spread:.{decimals}f}"
        cells.append(cell)
    return cells


def paper_tables(section: ComparisonGroup) -> Iterator[SubTable]:
    """Ours beside the papers', a table for each of their tables and quantities; only rows that they have."""
    every = [(row, one) for row in section.rows for one in row.published]
    for place, setting, quantity, unit in dict.fromkeys((b.table, b.setting, b.quantity, b.unit) for _, b in every):
        pairs = [(r, b) for r, b in every if (b.table, b.setting, b.quantity) == (place, setting, quantity)]
        found = [one for _, one in pairs]
        decimals = 1 if unit == "rounds" else 2
        ours = _numbers([(one.ours, one.ours_spread) for one in found], decimals)
        theirs = _numbers([(one.theirs, one.theirs_spread) for one in found], decimals)
        marked = [cell + _footnotes(section, one) for cell, one in zip(theirs, found, strict=True)]
        differences = ["-" if one.difference is None else f"{one.difference:+.{decimals}f}" for one in found]
        columns = [
            Column("method", [row.name for row, _ in pairs], words=True),
            Column("stage", [one.stage for one in found], words=True),
            Column("seeds", [" ".join(map(str, one.seeds)) for one in found], words=True),
            Column("ours", ours),
            Column("paper", marked),
            Column("difference", differences),
            Column("mark", [one.mark or "-" for one in found], words=True),
        ]
        where = ", ".join(part for part in (place, setting) if part)
        yield f"Beside the paper: {where}: {quantity}{f' [{unit}]' if unit not in ('', 'rounds') else ''}", columns


def _footnotes(section: ComparisonGroup, one: PaperComparison) -> str:
    """The footnotes' numbers behind a printed figure: " [1, 4]"."""
    numbers = sorted(section.footnotes[name] for name in one.footnotes)
    return f" [{', '.join(map(str, numbers))}]" if numbers else ""


def sub_tables(section: ComparisonGroup) -> list[SubTable]:
    """All that people see of a section: the table under its caption (no title), then those with titles of their own."""
    more = [*decomposition_tables(section), *interval_tables(section), *target_tables(section)]
    more += [*paper_tables(section), *architecture_tables(section)]
    return [("", columns_of(section, metrics=True)), *more]
