"""What federation is worth, drawn: from Local to alone to together, a row per method, Local and pooled as lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polyfed.errors import ConfigError
from polyfed.report.atomic_files import make_folder
from polyfed.report.comparison_formats import Table
from polyfed.report.decomposition import Decomposition, decompose
from polyfed.report.grouping import Group, group_runs
from polyfed.report.plot_style import FigureWithData, canvas, legend, save, style_axes
from polyfed.report.run_records import RunRecord

__all__ = ["decompositions", "write_decompositions"]

_ROW = 0.5  # inches, of a method
_THICK = 0.36  # of a bar, the distance of two methods being 1
_PARTS: dict[str, dict[str, Any]] = {
    "gain alone": {"facecolor": "#9ecae1", "edgecolor": "black", "linewidth": 0.8},
    "federated gain": {"facecolor": "#fdae6b", "edgecolor": "black", "linewidth": 0.8, "hatch": "///"},
}


def decompositions(runs: Iterable[RunRecord], stage: str | None = None) -> list[FigureWithData]:
    """``decomposition``: per method the gain alone and, from where that ends, the federated gain.

    Args:
        runs: from ``load_runs``. stage: which stage's accuracy; by default each run's own evaluation.

    Raises:
        ConfigError: nothing is finished, a run lacks the stage, or no method ran alone, too.
    """
    groups, _ = group_runs(runs, stage)
    every = [(group, decompose(group.rows, group.stages(stage), group.score)) for group in groups]
    found = [(group, ours) for group, ours in every if any(one.gain.mean is not None for one in ours)]
    if not found:
        raise ConfigError("nothing to draw: no method of these runs ran alone, too; see `polyfed compare --controls`")
    drawings = []
    for number, (group, ours) in enumerate(found, start=1):
        stem = f"decomposition-{number}" if len(found) > 1 else "decomposition"
        drawings.append(_draw(group, [one for one in ours if one.gain.mean is not None], stage, stem))
    return drawings


def write_decompositions(
    runs: Sequence[RunRecord], table: Table, folder: str | Path, stage: str | None = None
) -> list[Path]:
    """Write ``decomposition.png`` and ``.svg`` into the folder; nothing where no method of the table ran alone, too.

    Args:
        runs, stage: as for `decompositions`. table: their `comparison`, in the same stage.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    if not any(one.gain.mean is not None for section in table.sections for one in section.decompositions):
        return []
    drawings = decompositions(runs, stage)
    place = make_folder(folder)
    return [file for drawing in drawings for file in save(drawing.figure, place, drawing.stem)]


def _draw(group: Group, found: Sequence[Decomposition], stage: str | None, stem: str) -> FigureWithData:
    from matplotlib.patches import Patch

    about = f"{group.about}, {group.seeds_text()}. {group.scoring(stage).capitalize()}, after the last round."
    if any(one.federated.margin is not None for one in found):
        about += " Whiskers: 95 % intervals, paired by seed."
    if any((part.mean or 0.0) < 0 for one in found for part in (one.alone, one.federated)):
        about += " White: a loss."
    score = group.score
    figure, ((axes,),) = canvas("What federation is worth", about, 0.75 + _ROW * len(found))
    style_axes(axes, "x")
    handles: dict[str, Any] = {part: Patch(**look) for part, look in _PARTS.items()}
    for place, one in enumerate(found):
        base = one.local or 0.0
        between = score.improved(base, one.alone.mean or 0.0)
        bars = (("gain alone", base, one.alone, -0.5), ("federated gain", between, one.federated, 0.5))
        for part, begin, difference, side in bars:
            height = place + side * _THICK
            left, end = (score.shown(value) for value in (begin, score.improved(begin, difference.mean or 0.0)))
            look = _PARTS[part] | ({"facecolor": "white"} if (difference.mean or 0.0) < 0 else {})
            axes.barh(height, end - left, height=_THICK, left=left, **look)
            if difference.margin is not None:
                reach = score.shown(difference.margin)
                axes.errorbar(end, height, xerr=reach, color="black", capsize=3, linewidth=1.1)
    for name, values in (("Local", [one.local for one in found]), ("pooled", [one.pooled for one in found])):
        line = _line(axes, name, [None if value is None else score.shown(value) for value in values])
        if line is not None:
            handles[name] = line
    axes.set_yticks(range(len(found)), ["\n".join(textwrap.wrap(one.name, 30)) for one in found], parse_math=False)
    axes.set_ylim(len(found) - 0.4, -0.6)
    low, high = axes.get_xlim()  # no accuracy lies outside of 0..100: whiskers are cut there, as intervals in tables
    axes.set_xlim(max(0.0, low), min(100.0, high) if score.is_share else high)
    axes.set_xlabel(score.axis)
    legend(axes, list(handles.values()), list(handles))
    data = {"about": about, "decompositions": [asdict(one) for one in found]}
    return FigureWithData(stem, figure, data, [_row(one) for one in found])


def _line(axes: Any, name: str, values: Sequence[float | None]) -> Any:
    """A line across at the mean of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    style = (0, (1.5, 2)) if name == "Local" else "solid"
    return axes.axvline(sum(known) / len(known), color="black", linestyle=style, linewidth=1.6, gid=name)


def _row(one: Decomposition) -> dict[str, Any]:
    """A line of the figure's data."""
    cells: dict[str, Any] = {"name": one.name, "local": one.local, "pooled": one.pooled, "way": one.way}
    for part in ("gain", "alone", "federated"):
        difference = getattr(one, part)
        cells |= {part: difference.mean, f"{part}_std": difference.std, f"{part}_margin": difference.margin}
    return cells
