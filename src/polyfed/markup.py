"""Tables and figures as HTML, for notebooks: values in, text out.

Every text is escaped. What comes out needs no script and no style sheet, so that it shows in Jupyter, in VS Code and in
a notebook that was saved.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path

from polyfed.escaping import html_text

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


def image(file: Path) -> str:
    """The figure of a PNG file, within the text; its file's name stands for it where none is shown."""
    coded = base64.b64encode(file.read_bytes()).decode("ascii")
    name = html_text(file.stem.replace("-", " "))
    return f'<img alt="{name}" src="data:image/png;base64,{coded}" style="max-width:100%">'
