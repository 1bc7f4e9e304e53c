"""The figure of a benchmark: every method's gain over Local and its federated gain, a cell for each setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.report.decomposition import GainParts
from polyfed.report.plot_style import WIDTH, FigureWithData, add_colorbar, canvas, inches
from polyfed.report.statistics import Paired, is_distinguishable

__all__ = ["gains_figure"]

PARTS = {"gain": "gain over Local", "federated": "federated gain"}  # attribute of `GainParts` -> panel
_COLORS = "RdBu"  # red: a loss
_MOST = 10.0  # percentage points from which on the color is full
_DARK = 6.5  # percentage points from which on text is white
_SIZE = 8  # points
_ROW = 0.25  # inches
_COLUMN = 0.5  # inches


def gains_figure(
    by_setting: Mapping[str, Mapping[str, GainParts]], methods: Sequence[str], stem: str = "gains"
) -> FigureWithData | None:
    """A map with a row for each method and a column for each setting, once per panel.

    Args:
        by_setting: setting -> method -> its gains in accuracy. methods: the rows, from the top; those without a gain
            anywhere are left out.

    Returns:
        The figure with its data; None where there are no gains.
    """
    names = [method for method in methods if any(method in gains for gains in by_setting.values())]
    if not names:
        return None
    rows = [
        _row(setting, method, part, getattr(gains[method], part))
        for setting, gains in by_setting.items()
        for method in names
        if method in gains
        for part in PARTS
    ]
    return FigureWithData(stem, _draw(by_setting, names), {"gains": rows}, rows)


def _row(setting: str, method: str, part: str, gain: Paired) -> dict[str, Any]:
    return {"setting": setting, "method": method, "part": part, "mean": gain.mean, "margin": gain.margin}


def _draw(by_setting: Mapping[str, Mapping[str, GainParts]], methods: Sequence[str]) -> Any:
    about = (
        "Percentage points, paired by seed: together minus Local, and together minus alone (every client a federation "
        "of its own). Bold: the 95 % interval excludes zero."
    )
    width = 1.6 + inches(methods, _SIZE) + len(PARTS) * len(by_setting) * _COLUMN
    below = 0.5 + 0.71 * inches(by_setting, _SIZE)
    height = _ROW * len(methods) + below
    figure, (panels,) = canvas("Gains by setting", about, height, columns=2, width=max(WIDTH, width), sharey=True)
    for axes, (part, title) in zip(panels, PARTS.items(), strict=True):
        cells = [
            [getattr(gains[method], part) if method in gains else None for gains in by_setting.values()]
            for method in methods
        ]
        shown = _map(axes, cells)
        axes.set_title(title, size=_SIZE + 1)
        axes.set_xticks(range(len(by_setting)), list(by_setting), size=_SIZE, rotation=45, ha="right")
        axes.set_yticks(range(len(methods)), methods, size=_SIZE)
        for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
            label.set_parse_math(False)
    add_colorbar(figure, shown, panels, "percentage points")
    return figure


def _map(axes: Any, cells: Sequence[Sequence[Paired | None]]) -> Any:
    """The cells as colors, with their figures; a cell without one stays white."""
    nan = float("nan")
    points = [[nan if one is None or one.mean is None else 100 * one.mean for one in row] for row in cells]
    shown = axes.imshow(points, cmap=_COLORS, vmin=-_MOST, vmax=_MOST, aspect="auto", interpolation="nearest")
    for y, row in enumerate(cells):
        for x, gain in enumerate(row):
            if gain is None or gain.mean is None:
                continue
            color = "white" if abs(points[y][x]) > _DARK else "black"
            weight = "bold" if is_distinguishable(gain) else "normal"
            said = f"{points[y][x]:+.1f}"
            axes.text(x, y, said, ha="center", va="center", size=_SIZE, color=color, weight=weight)
    return shown
