"""The figure of a sweep: accuracy against a swept number, the choice by validation marked.

The axis is the first swept key whose values are numbers; a line per value of a second key, if there is one. With more
keys, or without numbers, nothing is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from polyfed.report.plot_style import empty_figure, has_bands, legend, line_style, save
from polyfed.report.sweeps import SweepTable, named
from polyfed.results.main_score import MainScore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LABEL_ROOM = 0.07  # of the axis, for one tick's label
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
    most = max(map(len, grid["seeds"]))
    bands = has_bands(2 * len(lines) + len(local), most)
    band = "; band: lowest to highest seed on test data" if bands else ""
    about = f"{table.caption} {f'Mean over seeds{band}.' if most > 1 else ''}"
    figure, axes = empty_figure(score.of_it(f"Accuracy against {axis}"), about)
    looks = {name: line_style(number) for number, name in enumerate(lines)}
    for name, line in lines.items():
        _draw_line(axes, axis, name, line, looks[name], score)
        if bands:
            _band(axes, axis, line, looks[name]["color"], score)
    for name, (at, values) in local.items():
        beside = {"color": looks[name]["color"], "marker": looks[name]["marker"], "fillstyle": "bottom"} if name else {}
        label = f"Local, test{_suffix(name)}"
        axes.plot(at, values, **{**line_style(-1), **beside}, label=label, gid=f"local {name}")
    _scale(axes, _numbers(table, axis))
    axes.set_xlabel(axis)
    axes.set_ylabel(score.axis.removeprefix("test "))
    legend(axes, *axes.get_legend_handles_labels())
    return figure


def _suffix(name: str) -> str:
    return f", {name}" if name else ""


def _draw_line(axes: Any, axis: str, name: str, line: pd.DataFrame, style: Mapping[str, Any], score: MainScore) -> None:
    """Validation dashed, test, and a ring around what was chosen."""
    dashed = {**style, "markerfacecolor": "white", "linestyle": (0, (2, 1.5))}
    for what, look in (("validation", dashed), ("test", style)):
        label = f"{what}{_suffix(name)}"
        values = _shown(line[what], score)
        axes.plot(list(line[axis]), values, **look, markersize=5, label=label, gid=f"{what} {name}")
    ring = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "linestyle": "none", "color": "black"}
    chosen = line[line["chosen"].astype(bool)]
    if not chosen.empty:
        axes.plot(list(chosen[axis]), _shown(chosen["validation"], score), **ring, label="chosen")


def _shown(values: Iterable[float | None], score: MainScore) -> list[float]:
    """For drawing: what is not known leaves a gap."""
    return [math.nan if value is None else score.shown(value) for value in values]


def _band(axes: Any, axis: str, line: pd.DataFrame, color: str, score: MainScore) -> None:
    """From the lowest to the highest seed."""
    known = [[score.shown(run["test"]) for run in runs if run["test"] is not None] for runs in line["runs"]]
    if all(known):
        at = list(line[axis])
        axes.fill_between(at, list(map(min, known)), list(map(max, known)), color=color, alpha=0.15, linewidth=0)


def _scale(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic axis where the values span decades, with a place for 0; a tick at each value while they are few."""
    positive = [value for value in values if value > 0]
    if values[0] >= 0 and len(positive) > 1 and positive[-1] >= _DECADES * positive[0]:
        if values[0] == 0:
            axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
        else:
            axes.set_xscale("log")
    if len(values) <= _FEW:
        axes.set_xticks(values, tell_apart(values, axes.xaxis.get_transform().transform(values)))
        axes.set_xticks([], minor=True)


def tell_apart(values: Sequence[float], places: Sequence[float]) -> list[str]:
    """A label for each tick; none where it would run into the one before."""
    labels: list[str] = []
    last = -math.inf
    for value, place in zip(values, places, strict=True):
        free = place - last >= _LABEL_ROOM * (places[-1] - places[0])
        labels.append(f"{value:g}" if free else "")
        last = place if free else last
    return labels
