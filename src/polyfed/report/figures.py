"""Curves of accuracy (or another figure) against rounds, bytes, seconds or simulated time, drawn from run folders."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from polyfed.errors import ConfigError
from polyfed.registry import suggest
from polyfed.report.atomic_files import make_folder
from polyfed.report.grouping import Group, group_runs
from polyfed.report.plot_style import FigureWithData, empty_figure, has_bands, legend, line_style, save
from polyfed.report.run_records import RunRecord
from polyfed.results.schema import RoundRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["AXES", "METRICS", "Series", "axes_of", "curve_drawings", "curves", "series"]

AXES = {
    "round": "round",
    "bytes": "bytes sent, both ways",
    "seconds": "training time",
    "simulated": "simulated time",
}
_AGAINST = {"round": "rounds", "bytes": "bytes sent", "seconds": "training time", "simulated": "simulated time"}
METRICS = {
    "accuracy": "accuracy",
    "bottom_decile": "accuracy of the lowest tenth of clients",
    "balanced_accuracy": "balanced accuracy",
    "f1": "macro F1",
    "auc": "macro AUC",
    "calibration_error": "calibration error",
    "r2": "R2",
}
_BYTE_SCALES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_SECOND_SCALES = ((3600, "h"), (60, "min"), (1, "s"))
_MARKERS_PER_LINE = 12
_FAR_APART = 20  # bytes and simulated time are on a logarithmic axis where the methods' totals differ by this factor


@dataclass(frozen=True)
class Series:
    """One line: mean over seeds at each evaluated round, with the lowest and the highest seed.

    Attributes:
        name: the method or variant.
        x: rounds, or cumulative bytes or seconds, measured or simulated (mean over seeds).
        mean: accuracy, or another figure, in [0, 1]; where numbers are predicted, the RMSE.
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
    """Draw accuracy against rounds, bytes or time: one figure per set of comparable runs, as PNG and SVG.

    Args:
        runs: from ``load_runs``; unfinished ones are left out.
        out_folder: where to; made if missing.
        x: "round", "bytes" (both directions), "seconds", or "simulated", the seconds that rounds would have taken on
            the clients' devices; all but the first cumulative.
        stage: which stage to draw; by default each run's own evaluation.
        metric: "accuracy" (where numbers are predicted, the RMSE), "bottom_decile", or one that the runs recorded:
            "balanced_accuracy", "f1", "auc", "calibration_error", "r2".

    Returns:
        The files written: ``<metric>-by-<x>.png`` (or rmse) and ``.svg``, numbered where there are several figures.

    Raises:
        ConfigError: unknown axis or metric, nothing to draw, a run without the stage, or the folder cannot be written
            to.
    """
    drawings = curve_drawings(runs, x, stage, metric)
    folder = make_folder(out_folder)
    return [file for drawing in drawings for file in save(drawing.figure, folder, drawing.stem)]


def curve_drawings(
    runs: Iterable[RunRecord],
    x: str = "round",
    stage: str | None = None,
    metric: str = "accuracy",
    smooth: int = 1,
) -> list[FigureWithData]:
    """The figures that `curves` writes, with their numbers.

    Args:
        runs, x, stage, metric: as for `curves`.
        smooth: each point is the mean of this many evaluated rounds, itself the last of them; 1 smooths nothing.

    Raises:
        ConfigError: as `curves`.
    """
    if x not in AXES:
        raise ConfigError(f"unknown axis x='{x}'{suggest(x, AXES)}")
    if metric not in METRICS:
        raise ConfigError(f"unknown metric '{metric}'{suggest(metric, METRICS)}")
    groups, _ = group_runs(runs, stage)
    every = [(group, series(group, x, stage, metric)) for group in groups]
    drawn = [(group, found) for group, found in every if found]
    if not drawn:
        why = "was evaluated" if metric == "accuracy" else f"has recorded '{metric}' (see [evaluation] metrics)"
        why = "has a simulated time (see [devices])" if x == "simulated" else why
        raise ConfigError(f"nothing to draw: no round of these runs {why}")
    drawings = []
    for number, (group, lines) in enumerate(drawn, start=1):
        named = group.score.name if metric == "accuracy" else metric
        stem = f"{named}-by-{x}" + (f"-{number}" if len(drawn) > 1 else "")
        smoothed = [_smoothed(line, smooth) for line in lines]
        rows = [
            {"name": line.name, x: at, "mean": mean, "low": low, "high": high, "seeds": line.seeds}
            for line in smoothed
            for at, mean, low, high in zip(line.x, line.mean, line.low, line.high, strict=True)
        ]
        data = {"about": _caption(group, smoothed, stage, smooth), "lines": [asdict(line) for line in smoothed]}
        drawings.append(FigureWithData(stem, draw_series(group, smoothed, x, stage, metric, smooth), data, rows))
    return drawings


def metric_title(group: Group, metric: str) -> str:
    """A figure's name in titles, of the group's main score."""
    if metric == "bottom_decile" and group.score.lower_is_better:
        return f"{group.score.title} of the highest tenth of clients"
    return group.score.title if metric == "accuracy" else METRICS[metric]


def metric_factor(group: Group, metric: str) -> float:
    """What a figure is multiplied by to be shown: 100 for a share, in percent."""
    is_share = metric != "r2"
    if metric in ("accuracy", "bottom_decile"):
        is_share = group.score.is_share
    return 100.0 if is_share else 1.0


