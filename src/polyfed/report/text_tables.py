"""Columns of numbers for people: aligned text, Markdown, LaTeX; means and deviations of what may be unknown (None)."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polyfed.escaping import markdown_text, visible
from polyfed.results.main_score import ACCURACY, MainScore

_NAME = 16  # min_width column of names in plain text and LaTeX
_MINUS = re.compile(r"(?<!\w)-(?=\d)")


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None: a table shows "-", never "nan"."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def finite_ones(values: Iterable[Any]) -> list[float]:
    """Those of the values that are finite numbers."""
    found = map(finite, values)
    return [number for number in found if number is not None]


def mean_of(values: Sequence[Any]) -> float | None:
    """The mean, exact when all are equal (bytes stay whole numbers); None unless every value is known."""
    known = finite_ones(values)
    if not known or len(known) < len(values):
        return None
    return known[0] if all(value == known[0] for value in known) else statistics.fmean(known)


def sum_of(values: Sequence[Any]) -> float | None:
    """The sum; None unless every value is known."""
    known = finite_ones(values)
    return sum(known) if len(known) == len(values) else None


def std_of(values: Sequence[Any]) -> float | None:
    """The sample standard deviation; None for a single value, and unless every value is known."""
    known = finite_ones(values)
    return statistics.stdev(known) if len(known) == len(values) and len(known) > 1 else None


@dataclass(frozen=True)
class Column:
    """A column to show: its heading (lines), its cells; words are aligned left, numbers right.

    bold: the places of the cells to be emphasized, where a format can.
    """

    heading: str
    cells: list[str]
    words: bool = False
    bold: frozenset[int] = frozenset()

    @property
    def width(self) -> int:
        """Characters of its widest line."""
        return max(len(part) for text in [self.heading, *self.cells] for part in text.split("\n"))


def percent(value: float | None) -> str:
    """A share in per cent with two decimals; "-" where it is not known."""
    return "-" if value is None else f"{100 * value:.2f}"


def scored(value: float | None, score: MainScore, sign: str = "") -> str:
    """A main score as tables show it, signed with ``sign="+"``; "-" where it is not known."""
    return "-" if value is None else score.text(value, sign)


def format_mean_std(
    pairs: list[tuple[float | None, float | None]], sign: str = "", score: MainScore = ACCURACY
) -> list[str]:
    """``"75.12 ± 0.40"``; a spread that is not known stays away, and keeps its place where other rows have one."""
    spreads = [scored(std, score) for _, std in pairs]
    width = max(map(len, spreads))
    shown = any(std is not None for _, std in pairs)
    return [
        scored(mean, score, sign) + (f" ± {spread:>{width}}" if shown and mean is not None else "")
        for (mean, _), spread in zip(pairs, spreads, strict=True)
    ]


def interval(mean: float | None, margin: float | None, sign: str = "", score: MainScore = ACCURACY) -> str:
    """``"[+0.10, +2.30]"``, of an accuracy's difference in per cent; "-" where one is not known."""
    if mean is None or margin is None:
        return "-"
    return f"[{scored(mean - margin, score, sign)}, {scored(mean + margin, score, sign)}]"


def interval_of_score(mean: float | None, margin: float | None, score: MainScore = ACCURACY) -> str:
    """``"[70.10, 72.30]"``, an accuracy in per cent and cut to 0..100, an RMSE to 0; "-" where one is not known."""
    if mean is None or margin is None:
        return "-"
    high = mean + margin
    return f"[{scored(max(0.0, mean - margin), score)}, {scored(min(1.0, high) if score.is_share else high, score)}]"


def markdown_table(columns: Sequence[Column]) -> str:
    """GitHub's table, without a line's end after the last row."""
    lines = [
        _markdown_line(markdown_text(column.heading) for column in columns),
        _markdown_line(":--" if column.words else "--:" for column in columns),
        *map(_markdown_line, zip(*(_emphasized(column, "**{}**", markdown_text) for column in columns), strict=True)),
    ]
    return "\n".join(lines)


def _emphasized(column: Column, bold: str, escape: Callable[[str], str]) -> list[str]:
    return [bold.format(escape(cell)) if at in column.bold else escape(cell) for at, cell in enumerate(column.cells)]


