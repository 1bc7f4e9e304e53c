"""Tables and small curves as HTML, for notebooks: values in, text out.

Every text is escaped. What comes out needs no script and no style sheet, so that it shows in Jupyter, in VS Code and in
a notebook that was saved.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from polyfed.escaping import html_text, visible
from polyfed.palette import COLORS

_DASHES = ("-", "--", ":", "-.")
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


Curve = tuple[Sequence[float], Sequence[float]]  # as many places as values


def curves(lines: Mapping[str, Curve], x_label: str, y_label: str) -> str:
    """A small figure, as SVG, with a legend of the lines' names below it; nothing where there is no point."""
    import matplotlib
    from matplotlib.figure import Figure

    drawn = {visible(name): (x, y) for name, (x, y) in lines.items() if x}
    if not drawn:
        return ""
    figure = Figure(figsize=(5.6, 2.8), layout="constrained")
    axes = figure.subplots()
    axes.grid(True, color="#dddddd", linewidth=0.7)
    handles: list[Any] = []
    for number, (x, y) in enumerate(drawn.values()):
        color = COLORS[number % len(COLORS)]
        dash = _DASHES[number % len(_DASHES)]
        look: dict[str, Any] = {"marker": "o", "markersize": 3, "gid": f"curve-{number}"}
        handles += axes.plot(x, y, color=color, linestyle=dash, **look)
    axes.set_xlabel(x_label, parse_math=False)
    axes.set_ylabel(y_label, parse_math=False)
    below = figure.legend(handles, list(drawn), loc="outside lower left", frameon=False)
    for text in below.get_texts():
        text.set_parse_math(False)
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "polyfed"}):  # equal figures, equal text
        figure.savefig(stream, format="svg", metadata={"Date": None})
    drawing = stream.getvalue()
    return f'<div style="max-width:100%">{drawing[drawing.index("<svg") :]}</div>'  # HTML knows no <?xml ...?>


def image(file: Path) -> str:
    """The figure of a PNG file, within the text; its file's name stands for it where none is shown."""
    coded = base64.b64encode(file.read_bytes()).decode("ascii")
    name = html_text(file.stem.replace("-", " "))
    return f'<img alt="{name}" src="data:image/png;base64,{coded}" style="max-width:100%">'
