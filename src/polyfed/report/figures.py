"""Curves of accuracy (or another figure) against rounds, bytes or seconds, drawn from run folders.

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
LOCAL_STYLE: dict[str, Any] = {"color": "black", "marker": "x", "linestyle": (0, (1.5, 2)), "linewidth": 1.6}
_AXES = {"round": "round", "bytes": "bytes sent, both ways", "seconds": "training time"}
_AGAINST = {"round": "rounds", "bytes": "bytes sent", "seconds": "training time"}
_METRICS = {
    "accuracy": "accuracy",
    "worst_tenth": "accuracy of the lowest tenth of clients",
    "balanced_accuracy": "balanced accuracy",
    "f1": "macro F1",
    "auc": "macro AUC",
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
        mean: accuracy, or another figure, in [0, 1].
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


def curves(
    runs: Iterable[RunRecord],
    out_folder: str | Path,
    x: str = "round",
    stage: str | None = None,
    metric: str = "accuracy",
) -> list[Path]:
    """Draw accuracy against rounds, bytes or seconds: one figure per set of comparable runs, as PNG and SVG.

    Args:
        runs: from ``find_runs``; unfinished ones are left out.
        out_folder: where to; made if missing.
        x: "round", "bytes" (both directions, cumulative) or "seconds" (cumulative).
        stage: which stage to draw; by default each run's own evaluation.
        metric: "accuracy", "worst_tenth", or one that the runs recorded: "balanced_accuracy", "f1", "auc".

    Returns:
        The files written: ``<metric>-by-<x>.png`` and ``.svg``, numbered where there are several figures.

    Raises:
        RequestError: unknown axis or metric, nothing to draw, a run without the stage, or the folder cannot be written
            to.
    """
    if x not in _AXES:
        raise RequestError(f"unknown axis x='{x}'{nearest(x, _AXES)}")
    if metric not in _METRICS:
        raise RequestError(f"unknown metric '{metric}'{nearest(metric, _METRICS)}")
    groups, _ = group_runs(runs, stage)
    drawn = [(group, found) for group in groups if (found := series(group, x, stage, metric))]
    if not drawn:
        why = "was evaluated" if metric == "accuracy" else f"has recorded '{metric}' (see [evaluation] metrics)"
        raise RequestError(f"nothing to draw: no round of these runs {why}")
    folder = make_folder(out_folder)
    written = []
    for number, (group, found) in enumerate(drawn, start=1):
        stem = f"{metric}-by-{x}" + (f"-{number}" if len(drawn) > 1 else "")
        written += save(_draw(group, found, x, stage, metric), folder, stem)
    return written


def save(figure: Figure, folder: str | Path, stem: str) -> list[Path]:
    """Write ``<stem>.png`` and ``<stem>.svg`` into the folder (made if missing), each whole or not at all.

    Raises:
        RequestError: the folder cannot be written to.
    """
    place, written = make_folder(folder), []
    for form in ("png", "svg"):
        stream = io.BytesIO()
        metadata = {"Date": None} if form == "svg" else None
        figure.savefig(stream, format=form, dpi=150, metadata=metadata, facecolor="white")
        written.append(write_whole(place / f"{stem}.{form}", stream.getvalue()))
    return written


def series(group: Group, x: str = "round", stage: str | None = None, metric: str = "accuracy") -> list[Series]:
    """The numbers behind the curves. A point is a round that every seed of the row evaluated.

    Where seeds stopped early after different rounds, their closing rounds are no such point.
    """
    stages = group.stages(stage)
    lines = [_series(name, runs, x, stages[name], metric) for name, runs in group.rows.items()]
    return [line for line in lines if line is not None]


def _series(name: str, runs: Sequence[RunRecord], x: str, stage: str, metric: str) -> Series | None:
    points = [dict(_points(run, x, stage, metric)) for run in runs]
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


def _points(run: RunRecord, x: str, stage: str, metric: str) -> Iterator[tuple[tuple[int, bool], tuple[float, float]]]:
    """Each evaluated round, and whether it is the closing one, with its place on the axis and its figure."""
    spent = 0.0
    for record in run.rounds:
        if x == "bytes":
            spent += (record.get("bytes_up") or 0) + (record.get("bytes_down") or 0)
        elif x == "seconds":
            spent += record.get("seconds") or 0.0
        number = int(record["round"])
        value = _value(record, stage, metric)
        if value is not None and math.isfinite(value):
            yield (number, bool(record.get("closing"))), (float(number) if x == "round" else spent, float(value))


def _value(record: Mapping[str, Any], stage: str, metric: str) -> float | None:
    """A figure of one record, in one stage; None where it was not recorded."""
    if metric in ("accuracy", "worst_tenth"):
        found, key = (record.get("accuracy") or {}).get(stage), "mean" if metric == "accuracy" else metric
    else:
        found, key = ((record.get("metrics") or {}).get(stage) or {}).get(metric), "mean"
    return (found or {}).get(key)


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
    others = styles()
    for name in names:
        yield LOCAL_STYLE if methods[name] == "local" else next(others)


def styles() -> Iterator[dict[str, Any]]:
    """How lines look, one after the other, without end; the first 315 differ (7 colours, 9 markers, 5 dashes)."""
    for colour, marker, dash in zip(*map(itertools.cycle, (_COLOURS, _MARKERS, _DASHES)), strict=False):
        yield {"color": colour, "marker": marker, "linestyle": dash, "linewidth": 1.8}


def _level(line: Series, farthest: float) -> Series:
    """The line's last accuracy, drawn across."""
    last = ((line.mean[-1],) * 2, (line.low[-1],) * 2, (line.high[-1],) * 2)
    return Series(f"{line.name} (sends nothing; its last round)", (0.0, farthest), *last, line.seeds)


def _draw(group: Group, lines: Sequence[Series], x: str, stage: str | None, metric: str = "accuracy") -> Figure:
    from matplotlib.ticker import MaxNLocator

    several = any(line.seeds > 1 for line in lines)
    about = f"{group.about}, {group.seeds_text()}. {group.scoring(stage).capitalize()}."
    about += " Line: mean over seeds; band: lowest to highest seed." if several else ""
    title = f"{_METRICS[metric][0].upper()}{_METRICS[metric][1:]} against {_AGAINST[x]}"
    figure, axes = blank(title, about)
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
        labels.append(line.name)
    axes.set_xlabel(label)
    axes.set_ylabel(f"test {_METRICS[metric]} [%]")
    if x == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        axes.set_xlim(left=0)
    legend(axes, handles, labels)
    return figure


def blank(title: str, about: str) -> tuple[Figure, Any]:
    """A figure and its empty axes, under a title and a sentence that says what is shown."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    caption = textwrap.wrap(about, 118)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=12 + 12 * len(caption))
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
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def legend(axes: Any, handles: Sequence[Any], names: Iterable[str]) -> None:
    """The lines' names, to the right of the axes; long ones wrapped."""
    labels = ["\n".join(textwrap.wrap(name, 26)).replace("$", r"\$") for name in names]
    axes.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9, handlelength=3.2
    )
