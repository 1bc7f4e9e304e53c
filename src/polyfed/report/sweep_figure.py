"""The figure of a sweep: accuracy against a swept number, Local beside it, the choice by validation ringed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.report.plot_style import empty_figure, has_bands, legend, line_style, save
from polyfed.report.sweeps import SweepRow, SweepTable, named
from polyfed.results.main_score import MainScore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "figure_of"]

_LABEL_ROOM = 0.07  # of the axis, for one tick's label
_DECADES = 20  # a logarithmic axis from this ratio of the largest to the smallest value on


def draw(table: SweepTable, folder: str | Path) -> list[Path]:
    """The figure of `figure_of`, if there is one, as ``sweep.png`` and ``sweep.svg``.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    figure = figure_of(table)
    return [] if figure is None else save(figure, folder, "sweep")


def figure_of(table: SweepTable) -> Figure | None:
    """Validation and test accuracy against a swept number.

    The axis is the first swept key whose values are numbers; a line per value of a second key, if there is one. With
    more keys, or without numbers, nothing is drawn.
    """
    rows = [row for row in table.rows if row.words]
    axis = next((key for key in table.keys if all(_is_number(row.settings[key]) for row in rows)), None)
    if axis is None or len(table.keys) > 2 or len({row.settings[axis] for row in rows}) < 2:
        return None
    other = next((key for key in table.keys if key != axis), None)
    lines = list(_lines(rows, axis, other))
    beside = list(_local_lines(rows, axis, other, table.score))
    bands = has_bands(2 * len(lines) + len(beside), max(len(row.seeds) for row in rows))
    figure, axes = empty_figure(table.score.of_it(f"Accuracy against {axis}"), f"{table.caption} {_about(rows, bands)}")
    marked: dict[str, dict[str, Any]] = {}
    for number, (name, line) in enumerate(lines):
        style = line_style(number)
        _draw_line(axes, axis, name, line, style, table.score)
        if bands:
            _band(axes, axis, line, style["color"], table.score)
        marked[name] = {"color": style["color"], "marker": style["marker"], "fillstyle": "bottom"}
    for name, at, local in beside:
        looks = {**line_style(-1), **(marked[name] if name else {})}  # that of the line it stands beside
        axes.plot(at, local, **looks, label=f"Local, test{name and f', {name}'}", gid=f"local {name}")
    _scale(axes, sorted({float(row.settings[axis]) for row in rows}))
    axes.set_xlabel(axis)
    axes.set_ylabel(table.score.axis.removeprefix("test "))
    legend(axes, *axes.get_legend_handles_labels())
    return figure


def _draw_line(
    axes: Any, axis: str, name: str, line: Sequence[SweepRow], style: Mapping[str, Any], score: MainScore
) -> None:
    """Validation dashed, test, and a ring around what was chosen."""
    at = [row.settings[axis] for row in line]
    suffix = name and f", {name}"
    open_and_dashed = {"markerfacecolor": "white", "linestyle": (0, (2, 1.5))}
    for what, values, looks in (
        ("validation", [row.validation for row in line], {**style, **open_and_dashed}),
        ("test", [row.accuracy for row in line], style),
    ):
        axes.plot(at, _shown(values, score), **looks, markersize=5, label=f"{what}{suffix}", gid=f"{what} {name}")
    for row in (row for row in line if row.chosen and row.validation is not None):
        ring = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "linestyle": "none", "color": "black"}
        axes.plot([row.settings[axis]], _shown([row.validation], score), **ring, label="chosen")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(values: Sequence[float | None], score: MainScore) -> list[float]:
    """For drawing: what is not known leaves a gap."""
    return [math.nan if value is None else score.shown(value) for value in values]


def _about(rows: Sequence[SweepRow], bands: bool) -> str:
    several = any(len(row.seeds) > 1 for row in rows)
    band = "; band: lowest to highest seed on test data" if bands else ""
    return f"Mean over seeds{band}." if several else ""


def _lines(rows: Sequence[SweepRow], axis: str, other: str | None) -> Iterator[tuple[str, list[SweepRow]]]:
    """The rows of each value of the second key, along the axis, with the line's name."""
    values = [None] if other is None else list(dict.fromkeys(json.dumps(row.settings[other]) for row in rows))
    for value in values:
        line = [row for row in rows if other is None or json.dumps(row.settings[other]) == value]
        name = "" if other is None else named([other], line[0].settings)
        yield name, sorted(line, key=lambda row: float(row.settings[axis]))


def _local_lines(
    rows: Sequence[SweepRow], axis: str, other: str | None, score: MainScore
) -> Iterator[tuple[str, list[float], list[float]]]:
    """Local beside each line; once, without a name, where it is the same beside all of them."""
    lines = [
        (name, [row.settings[axis] for row in line], _shown([row.local for row in line], score))
        for name, line in _lines(rows, axis, other)
        if any(row.local is not None for row in line)
    ]
    if len({json.dumps([at, values]) for _, at, values in lines}) == 1:
        lines = [("", *lines[0][1:])]
    yield from lines


def _band(axes: Any, axis: str, line: Sequence[SweepRow], color: str, score: MainScore) -> None:
    """From the lowest to the highest seed."""
    known = [[score.shown(run.accuracy) for run in row.runs if run.accuracy is not None] for row in line]
    if all(known):
        at = [row.settings[axis] for row in line]
        axes.fill_between(at, list(map(min, known)), list(map(max, known)), color=color, alpha=0.15, linewidth=0)


def _scale(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic axis where the values span decades, with a place for 0; a tick at each value while they are few."""
    positive = [value for value in values if value > 0]
    if values[0] >= 0 and len(positive) > 1 and positive[-1] >= _DECADES * positive[0]:
        if values[0] == 0:
            axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
        else:
            axes.set_xscale("log")
    if len(values) <= 12:
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
