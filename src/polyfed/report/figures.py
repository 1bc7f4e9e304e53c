"""Figures of finished runs: curves, clients, and what federation is worth.

Each function gives the figure of a set of comparable runs. What is drawn is read from
`result.json`, of the reported round, in each run's main stage, or from `rounds.jsonl`.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.errors import ConfigError
from polyfed.records.read import ANALYSIS, check_links
from polyfed.registry import suggest
from polyfed.report.findings import decompose
from polyfed.report.frames import client_frame, curve_frame, ranked
from polyfed.report.grouping import Group, group_runs
from polyfed.report.plot_style import (
    canvas,
    empty_figure,
    has_bands,
    legend,
    line_style,
    save,
    style_axes,
)
from polyfed.report.run_records import load_runs, rows_of_pooled
from polyfed.report.text_tables import html_list, image

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["Plot", "clients", "curves", "draw", "gains", "plot"]

FIGURES = ("curves", "clients", "gains")
AXES = ("round", "bytes", "simulated")
_LABELS = {
    "round": "round",
    "bytes": "bytes sent, both ways",
    "simulated": "simulated time",
    "rank": "client, from the lowest to the highest accuracy",
}
_SCALES = {
    "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")),
    "simulated": ((3600, "h"), (60, "min"), (1, "s")),
}
_MARKERS_PER_LINE = 12
_FAR_APART = 20  # bytes and simulated time are on a logarithmic axis where the methods' totals differ by this factor
_PARTS: dict[str, dict[str, Any]] = {
    "gain alone": {"facecolor": "#9ecae1", "edgecolor": "black", "linewidth": 0.8},
    "federated gain": {"facecolor": "#fdae6b", "edgecolor": "black", "linewidth": 0.8, "hatch": "///"},
}


@dataclass(frozen=True)
class Plot:
    """What `plot` leaves behind; in a notebook the figures.

    files: all that was written. notes: which runs were left out, and why.
    """

    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        return "".join(image(file) for file in self.files if file.suffix == ".png") + html_list(self.notes)


def plot(
    folders: str | Path | Iterable[str | Path],
    figures: Sequence[str] = FIGURES,
    out: str | Path | None = None,
) -> Plot:
    """Draw figures of finished runs, as `polyfed report` does, each as PNG and SVG.

    Args:
        folders: run folders, or folders above them; the folder of a sweep.
        figures: some of "curves", "clients" and "gains"; those that these folders do not allow are left out.
        out: where to; by default ``analysis`` in the first folder.

    Raises:
        ConfigError: an unknown figure, or nothing to draw.
    """
    given = [Path(folders)] if isinstance(folders, str | Path) else [Path(folder) for folder in folders]
    for name in figures:
        if name not in FIGURES:
            raise ConfigError(f"unknown figure '{name}'{suggest(name, FIGURES)}")
    groups, left_out = group_runs(rows_of_pooled(load_runs(given)))
    drawn = draw(groups, figures)
    if not drawn:
        raise ConfigError(f"expected runs of which {' or '.join(figures)} can be drawn, got others")
    if out is None:
        check_links(given[0])
    place = given[0] / ANALYSIS if out is None else Path(out)
    return Plot(tuple(file for stem, figure in drawn.items() for file in save(figure, place, stem)), left_out)


def draw(groups: Sequence[Group], figures: Sequence[str] = FIGURES) -> dict[str, Figure]:
    """Those of these figures that the runs allow, by the names of their files, numbered where groups have one each."""
    kinds: dict[str, Callable[[Group], Figure | None]] = {}
    if "curves" in figures:
        simulated = any((group.frame["metric"] == "simulated_seconds").any() for group in groups)
        for axis in AXES if simulated else AXES[:2]:
            kinds[f"accuracy-by-{axis}"] = functools.partial(curves, x=axis)
    if "gains" in figures:
        kinds["decomposition"] = gains
    if "clients" in figures:
        kinds["accuracy-per-client"] = clients
    drawn: dict[str, Figure] = {}
    for stem, figure_of in kinds.items():
        every = [(group.score.of_it(stem).lower(), figure_of(group)) for group in groups]
        made = [(name, figure) for name, figure in every if figure is not None]
        for number, (name, figure) in enumerate(made, start=1):
            drawn[f"{name}-{number}" if len(made) > 1 else name] = figure
    return drawn


# lines ------------------------------------------------------------------------------------------------------------


def curves(group: Group, x: str = "round") -> Figure | None:
    """Accuracy against rounds, bytes or time; None where nothing is known of them.

    Args:
        x: "round", "bytes" (both directions), or "simulated", the seconds that rounds would have taken on the clients'
            devices; all but the first cumulative.
    """
    points = curve_frame(group)
    whole = points.groupby("name")[x].transform(lambda places: places.notna().all()).astype(bool)
    against = {"round": "rounds", "bytes": "bytes sent"}.get(x, _LABELS[x])
    return _lines(group, points[whole], x, f"Accuracy against {against}", group.scoring())


def clients(group: Group) -> Figure | None:
    """The clients of each method from the lowest to the highest accuracy; None where no client was scored."""
    about = f"{group.scoring()}, {group.evaluation.when}"
    return _lines(group, ranked(client_frame(group)), "rank", "Accuracy per client, sorted", about)


def _lines(group: Group, points: pd.DataFrame, x: str, title: str, scoring: str) -> Figure | None:
    """A line for each method against a column of the points, which also have name, mean, low, high and count.

    A method that sends nothing is a level to compare with, not a curve.
    """
    from matplotlib.ticker import MaxNLocator

    if points.empty:
        return None
    score = group.score
    in_order = points.sort_values("name", key=lambda names: names.map(list(group.rows).index), kind="stable")
    lines = dict(list(in_order.groupby("name", sort=False)))
    seeds = points["count"].max()
    band = "; band: lowest to highest seed" if has_bands(len(lines), seeds) else ""
    about = f"{_about(group, scoring)}{f' Line: mean over seeds{band}.' if seeds > 1 else ''}"
    figure, axes = empty_figure(score.of_it(title), about)
    farthest = points[x].max()
    divisor, unit = next((scale for scale in _SCALES.get(x, ()) if farthest >= 2 * scale[0]), (1, ""))
    logarithmic = x in _SCALES and _far_apart(points, x)
    nearest = points[x][points[x] > 0].min() if logarithmic else 0.0
    handles = []
    labels = []
    for number, (name, line) in enumerate(lines.items()):
        style = line_style(group.looks[name])
        shown = line[["mean", "low", "high"]] * score.shown(1.0)
        places = line[x] / divisor
        label = name
        if x != "round" and line[x].max() == 0 < farthest:
            places = [nearest / divisor, farthest / divisor]
            shown = shown.iloc[[-1, -1]]
            label += " (sends nothing; its last round)"
        if has_bands(len(lines), line["count"].max()):
            axes.fill_between(places, shown["low"], shown["high"], color=style["color"], alpha=0.15, linewidth=0)
        step = max(1, math.ceil(len(shown) / _MARKERS_PER_LINE))
        every = (number % step, step)  # markers of neighboring lines do not fall on one another
        handles += axes.plot(places, shown["mean"], **style, markersize=5, markevery=every, gid=f"series-{number}")
        labels.append(label)
    axes.set_xlabel(score.of_it(f"{_LABELS[x]} [{unit}]" if unit else _LABELS[x]))
    axes.set_ylabel(score.axis)
    if x not in _SCALES:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    elif logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(left=0)
    legend(axes, handles, labels)
    return figure


def _about(group: Group, scoring: str) -> str:
    return f"{group.about}, {group.seeds_text()}. {scoring.capitalize()}."


def _far_apart(points: pd.DataFrame, x: str) -> bool:
    """Whether one method has sent its all where another has hardly begun."""
    lines = points.groupby("name")[x]
    sending = lines.max()[lines.max() > 0]
    begun = (lines.min()[sending.index] > 0).all()
    return bool(begun and len(sending) > 1 and sending.max() >= _FAR_APART * sending.min())


# what federation is worth -----------------------------------------------------------------------------------------


def gains(group: Group) -> Figure | None:
    """Per method the gain alone and, from where that ends, the federated gain; None where no method ran alone, too."""
    from matplotlib.patches import Patch

    score = group.score
    found = {name: one for name, one in decompose(group).items() if one.gain.mean is not None}
    if not found:
        return None
    every = list(found.values())
    known = any(one.federated.margin is not None for one in every)
    loss = any((part.mean or 0.0) < 0 for one in every for part in (one.alone, one.federated))
    about = _about(group, f"{group.scoring()}, {group.evaluation.when}")
    about += " Whiskers: 95 % intervals, paired by seed." if known else ""
    about += " White: a loss." if loss else ""
    figure, ((axes,),) = canvas("What federation is worth", about, 0.75 + 0.5 * len(every))
    style_axes(axes, "x")
    axes.use_sticky_edges = False  # bars begin at Local, whose line would lie on the frame
    handles: dict[str, Any] = {part: Patch(**look) for part, look in _PARTS.items()}
    for place, one in enumerate(every):
        begin = one.local or 0.0
        for (part, look), gain, side in zip(_PARTS.items(), (one.alone, one.federated), (-0.18, 0.18), strict=True):
            end = score.improved(begin, gain.mean or 0.0)
            left = score.shown(begin)
            right = score.shown(end)
            bar = look | ({"facecolor": "white"} if (gain.mean or 0.0) < 0 else {})
            axes.barh(place + side, right - left, height=0.36, left=left, **bar, gid=part)
            if gain.margin is not None:
                reach = score.shown(gain.margin)
                axes.errorbar(right, place + side, xerr=reach, color="black", capsize=3, linewidth=1.1)
            begin = end
    lines = {
        "Local": ((0, (1.5, 2)), [one.local for one in every]),
        "pooled-tuned": ("solid", [one.pooled for one in every]),
    }
    for name, (style, values) in lines.items():
        levels = [score.shown(value) for value in values if value is not None]
        if levels:
            at = sum(levels) / len(levels)
            handles[name] = axes.axvline(at, color="black", linestyle=style, linewidth=1.6, gid=name)
    axes.set_yticks(range(len(every)), ["\n".join(textwrap.wrap(name, 30)) for name in found], parse_math=False)
    axes.set_ylim(len(every) - 0.4, -0.6)
    low, high = axes.get_xlim()  # no accuracy lies outside of 0..100: whiskers are cut there, as intervals in tables
    axes.set_xlim(max(0.0, low), min(100.0, high) if score.is_share else high)
    axes.set_xlabel(score.axis)
    legend(axes, list(handles.values()), list(handles))
    return figure
