"""Words and figures as HTML, for notebooks: values in, text out.

Every text is escaped. What comes out needs no script and no style sheet, so that it shows in Jupyter, in VS Code and in
a notebook that was saved.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

from polyfed.escaping import html_text

# words -------------------------------------------------------------------------------------------------


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


def image(file: Path) -> str:
    """The figure of a PNG file, within the text; its file's name stands for it where none is shown."""
    coded = base64.b64encode(file.read_bytes()).decode("ascii")
    name = html_text(file.stem.replace("-", " "))
    return f'<img alt="{name}" src="data:image/png;base64,{coded}" style="max-width:100%">'
