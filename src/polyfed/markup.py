"""Tables and small curves as HTML, for notebooks: values in, text out.

Every text is escaped. What comes out needs no script, no style sheet and no package, so that it shows in Jupyter, in
VS Code and in a notebook that was saved; frames and words have the color of the text around them, light or dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from polyfed.escaping import html_text
from polyfed.palette import COLORS

_WIDTH, _HEIGHT = 520, 220  # pixels of a figure
_LEFT = 40
_RIGHT = 10
_TOP = 10
_BOTTOM = 36  # of it, around the curves
_DASHES = ("", "7 3", "2 2", "7 3 2 3")
Row = TypeVar("Row")


# words and tables -------------------------------------------------------------------------------------------------


def paragraph(text: str, strong: bool = False) -> str:
    """One paragraph; strong: in bold."""
    inner = f"<b>{html_text(text)}</b>" if strong else html_text(text)
    return f'<p style="margin:.4em 0;max-width:60em">{inner}</p>'


def notes(texts: Iterable[str]) -> str:
    """A list; nothing where there is no text."""
    entries = "".join(f"<li>{html_text(text)}</li>" for text in texts)
    return f'<ul style="max-width:60em">{entries}</ul>' if entries else ""


def preformatted(text: str) -> str:
    """Text as it is, line by line, in a fixed width."""
    return f"<pre>{html_text(text)}</pre>"


def details(summary: str, inside: str) -> str:
    """What opens by a click. inside: markup."""
    return f"<details><summary>{html_text(summary)}</summary>{inside}</details>"


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    words: Iterable[int] = (0,),
    bold: Iterable[tuple[int, int]] = (),
) -> str:
    """A table. words: numbers of the columns that stand at the left; the others are numbers. bold: (row, column)."""
    at_left = set(words)
    strong = set(bold)

    def cell(tag: str, text: object, column: int, row: int = -1) -> str:
        side = "left" if column in at_left else "right"
        whole = ";white-space:nowrap" if column not in at_left and tag == "td" else ""
        weight = ";font-weight:bold" if (row, column) in strong else ""
        return f'<{tag} style="padding:.15em .5em;text-align:{side}{whole}{weight}">{html_text(str(text))}</{tag}>'

    head = "".join(cell("th", text, column) for column, text in enumerate(headings))
    lines = [
        "<tr>" + "".join(cell("td", text, column, number) for column, text in enumerate(row)) + "</tr>"
        for number, row in enumerate(rows)
    ]
    body = "".join(lines)
    return f'<div style="overflow-x:auto"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def cut(rows: Sequence[Row], between: Row, first: int, last: int) -> list[Row]:
    """All rows if they are few, else the first and the last so many with one between that stands for the others."""
    if len(rows) <= first + last + 1:
        return list(rows)
    return [*rows[:first], between, *rows[len(rows) - last :]]


# curves -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One curve: its name, and as many places as values."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def curves(lines: Sequence[Line], x_label: str, y_label: str) -> str:
    """A small figure with a legend below it; nothing where there is no point."""
    drawn = [line for line in lines if line.x]
    if not drawn:
        return ""
    left, right = (bound(value for line in drawn for value in line.x) for bound in (min, max))
    low, high = (bound(value for line in drawn for value in line.y) for bound in (min, max))
    wide = _WIDTH - _LEFT - _RIGHT
    tall = _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        """In pixels; the only place there is lies at the left and at the bottom."""
        across = (x - left) / ((right - left) or 1)
        return _LEFT + across * wide, _HEIGHT - _BOTTOM - (y - low) / ((high - low) or 1) * tall

    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        value = low + share * (high - low)
        _, y = place(left, value)
        parts.append(f'<path d="M{_LEFT},{y:.1f}H{_WIDTH - _RIGHT}" stroke="currentColor" stroke-opacity=".2"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{value:.3g}", "end"))
    for value in dict.fromkeys((left, round((left + right) / 2), right)):
        parts.append(_text(place(value, low)[0], _HEIGHT - _BOTTOM + 15, f"{value:g}", "middle"))
    parts.append(_text(_LEFT + wide / 2, _HEIGHT - 4, x_label, "middle"))
    for number, line in enumerate(drawn):
        points = [place(x, y) for x, y in zip(line.x, line.y, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        inner = f"<title>{html_text(line.name)}</title>"
        parts.append(f'<polyline points="{path}" {_look(number)} stroke-width="2" fill="none">{inner}</polyline>')
        if len(points) == 1:
            dot = f'cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3"'
            parts.append(f'<circle {dot} fill="{COLORS[number % len(COLORS)]}">{inner}</circle>')
    names = "; ".join(line.name for line in drawn)
    label = html_text(f"{y_label} by {x_label}: {names}")
    image = f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
    image += f' aria-label="{label}" style="max-width:100%;height:auto">{"".join(parts)}</svg>'
    legend = "".join(_entry(number, line.name) for number, line in enumerate(drawn))
    return f'<div style="margin:.6em 0"><div>{html_text(y_label)}</div>{image}<div>{legend}</div></div>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    font = 'font-size="11" font-family="sans-serif" fill="currentColor"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {font}>{html_text(text)}</text>'


def _look(number: int) -> str:
    dash = _DASHES[number % len(_DASHES)]
    return f'stroke="{COLORS[number % len(COLORS)]}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _entry(number: int, name: str) -> str:
    sample = f'<svg width="26" height="10"><path d="M0,5H26" {_look(number)} stroke-width="2"/></svg>'
    return f'<span style="margin-right:1.2em">{sample} {html_text(name)}</span>'