def axes_of(runs: Iterable[RunRecord]) -> list[str]:
    """The axes against which any of these runs can be drawn."""
    simulated = any(record.simulated_seconds is not None for run in runs for record in run.rounds)
    return [axis for axis in AXES if axis != "simulated" or simulated]


def series(group: Group, x: str = "round", stage: str | None = None, metric: str = "accuracy") -> list[Series]:
    """The numbers behind the curves. A point is a round that every seed of the row evaluated.

    Where seeds stopped early after different rounds, their final rounds are no such point.
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
    """Each evaluated round, and whether it is the final one, with its place on the axis and its figure."""
    spent = 0.0
    for record in run.rounds:
        if x == "bytes":
            spent += (record.bytes_up or 0) + (record.bytes_down or 0)
        elif x == "seconds":
            spent += record.seconds or 0.0
        elif x == "simulated":
            if record.simulated_seconds is None:
                return
            spent += record.simulated_seconds
        value = _value(record, stage, metric)
        if value is not None and math.isfinite(value):
            place = float(record.round) if x == "round" else spent
            yield (record.round, record.final_round), (place, float(value))


def _value(record: RoundRecord, stage: str, metric: str) -> float | None:
    """A figure of one record, in one stage; None where it was not recorded."""
    if metric == "accuracy":
        return record.mean_accuracy(stage)
    if metric == "bottom_decile":
        scored = record.accuracy.get(stage)
        return None if scored is None else scored.bottom_decile
    figure = record.metrics.get(stage, {}).get(metric)
    return None if figure is None else figure.mean


def _scale(lines: Sequence[Series], x: str) -> tuple[float, str]:
    """By what to divide the axis, and its label."""
    if x == "round":
        return 1.0, AXES[x]
    largest = max(max(line.x) for line in lines)
    scales = _BYTE_SCALES if x == "bytes" else _SECOND_SCALES
    size, unit = next((scale for scale in scales if largest >= 2 * scale[0]), scales[-1])
    return float(size), f"{AXES[x]} [{unit}]"


def _smoothed(line: Series, window: int) -> Series:
    """Trailing means of so many points."""

    def means(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1))

    return replace(line, mean=means(line.mean), low=means(line.low), high=means(line.high)) if window > 1 else line


def _level(line: Series, nearest_: float, farthest: float) -> Series:
    """The line's last accuracy, drawn across."""
    last = ((line.mean[-1],) * 2, (line.low[-1],) * 2, (line.high[-1],) * 2)
    return Series(f"{line.name} (sends nothing; its last round)", (nearest_, farthest), *last, line.seeds)


def _logarithmic(lines: Sequence[Series], x: str) -> bool:
    """Whether one method has sent its all where another has hardly begun."""
    sending = [line for line in lines if max(line.x) > 0]
    totals = [max(line.x) for line in sending]
    begun = all(value > 0 for line in sending for value in line.x)
    return x in ("bytes", "simulated") and begun and len(totals) > 1 and max(totals) >= _FAR_APART * min(totals)


def _caption(group: Group, lines: Sequence[Series], stage: str | None, smooth: int) -> str:
    about = f"{group.about}, {group.seeds_text()}. {group.scoring(stage).capitalize()}."
    about += f" Each point: the mean of the last {smooth} evaluated rounds." if smooth > 1 else ""
    seeds = max(line.seeds for line in lines)
    band = "; band: lowest to highest seed" if has_bands(len(lines), seeds) else ""
    return about + (f" Line: mean over seeds{band}." if seeds > 1 else "")


def draw_series(
    group: Group, lines: Sequence[Series], x: str, stage: str | None, metric: str = "accuracy", smooth: int = 1
) -> Figure:
    from matplotlib.ticker import MaxNLocator

    named = metric_title(group, metric)
    factor = metric_factor(group, metric)
    title = f"{named[0].upper()}{named[1:]} against {_AGAINST[x]}"
    figure, axes = empty_figure(title, _caption(group, lines, stage, smooth))
    divisor, label = _scale(lines, x)
    handles = []
    labels = []
    farthest = max(max(line.x) for line in lines)
    logarithmic = _logarithmic(lines, x)
    first = min(value for line in lines for value in line.x if value > 0) if logarithmic else 0.0
    for number, line in enumerate(lines):
        style = line_style(group.looks[line.name])
        if x != "round" and max(line.x) == 0 < farthest:  # Local sends nothing: a level to compare with, not a curve
            line = _level(line, first, farthest)
        at = [value / divisor for value in line.x]
        if has_bands(len(lines), line.seeds):
            low, high = ([factor * value for value in band] for band in (line.low, line.high))
            axes.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)
        step = max(1, math.ceil(len(at) / _MARKERS_PER_LINE))
        every = (number % step, step)  # markers of neighboring lines do not fall on one another
        (handle,) = axes.plot(
            at, [factor * value for value in line.mean], **style, markersize=5, markevery=every, gid=f"series-{number}"
        )
        handles.append(handle)
        labels.append(line.name)
    axes.set_xlabel(label)
    axes.set_ylabel(f"test {named} [%]" if factor > 1 else f"test {named}")
    if x == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    elif logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(left=0)
    legend(axes, handles, labels)
    return figure
