"""Curves of accuracy against rounds, bytes or seconds, drawn from run folders.

Readable without colour: every line has its own colour (Okabe and Ito's, safe for the colour-blind), marker and dash.
Figures are objects of their own; pyplot and the user's matplotlib settings are not touched.
"""

from __future__ import annotations

import io
import itertools
import math
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.errors import RequestError
from polyfed.registry import nearest
from polyfed.report.folders import RunRecord
from polyfed.report.grouping import Group, group_runs
from polyfed.report.writing import make_folder, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Series", "curves", "series"]

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B4C9A")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1.5)))
_AXES = {"round": "round", "bytes": "bytes sent, both ways", "seconds": "training time"}
_TITLES = {
    "round": "Accuracy against rounds",
    "bytes": "Accuracy against bytes sent",
    "seconds": "Accuracy against training time",
}
_BYTE_SCALES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_SECOND_SCALES = ((3600, "h"), (60, "min"), (1, "s"))
_MARKERS_PER_LINE = 12


@dataclass(frozen=True)
class Series:
    """One line: mean over seeds at each evaluated round, with the lowest and the highest seed.

    Attributes:
        name: the method or variant.
        x: rounds, or cumulative bytes or seconds (mean over seeds).
        mean: accuracy in [0, 1].
        low: lowest seed.
        high: highest seed.
        seeds: how many seeds.
    """

    name: str
    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: int


def curves(runs: Iterable[RunRecord], out_folder: str | Path, x: str = "round", stage: str | None = None) -> list[Path]:
    """Draw accuracy against rounds, bytes or seconds: one figure per set of comparable runs, as PNG and SVG.

    Args:
        runs: from ``find_runs``; unfinished ones are left out.
        out_folder: where to; made if missing.
        x: "round", "bytes" (both directions, cumulative) or "seconds" (cumulative).
        stage: which stage to draw; by default each run's own evaluation.

    Returns:
        The files written: ``accuracy-by-<x>.png`` and ``.svg``, numbered where there are several figures.

    Raises:
        RequestError: unknown axis, nothing to draw, a run without the stage, or the folder cannot be written to.
    """
    if x not in _AXES:
        raise RequestError(f"unknown axis x='{x}'{nearest(x, _AXES)}")
    groups, _ = group_runs(runs, stage)
    drawn = [(group, found) for group in groups if (found := series(group, x, stage))]
    if not drawn:
        raise RequestError("nothing to draw: no round of these runs was evaluated")
    folder = make_folder(out_folder)
    written = []
    for number, (group, found) in enumerate(drawn, start=1):
        figure = _draw(group, found, x, stage)
        stem = f"accuracy-by-{x}" + (f"-{number}" if len(drawn) > 1 else "")
        for form in ("png", "svg"):
            stream = io.BytesIO()
            metadata = {"Date": None} if form == "svg" else None
            figure.savefig(stream, format=form, dpi=150, metadata=metadata, facecolor="white")
            written.append(write_whole(folder / f"{stem}.{form}", stream.getvalue()))
    return written


def series(group: Group, x: str = "round", stage: str | None = None) -> list[Series]:
    """The numbers behind the curves. A point is a round that every seed of the row evaluated."""
    stages = group.stages(stage)
    lines = [_series(name, runs, x, stages[name]) for name, runs in group.rows.items()]
    return [line for line in lines if line is not None]


def _series(name: str, runs: Sequence[RunRecord], x: str, stage: str) -> Series | None:
    points = [dict(_points(run, x, stage)) for run in runs]
    rounds = sorted(set.intersection(*(set(found) for found in points)))
    if not rounds:
        return None
    values = [[found[number][1] for found in points] for number in rounds]
    return Series(
        name=name,
        x=tuple(statistics.fmean(found[number][0] for found in points) for number in rounds),
        mean=tuple(map(statistics.fmean, values)),
        low=tuple(map(min, values)),
        high=tuple(map(max, values)),
        seeds=len(runs),
    )


