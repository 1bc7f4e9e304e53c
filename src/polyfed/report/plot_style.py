"""How every figure looks: title and caption above, legend below, one width, one set of lines and shades.

Figures are `WIDTH` inches wide with text of 8 points and more, which still reads in a column of 3.4 inches; tables and
maps of many cells are wider. Nothing is shown by color alone: lines differ in marker and dash. Figures are objects of
their own; pyplot and the user's matplotlib settings are not touched.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.escaping import visible
from polyfed.records.read import make_folder, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 5.6  # inches
HEIGHT = 3.1  # inches, of axes and their labels
GRAY = "#444444"
_LOCAL_LINE: dict[str, Any] = {"color": "black", "marker": "x", "linestyle": (0, (1.5, 2)), "linewidth": 1.6}
# the first seven are Okabe and Ito's, safe for the color-blind; the others lie as far from these, from each other, from
# white and from black as colors can
_COLORS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B4C9A", "#555500", "#880022", "#AACC33",
    "#005555", "#FFAA99", "#776666", "#FF0044", "#9988FF", "#999988", "#663300", "#BB1177", "#CC00FF", "#00CCCC",
)  # fmt: skip
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1.5)))
_BANDS = 6  # lines whose bands can be told apart
_TITLE = 11  # points
_TEXT = 9  # points
_CAPTION = 8.5  # points
_LINE = 1.3  # a line's height over its size
_WIDE = {"normal": 0.53, "bold": 0.62}  # a letter's width over its size
_DPI = 200
SHEET: dict[str, Any] = {"dpi": _DPI, "facecolor": "white", "bbox_inches": "tight", "pad_inches": 0.06}  # when saved
_KEY = 0.6  # inches of a legend's entry before its name
_LETTER = 0.078  # inches of a letter in a legend
_ACROSS = 60  # letters of a legend's name in a line, at most


def save(figure: Figure, folder: str | Path, stem: str) -> list[Path]:
    """Write ``<stem>.png`` and ``<stem>.svg`` into the folder (made if missing), each whole or not at all; equal
    figures, equal files.
    """
    import matplotlib

    place = make_folder(folder)
    written = []
    for form in ("png", "svg"):
        stream = io.BytesIO()
        metadata = {"Date": None} if form == "svg" else None
        with matplotlib.rc_context({"svg.hashsalt": stem}):  # else ids are random
            figure.savefig(stream, format=form, metadata=metadata, **SHEET)
        content = stream.getvalue()
        if form == "svg":  # control characters of a name are no XML
            content = visible(content.decode("utf-8")).encode("utf-8")
        written.append(write_whole(place / f"{stem}.{form}", content))
    return written


# lines ------------------------------------------------------------------------------------------------------------


def line_style(number: int) -> dict[str, Any]:
    """How a line looks: Local's for -1; from 0 on 180 others (20 colors, 9 markers, 5 dashes), again and again."""
    if number < 0:
        return dict(_LOCAL_LINE)
    looks = {"color": _COLORS, "marker": _MARKERS, "linestyle": _DASHES}
    return {key: those[number % len(those)] for key, those in looks.items()} | {"linewidth": 1.8}


def has_bands(lines: int, seeds: int) -> bool:
    """Whether a figure of so many lines shows them with bands from the lowest to the highest seed."""
    return seeds > 1 and lines <= _BANDS


# the sheet --------------------------------------------------------------------------------------------------------


def empty_figure(title: str, about: str) -> tuple[Figure, Any]:
    """A figure and its empty axes, under a title and a sentence that says what is shown."""
    figure, ((axes,),) = canvas(title, about, HEIGHT)
    style_axes(axes)
    return figure, axes


def canvas(
    title: str, about: str, height: float, rows: int = 1, columns: int = 1, width: float = WIDTH
) -> tuple[Figure, list[list[Any]]]:
    """A figure with a grid of axes under a title and a caption, which are wrapped to its width.

    Args:
        title, about: what is over it. height, width: inches of the grid; title, caption and legend stand around it, and
            are in the file, which is cut to what is drawn.
        rows, columns: of the grid.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    used = 0.04 / height
    words = (about, _CAPTION, "normal", GRAY), (title, _TITLE, "bold", "black")
    for text, size, weight, color in words:  # from the axes upwards
        lines = textwrap.wrap(text, int(width / (size * _WIDE[weight] / 72)), break_on_hyphens=False)
        look: dict[str, Any] = {"size": size, "weight": weight, "color": color, "linespacing": _LINE - 0.15}
        figure.text(0, 1 + used, "\n".join(lines), va="bottom", parse_math=False, **look)
        used += len(lines) * size * _LINE / 72 / height
    axes = figure.subplots(rows, columns, squeeze=False)
    for one in axes.flat:
        one.tick_params(labelsize=_TEXT)
        one.xaxis.label.set_size(_TEXT + 0.5)
        one.yaxis.label.set_size(_TEXT + 0.5)
    return figure, [list(row) for row in axes]


def style_axes(axes: Any, grid: str = "both") -> None:
    """A light grid behind the data, and no frame on top and right."""
    axes.grid(True, axis=grid, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def legend(axes: Any, handles: Sequence[Any], names: Iterable[str]) -> None:
    """What the lines or bars are called, below the axes, in as many columns as fit."""
    figure = axes.figure
    width = figure.get_figwidth()
    letters = min(_ACROSS, int((width - _KEY) / _LETTER))
    labels = ["\n".join(textwrap.wrap(name, letters)) for name in names]
    widest = max(len(line) for label in labels for line in label.split("\n"))
    columns = max(1, min(4, len(labels), int(width / (_KEY + _LETTER * widest))))
    look = {"frameon": False, "fontsize": _TEXT, "handlelength": 3.2, "columnspacing": 1.2, "borderaxespad": 0.2}
    place = {"loc": "upper left", "bbox_to_anchor": (0.0, 0)}
    for text in figure.legend(handles, labels, ncols=columns, **place, **look).get_texts():
        text.set_parse_math(False)
