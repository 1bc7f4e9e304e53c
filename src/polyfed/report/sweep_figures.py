"""The figure of a sweep: accuracy against a swept number, the choice by validation marked.

The axis is the first swept key whose values are numbers; a line per value of a second key, if there is one. With more
keys, or without numbers, nothing is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.records.main_score import MainScore
from polyfed.report.plot_style import empty_figure, legend, line_style, save
from polyfed.report.sweeps import SweepTable, named

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DECADES = 20  # a logarithmic axis from this ratio of the largest to the smallest value on
_FEW = 12  # swept values with a tick each


def draw(table: SweepTable, folder: str | Path) -> list[Path]:
    """The figure of `figure_of`, if there is one, as ``sweep.png`` and ``sweep.svg``."""
    figure = figure_of(table)
    return [] if figure is None else save(figure, folder, "sweep")


def _numbers(table: SweepTable, key: str) -> list[float]:
    """The values of a key, in order; none where they are not numbers."""
    values = list(table.grid[key])
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return []
    return sorted(set(values))


def figure_of(table: SweepTable) -> Figure | None:
    """Validation and test accuracy against a swept number; None where there is none with several values."""
    axis = next((key for key in table.keys if _numbers(table, key)), None)
    if axis is None or len(table.keys) > 2 or len(_numbers(table, axis)) < 2:
        return None
    score = table.score
    other = next((key for key in table.keys if key != axis), None)
    grid = table.grid.sort_values(axis, kind="stable")
    lines = {"": grid}
    if other is not None:
        lines = {named([other], {other: value}): line for value, line in grid.groupby(other, sort=False)}
    local = {  # each line's name -> Local beside it; once, without a name, where it is the same beside all of them
        name: (list(line[axis]), _shown(line["local"], score))
        for name, line in lines.items()
        if line["local"].notna().any()
    }
    if len(set(map(str, local.values()))) == 1:
        local = {"": next(iter(local.values()))}
    seeds = " Mean over seeds." if max(map(len, grid["seeds"])) > 1 else ""
    figure, axes = empty_figure(score.of_it(f"Accuracy against {axis}"), f"{table.caption}{seeds}")
    looks = {name: line_style(number) for number, name in enumerate(lines)}
    suffixes = {name: f", {name}" if name else "" for name in [*lines, *local]}
    for name, line in lines.items():
        dashed = {**looks[name], "markerfacecolor": "white", "linestyle": (0, (2, 1.5))}
        for what, look in (("validation", dashed), ("test", looks[name])):
            label = f"{what}{suffixes[name]}"
            axes.plot(list(line[axis]), _shown(line[what], score), **look, markersize=5, label=label)
        chosen = line[line["chosen"].astype(bool)]
        if not chosen.empty:
            ring = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "linestyle": "none", "color": "black"}
            axes.plot(list(chosen[axis]), _shown(chosen["validation"], score), **ring, label="chosen")
    for name, (at, values) in local.items():
        beside = {"color": looks[name]["color"], "marker": looks[name]["marker"], "fillstyle": "bottom"} if name else {}
        axes.plot(at, values, **{**line_style(-1), **beside}, label=f"Local, test{suffixes[name]}")
    _scale(axes, _numbers(table, axis))
    axes.set_xlabel(axis)
    axes.set_ylabel(score.axis.removeprefix("test "))
    legend(axes, *axes.get_legend_handles_labels())
    return figure


def _shown(values: Iterable[float | None], score: MainScore) -> list[float]:
    """For drawing: what is not known leaves a gap."""
    return [math.nan if value is None else score.shown(value) for value in values]


def _scale(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic axis where the values span decades, with a place for 0; a tick at each value while they are few."""
    positive = [value for value in values if value > 0]
    if values[0] >= 0 and len(positive) > 1 and positive[-1] >= _DECADES * positive[0]:
        if values[0] == 0:
            axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
        else:
            axes.set_xscale("log")
    if len(values) <= _FEW:
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xticks([], minor=True)
