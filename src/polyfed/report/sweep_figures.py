"""The figures of a sweep: accuracy against a swept number, and a map over two of them, the choice by validation marked.

The axis is the first swept key whose values are numbers; a line per value of a second key, if there is one. With more
keys, or without numbers, nothing is drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.errors import ConfigError
from polyfed.report.plot_style import (
    SHADES,
    WIDTH,
    FigureWithData,
    add_colorbar,
    canvas,
    empty_figure,
    has_bands,
    inches,
    legend,
    line_style,
    save,
)
from polyfed.report.run_records import format_setting
from polyfed.report.sweeps import SweepRow, SweepTable, named, read_sweep, short_names, to_json
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


def sensitivity(folder: str | Path) -> list[FigureWithData]:
    """``sensitivity``: accuracy against a swept number; ``sensitivity-map``: against two of them."""
    table = read_sweep(folder)
    figures = {"sensitivity": figure_of(table), "sensitivity-map": map_of(table)}
    names = ("validation", "validation_std", "test", "test_std", "local", "difference", "chosen")
    rows = [
        {"method": row.method}
        | {key: format_setting(value) for key, value in row.settings.items()}
        | {name: getattr(row, name) for name in names}
        for row in _grid(table)
    ]
    data = json.loads(to_json(table))
    found = [FigureWithData(stem, figure, data, rows) for stem, figure in figures.items() if figure is not None]
    if not found:
        keys = ", ".join(table.keys)
        raise ConfigError(f"nothing to draw: expected one or two swept settings, a number among them, got {keys}")
    return found


def _grid(table: SweepTable) -> list[SweepRow]:
    """The rows of the grid itself, without those of Local."""
    return [row for row in table.rows if row.words]


def _numbers(table: SweepTable, key: str) -> list[float]:
    """The values of a key, in order; none where they are not numbers."""
    values = [row.settings[key] for row in _grid(table)]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return []
    return sorted(set(values))


# one setting ------------------------------------------------------------------------------------------------------


def figure_of(table: SweepTable) -> Figure | None:
    """Validation and test accuracy against a swept number; None where there is none with several values."""
    axis = next((key for key in table.keys if _numbers(table, key)), None)
    if axis is None or len(table.keys) > 2 or len(_numbers(table, axis)) < 2:
        return None
    score = table.score
    lines = _lines(_grid(table), axis, next((key for key in table.keys if key != axis), None))
    local = {  # each line's name -> Local beside it; once, without a name, where it is the same beside all of them
        name: ([row.settings[axis] for row in line], _shown([row.local for row in line], score))
        for name, line in lines.items()
        if any(row.local is not None for row in line)
    }
    if len(set(map(str, local.values()))) == 1:
        local = {"": next(iter(local.values()))}
    most = max(len(row.seeds) for line in lines.values() for row in line)
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


def _lines(rows: Sequence[SweepRow], axis: str, other: str | None) -> dict[str, list[SweepRow]]:
    """The rows of each value of the second key, along the axis, by the line's name."""
    lines: dict[str, list[SweepRow]] = {}
    for row in sorted(rows, key=lambda row: float(row.settings[axis])):
        lines.setdefault("" if other is None else named([other], row.settings), []).append(row)
    return lines


def _suffix(name: str) -> str:
    return f", {name}" if name else ""


def _draw_line(
    axes: Any, axis: str, name: str, line: Sequence[SweepRow], style: Mapping[str, Any], score: MainScore
) -> None:
    """Validation dashed, test, and a ring around what was chosen."""
    at = [row.settings[axis] for row in line]
    dashed = {**style, "markerfacecolor": "white", "linestyle": (0, (2, 1.5))}
    for what, values, look in (
        ("validation", [row.validation for row in line], dashed),
        ("test", [row.test for row in line], style),
    ):
        label = f"{what}{_suffix(name)}"
        axes.plot(at, _shown(values, score), **look, markersize=5, label=label, gid=f"{what} {name}")
    ring = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "linestyle": "none", "color": "black"}
    for row in line:
        if row.chosen and row.validation is not None:
            axes.plot([row.settings[axis]], _shown([row.validation], score), **ring, label="chosen")


def _shown(values: Sequence[float | None], score: MainScore) -> list[float]:
    """For drawing: what is not known leaves a gap."""
    return [math.nan if value is None else score.shown(value) for value in values]


def _band(axes: Any, axis: str, line: Sequence[SweepRow], color: str, score: MainScore) -> None:
    """From the lowest to the highest seed."""
    known = [[score.shown(run.test) for run in row.runs if run.test is not None] for row in line]
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


# two settings -----------------------------------------------------------------------------------------------------


def map_of(table: SweepTable) -> Figure | None:
    """Test accuracy over two settings: columns by the first key, rows by the second; empty for what was not run.

    None where they are not two numbers with at least two values each.
    """
    from matplotlib.patches import Rectangle

    values = [_numbers(table, key) for key in table.keys]
    if len(values) != 2 or min(map(len, values)) < 2:
        return None
    score = table.score
    columns, rows = ([f"{value:g}" for value in of_key] for of_key in values)
    across, up = table.keys
    names = short_names(table.keys)
    title = f"{score.of_it('Accuracy')} over {names[across]} and {names[up]}"
    about = f"{table.caption} Test {score.title_with_unit}; framed: chosen by validation."
    column = max(0.5, inches(columns, 9) + 0.12)  # room for "100.0" and for the setting below it
    width = max(WIDTH, 1.2 + inches(rows, 9) + column * len(columns))
    figure, ((axes,),) = canvas(title, about, 0.9 + 0.42 * len(rows), width=width)
    places = {(values[0].index(row.settings[across]), values[1].index(row.settings[up])): row for row in _grid(table)}
    cells = [[math.nan] * len(columns) for _ in rows]
    for (x, y), row in places.items():
        (cells[y][x],) = _shown([row.test], score)
    shown = axes.imshow(cells, cmap=SHADES, aspect="auto", origin="lower")
    middle = sum(shown.get_clim()) / 2
    for (x, y), row in places.items():
        if row.test is None:
            continue
        value = cells[y][x]
        text = f"{value:.1f}" if score.is_share else f"{value:.3g}"
        axes.text(x, y, text, ha="center", va="center", color="white" if value > middle else "black")
        if row.chosen:
            for color, thick in (("white", 4.5), ("black", 2.0)):  # shows on light and dark
                axes.add_patch(Rectangle((x - 0.46, y - 0.45), 0.92, 0.9, fill=False, ec=color, lw=thick))
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    add_colorbar(figure, shown, [axes], score.axis)
    return figure
