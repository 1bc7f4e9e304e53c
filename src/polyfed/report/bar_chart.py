"""Bars of methods or variants side by side, for ablations: accuracy over seeds, Local as a line across."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polyfed.errors import ConfigError
from polyfed.report.grouping import Group, group_runs
from polyfed.report.plot_style import FigureWithData, bar_style, canvas, legend, style_axes
from polyfed.report.run_records import RunRecord
from polyfed.report.text_tables import finite, mean_of, std_of
from polyfed.results.main_score import MainScore

__all__ = ["Bar", "build_bars", "variants"]

_BAR = 0.34  # inches, of a bar and what is between two
_LINE = 0.16  # inches, of a line of a bar's name


@dataclass(frozen=True)
class Bar:
    """One method or variant. accuracy: mean over seeds, std: sample deviation (None for one seed), each: seed by seed.

    All in [0, 1].
    """

    name: str
    method: str
    accuracy: float
    std: float | None
    each: tuple[float, ...]
    seeds: tuple[int, ...]


def build_bars(group: Group, stage: str | None = None) -> list[Bar]:
    """One per row, in order; a row without a recorded accuracy is left out."""
    stages = group.stages(stage)
    found = []
    for name, runs in group.rows.items():
        each = [finite(run.result.mean_accuracy(stages[name])) for run in runs]
        mean = mean_of(each)
        if mean is not None:
            known = tuple(value for value in each if value is not None)
            found.append(Bar(name, runs[0].method, mean, std_of(each), known, tuple(run.seed for run in runs)))
    return found


def variants(runs: Iterable[RunRecord], stage: str | None = None) -> list[FigureWithData]:
    """``variants``: a bar per method or variant, after the last round.

    Args:
        runs: from ``load_runs``. stage: which stage's accuracy; by default each run's own evaluation.

    Raises:
        ConfigError: nothing is finished, a run lacks the stage, or no accuracy is recorded.
    """
    groups, _ = group_runs(runs, stage)
    every = [(group, build_bars(group, stage)) for group in groups]
    found = [(group, mine) for group, mine in every if mine]
    if not found:
        raise ConfigError("nothing to draw: no accuracy of these runs is recorded")
    return [
        _draw(group, mine, stage, f"variants-{number}" if len(found) > 1 else "variants")
        for number, (group, mine) in enumerate(found, start=1)
    ]


def _draw(group: Group, found: Sequence[Bar], stage: str | None, stem: str) -> FigureWithData:
    from matplotlib.patheffects import withStroke

    score = group.score
    spread = " Bar: mean over seeds; circles: seeds; ±: sample standard deviation." if len(group.seeds) > 1 else ""
    about = f"{group.about}, {group.seeds_text()}. {group.scoring(stage).capitalize()}, after the last round.{spread}"
    local = next((bar for bar in found if group.looks[bar.name] < 0), None)
    others = [bar for bar in found if bar is not local] or list(found)
    names = ["\n".join(textwrap.wrap(bar.name, 30)) for bar in others]
    step = max(_BAR, _LINE * (2 + max(name.count("\n") for name in names)))
    figure, ((axes,),) = canvas("Methods and variants", about, 0.75 + step * len(others))
    style_axes(axes, "x")
    for place, bar in enumerate(others):
        look = bar_style(group.looks[bar.name])
        axes.barh(place, score.shown(bar.accuracy), height=0.68, **look, gid=f"bar {bar.name}")
        if len(bar.each) > 1:
            dots = {"color": "white", "edgecolor": "black", "linewidth": 0.9, "s": 16, "zorder": 3}
            axes.scatter(list(map(score.shown, bar.each)), [place] * len(bar.each), **dots)
        said = axes.annotate(_said(bar, score), (score.shown(max(bar.each)), place), xytext=(6, 0), **_BESIDE)
        said.set_path_effects([withStroke(linewidth=3, foreground="white")])
    if local is not None and local not in others:
        line = axes.axvline(
            score.shown(local.accuracy), color="black", linestyle=(0, (1.5, 2)), linewidth=1.8, gid="local"
        )
        legend(axes, [line], [f"{local.name}: {_said(local, score)}"])
    axes.set_yticks(range(len(others)), names, parse_math=False)
    axes.set_ylim(len(others) - 0.4, -0.6)
    axes.set_xlim(*_limits(found, score))
    if score.is_share:
        axes.set_xticks([tick for tick in axes.get_xticks() if tick <= 100])
    axes.set_xlabel(score.axis)
    return FigureWithData(
        stem, figure, {"about": about, "bars": [asdict(bar) for bar in found]}, [_row(bar) for bar in found]
    )


_BESIDE: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8.5}


def _said(bar: Bar, score: MainScore) -> str:
    """``"71.20 ± 0.80"``."""
    return score.text(bar.accuracy) + ("" if bar.std is None else f" ± {score.text(bar.std)}")


def _limits(found: Sequence[Bar], score: MainScore) -> tuple[float, float]:
    """From 0 on, as lengths of bars are compared; room for the numbers beside them."""
    longest = score.shown(max(max(bar.each) for bar in found))
    return 0.0, (max(1.0, longest) if score.is_share else longest or 1.0) * 1.3


def _row(bar: Bar) -> dict[str, Any]:
    return asdict(bar) | {"each": " ".join(map(str, bar.each)), "seeds": " ".join(map(str, bar.seeds))}