def _points(run: RunRecord, x: str, stage: str) -> Iterator[tuple[int, tuple[float, float]]]:
    """Each evaluated round with its place on the axis and its accuracy."""
    spent = 0.0
    for record in run.rounds:
        if x == "bytes":
            spent += (record.get("bytes_up") or 0) + (record.get("bytes_down") or 0)
        elif x == "seconds":
            spent += record.get("seconds") or 0.0
        number = int(record["round"])
        mean = ((record.get("accuracy") or {}).get(stage) or {}).get("mean")
        if mean is not None and math.isfinite(mean):
            yield number, (float(number) if x == "round" else spent, float(mean))


def _scale(lines: Sequence[Series], x: str) -> tuple[float, str]:
    """By what to divide the axis, and its label."""
    if x == "round":
        return 1.0, _AXES[x]
    largest = max(max(line.x) for line in lines)
    scales = _BYTE_SCALES if x == "bytes" else _SECOND_SCALES
    size, unit = next((scale for scale in scales if largest >= 2 * scale[0]), scales[-1])
    return float(size), f"{_AXES[x]} [{unit}]"


def _styles(names: Iterable[str], methods: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Local is black and dotted; the others differ in colour, marker and dash at once (the cycles' lengths differ)."""
    cycle = zip(*map(itertools.cycle, (_COLOURS, _MARKERS, _DASHES)), strict=False)
    for name in names:
        if methods[name] == "local":
            yield {"color": "black", "marker": "x", "linestyle": (0, (1.5, 2)), "linewidth": 1.6}
        else:
            colour, marker, dash = next(cycle)
            yield {"color": colour, "marker": marker, "linestyle": dash, "linewidth": 1.8}


def _level(line: Series, farthest: float) -> Series:
    """The line's last accuracy, drawn across."""
    last = ((line.mean[-1],) * 2, (line.low[-1],) * 2, (line.high[-1],) * 2)
    return Series(f"{line.name} (sends nothing; its last round)", (0.0, farthest), *last, line.seeds)


def _draw(group: Group, lines: Sequence[Series], x: str, stage: str | None) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8.4, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    divisor, label = _scale(lines, x)
    methods = {name: runs[0].method for name, runs in group.rows.items()}
    handles, labels = [], []
    farthest = max(max(line.x) for line in lines)
    for number, (line, style) in enumerate(zip(lines, _styles([s.name for s in lines], methods), strict=True)):
        if x != "round" and max(line.x) == 0 < farthest:  # Local sends nothing: a level to compare with, not a curve
            line = _level(line, farthest)
        at = [value / divisor for value in line.x]
        if line.seeds > 1:
            low, high = ([100 * value for value in band] for band in (line.low, line.high))
            axes.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)
        step = max(1, math.ceil(len(at) / _MARKERS_PER_LINE))
        every = (number % step, step)  # markers of neighbouring lines do not fall on one another
        (handle,) = axes.plot(
            at, [100 * value for value in line.mean], **style, markersize=5, markevery=every, gid=f"series-{number}"
        )
        handles.append(handle)
        labels.append("\n".join(textwrap.wrap(line.name, 26)).replace("$", r"\$"))
    several = any(line.seeds > 1 for line in lines)
    about = f"{group.about}, {group.seeds_text()}. {group.scoring(stage).capitalize()}."
    about += " Line: mean over seeds; band: lowest to highest seed." if several else ""
    caption = textwrap.wrap(about, 118)
    axes.set_title(_TITLES[x], loc="left", fontsize=12, fontweight="bold", pad=12 + 12 * len(caption))
    axes.annotate(
        "\n".join(caption).replace("$", r"\$"),
        xy=(0, 1),
        xycoords="axes fraction",
        xytext=(0, 6),
        textcoords="offset points",
        va="bottom",
        fontsize=8.5,
        color="#444444",
    )
    axes.set_xlabel(label)
    axes.set_ylabel("test accuracy [%]")
    if x == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        axes.set_xlim(left=0)
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9, handlelength=3.2
    )
    return figure
