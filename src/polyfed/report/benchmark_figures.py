"""The figure of a benchmark: gains of every method in every setting."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from polyfed.report.findings import Gains
from polyfed.report.plot_style import (
    GRAY,
    WIDTH,
    FigureWithData,
    add_colorbar,
    canvas,
    inches,
)
from polyfed.report.statistics import Estimate

_PARTS = {"gain": "gain over Local", "federated": "federated gain"}  # attribute of `Gains` -> panel of the figure
_MOST = 10.0  # percentage points from which on the figure's color is full
_DARK = 6.5  # percentage points from which on its text is white
_PALE = 0.25  # opacity of a cell that is no gain by the others
_SIZE = 8  # points of it
_ROW, _COLUMN = 0.25, 0.5  # inches of a cell


def gains_figure(by_setting: Mapping[str, Mapping[str, Gains]], methods: Sequence[str]) -> FigureWithData | None:
    """Every method's gain over Local and its federated gain: a map each, with a row per method, a column per setting.

    Args:
        by_setting: setting -> method -> its gains in accuracy. methods: the rows, from the top; those without a gain
            anywhere are left out.

    Returns:
        The figure with its data; None where there are no gains.
    """
    import pandas as pd

    names = [method for method in methods if any(method in gains for gains in by_setting.values())]
    if not names:
        return None
    about = (
        "Percentage points, paired by seed: together minus Local, and together minus alone (every client a federation "
        "of its own). Bold: the 95 % interval excludes zero. Pale: of a method below Local, so no gain by the others."
    )
    width = 1.6 + inches(names, _SIZE) + len(_PARTS) * len(by_setting) * _COLUMN
    height = _ROW * len(names) + 0.5 + 0.71 * inches(by_setting, _SIZE)
    figure, (panels,) = canvas("Gains by setting", about, height, columns=2, width=max(WIDTH, width), sharey=True)
    rows = []
    for axes, (part, title) in zip(panels, _PARTS.items(), strict=True):
        cells = {
            (x, y): getattr(gains[method], part)
            for x, gains in enumerate(by_setting.values())
            for y, method in enumerate(names)
            if method in gains
        }
        pale = {
            (x, y)
            for x, gains in enumerate(by_setting.values())
            for y, method in enumerate(names)
            if part == "federated" and method in gains and gains[method].rises_below_local
        }
        shown = _map(axes, cells, pale, len(by_setting), len(names))
        axes.set_title(title, size=_SIZE + 1)
        axes.set_xticks(range(len(by_setting)), list(by_setting), size=_SIZE, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), names, size=_SIZE)
        for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
            label.set_parse_math(False)
        settings = list(by_setting)
        rows += [
            {"setting": settings[x], "method": names[y], "part": part, "mean": gain.mean, "margin": gain.margin}
            for (x, y), gain in cells.items()
        ]
    add_colorbar(figure, shown, panels, "percentage points")
    return FigureWithData("gains", figure, about, pd.DataFrame(rows, dtype=object))


def _map(
    axes: Any, cells: Mapping[tuple[int, int], Estimate], pale: Container[tuple[int, int]], columns: int, rows: int
) -> Any:
    """The cells as colors (red: a loss), with their figures; a cell without one stays white."""
    import numpy as np

    points = np.full((rows, columns), math.nan)
    opacity = np.ones((rows, columns))
    for (x, y), gain in cells.items():
        if gain.mean is None:
            continue
        points[y, x] = 100 * gain.mean
        color = "white" if abs(points[y, x]) > _DARK else "black"
        weight = "bold" if gain.is_distinguishable else "normal"
        if (x, y) in pale:
            color = GRAY
            weight = "normal"
            opacity[y, x] = _PALE
        axes.text(x, y, f"{points[y, x]:+.1f}", ha="center", va="center", size=_SIZE, color=color, weight=weight)
    return axes.imshow(
        points, alpha=opacity, cmap="RdBu", vmin=-_MOST, vmax=_MOST, aspect="auto", interpolation="nearest"
    )
