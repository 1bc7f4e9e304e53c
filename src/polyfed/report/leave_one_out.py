"""Groups left out of training one after the other, side by side: every method's accuracy on each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyfed.report.comparison_columns import SubTable
from polyfed.report.grouping import Group
from polyfed.report.statistics import Paired, paired_difference
from polyfed.report.text_tables import Column, finite, format_mean_std, interval, mean_of, std_of

__all__ = ["leave_one_out_tables"]

_TITLES = {
    "received": "Each group held out in turn, in %: with what it would receive if it joined now",
    "after_training": "Each group held out in turn, in %: after local training on what it would receive",
}
_Scores = Mapping[str, Mapping[int, float | None]]  # row -> seed -> accuracy


def leave_one_out_tables(groups: Sequence[Group]) -> tuple[SubTable, ...]:
    """A table for each stage in which groups held out were scored; nothing where no two were held out in turn.

    A row is a method, a column a group; then the mean over groups, and its difference to Local, paired by seed.

    Args:
        groups: all sets of comparable runs; those count that held out one group each and are alike in all else.
    """
    experiments: dict[str, dict[str, Group]] = {}
    for group in groups:
        if group.held_out is not None:
            experiments.setdefault(group.experiment, {})[group.held_out] = group
    found: list[SubTable] = []
    for experiment, turns in experiments.items():
        if len(turns) > 1:
            found += [_table(f"{title} ({experiment})", turns, stage) for stage, title in _TITLES.items()]
    return tuple(table for table in found if any(set(column.cells) != {"-"} for column in table[1][1:]))


def _table(title: str, turns: Mapping[str, Group], stage: str) -> SubTable:
    scores = {name: _scores(group, stage) for name, group in turns.items()}
    names = list(dict.fromkeys(row for of_rows in scores.values() for row in of_rows))
    means = {row: _mean_over_groups([of_rows.get(row, {}) for of_rows in scores.values()]) for row in names}
    local = [row for group in turns.values() for row, runs in group.rows.items() if runs[0].is_local]
    differences = [
        paired_difference(means[row], means[local[0]]) if _has_other(row, local) else Paired() for row in names
    ]
    columns = [Column("method", names, words=True)]
    columns += [Column(name, _cells([of_rows.get(row, {}) for row in names])) for name, of_rows in scores.items()]
    columns += [
        Column("mean", _cells([means[row] for row in names])),
        Column("vs Local", format_mean_std([(one.mean, one.std) for one in differences], sign="+")),
        Column("interval", [interval(one.mean, one.margin, sign="+") for one in differences]),
    ]
    return title, [column for column in columns if column.words or set(column.cells) != {"-"}]


def _scores(group: Group, stage: str) -> _Scores:
    return {
        row: {run.seed: finite(run.result.held_out[stage].mean) for run in runs if stage in run.result.held_out}
        for row, runs in group.rows.items()
    }


def _mean_over_groups(of_groups: Sequence[Mapping[int, float | None]]) -> dict[int, float | None]:
    """Seed -> the mean over groups, for the seeds with which all groups were held out."""
    return {
        seed: mean_of([one[seed] for one in of_groups]) for seed in of_groups[0] if all(seed in o for o in of_groups)
    }


def _has_other(row: str, local: Sequence[str]) -> bool:
    return bool(local) and row != local[0]


def _cells(of_rows: Sequence[Mapping[int, float | None]]) -> list[str]:
    """Mean and standard deviation over seeds."""
    return format_mean_std([(mean_of(list(one.values())), std_of(list(one.values()))) for one in of_rows])
