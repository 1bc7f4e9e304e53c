"""The figure of a benchmark: gains of every method in every setting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyfed.report.findings import Gains
from polyfed.report.plot_style import (
    GRAY,
    WIDTH,
    FigureWithData,
    add_colorbar,
    canvas,
    inches,
)

if TYPE_CHECKING:
    import pandas as pd

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
    lines = [
        (setting, name, part, one.mean, one.margin, one.is_distinguishable, of_name[name].rises_below_local)
        for part in _PARTS
        for setting, of_name in by_setting.items()
        for name in names
        if name in of_name
        for one in [getattr(of_name[name], part)]
    ]
    columns = ["setting", "method", "part", "mean", "margin", "is_sure", "is_below"]
    rows = pd.DataFrame(lines, columns=columns, dtype=object)
    rows["is_below"] &= rows["part"] == "federated"
    for axes, (part, title) in zip(panels, _PARTS.items(), strict=True):
        shown = _map(axes, rows[rows["part"] == part], list(by_setting), names)
        axes.set_title(title, size=_SIZE + 1)
        axes.set_xticks(range(len(by_setting)), list(by_setting), size=_SIZE, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), names, size=_SIZE)
        for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
            label.set_parse_math(False)
    add_colorbar(figure, shown, panels, "percentage points")
    return FigureWithData("gains", figure, about, rows[columns[:5]])


def _map(axes: Any, rows: pd.DataFrame, settings: Sequence[str], names: Sequence[str]) -> Any:
    """The gains as colors (red: a loss), with their figures; a cell without one stays white."""
    import numpy as np

    points = np.full((len(names), len(settings)), math.nan)
    opacity = np.ones(points.shape)
    for one in rows.dropna(subset="mean").itertuples():
        x, y = settings.index(one.setting), names.index(one.method)
        points[y, x] = 100 * one.mean
        color = "white" if abs(points[y, x]) > _DARK else "black"
        weight = "bold" if one.is_sure else "normal"
        if one.is_below:
            color, weight = GRAY, "normal"
            opacity[y, x] = _PALE
        axes.text(x, y, f"{points[y, x]:+.1f}", ha="center", va="center", size=_SIZE, color=color, weight=weight)
    look = {"cmap": "RdBu", "vmin": -_MOST, "vmax": _MOST, "aspect": "auto", "interpolation": "nearest"}
    return axes.imshow(points, alpha=opacity, **look)