def _markdown_line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "|": r"\textbar{}",
    "<": r"$<$",
    ">": r"$>$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def escape_latex(text: str) -> str:
    """Text of which no character means anything to LaTeX; blanks and line ends become one blank."""
    return "".join(_LATEX.get(character, character) for character in visible(" ".join(text.split())))


def latex_table(columns: Sequence[Column]) -> str:
    """A ``tabular`` with the rules of ``booktabs``, without a line's end after it; long names in front are wrapped."""
    rows = zip(*(_emphasized(column, "\\textbf{{{}}}", _latex_escape(column)) for column in columns), strict=True)
    names = f"p{{{_NAME / 2:g}em}}" if columns[0].width > _NAME else "l"
    sides = ["l" if column.words else "r" for column in columns[1:]]
    lines = [
        f"\\begin{{tabular}}{{{''.join([names, *sides])}}}",
        "\\toprule",
        " & ".join(map(_latex_heading, columns)) + " \\\\",
        "\\midrule",
        *(_row_start(" & ".join(cells)) + " \\\\" for cells in rows),
        "\\bottomrule",
        "\\end{tabular}",
    ]
    return "\n".join(lines)


def _latex_escape(column: Column) -> Callable[[str], str]:
    return escape_latex if column.words else lambda cell: _MINUS.sub("$-$", escape_latex(cell))


def _latex_heading(column: Column) -> str:
    """In as many lines as it has elsewhere."""
    lines = "\\\\".join(map(escape_latex, column.heading.split("\n")))
    if "\n" not in column.heading:
        return lines
    side = "l" if column.words else "r"
    return f"\\shortstack[{side}]{{{lines}}}"


def _row_start(row: str) -> str:
    """A row that starts with a bracket would be taken for an option of the line's end before it."""
    return f"{{}}{row}" if row.startswith("[") else row


def wrapped(text: str, width: int) -> str:
    """A paragraph in lines of at most `width`; all but the first are indented."""
    return textwrap.fill(visible(text), width, subsequent_indent="  ", break_on_hyphens=False)


def min_width(columns: Sequence[Column]) -> int:
    """The width with the names wrapped as tightly as is still readable, and two blanks between columns."""
    return min(columns[0].width, _NAME) + sum(column.width + 2 for column in columns[1:])


def wrap_columns(columns: Sequence[Column], width: int, leading: int = 1) -> list[list[Column]]:
    """A table cut into blocks that fit, each with the `leading` columns, which say what a row is, in front."""
    front = list(columns[:leading])
    blocks: list[list[Column]] = []
    for column in columns[leading:]:
        if not blocks or min_width([*blocks[-1], column]) > width:
            blocks.append([*front])
        blocks[-1].append(column)
    return blocks


def render_text(columns: Sequence[Column], width: int) -> str:
    """Aligned lines; the names, in front, wrapped where that makes the block fit `width`."""
    columns = [replace(column, cells=[visible(cell) for cell in column.cells]) for column in columns]
    widths = [column.width for column in columns]
    widths[0] = min(widths[0], max(_NAME, width - sum(other + 2 for other in widths[1:])))
    lines = [*_physical_lines([column.heading for column in columns], columns, widths, bottom=True)]
    lines.append("  ".join("-" * each for each in widths))
    for cells in zip(*(column.cells for column in columns), strict=True):
        lines += _physical_lines(cells, columns, widths)
    return "\n".join(lines)


def _physical_lines(
    cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int], bottom: bool = False
) -> list[str]:
    """One row as it is printed: the name wrapped over lines, the numbers on the first (headings: on the last)."""
    split = [
        textwrap.wrap(cell, width, subsequent_indent=" ") if column.words and not bottom else cell.split("\n")
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ]
    height = max(map(len, split))
    lines = []
    for index in range(height):
        parts = []
        for texts, column, width in zip(split, columns, widths, strict=True):
            at = index - (height - len(texts)) if bottom else index
            text = texts[at] if 0 <= at < len(texts) else ""
            parts.append(f"{text:<{width}}" if column.words else f"{text:>{width}}")
        lines.append("  ".join(parts).rstrip())
    return lines
