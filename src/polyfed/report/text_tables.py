"""Columns of numbers for people, as aligned text, Markdown and HTML; other elements of HTML for pages and notebooks.

All texts in HTML are escaped. It needs no script, and no style sheet but for tables.
"""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polyfed.escaping import html_text, markdown_text, visible
from polyfed.records.main_score import ACCURACY, MainScore
from polyfed.report.statistics import Estimate
from polyfed.units import human_bytes, human_seconds

NOT_KNOWN = "-"
_NAME = 16  # least width that a column of words is wrapped to


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

    @property
    def is_empty(self) -> bool:
        """Whether nothing in it is known."""
        return set(self.cells) <= {NOT_KNOWN}

    @property
    def title(self) -> str:
        """The heading in one line."""
        return self.heading.replace("\n", " ")


def columns_of(rows: Sequence[Mapping[str, str]], words: Collection[str]) -> list[Column]:
    """The columns of rows, each heading -> cell; `words` are the headings of those that are aligned left."""
    return [Column(heading, [row[heading] for row in rows], heading in words) for heading in rows[0]]


# cells ------------------------------------------------------------------------------------------------------------
def formatted(value: float | None, form: str) -> str:
    """A number by a format such as ``".3g"``."""
    return NOT_KNOWN if value is None else f"{value:{form}}"


def scored(value: float | None, score: MainScore, sign: str = "") -> str:
    """A main score as tables show it, signed with ``sign="+"``."""
    return NOT_KNOWN if value is None else score.text(value, sign)


def size(value: float | None) -> str:
    """Bytes."""
    return NOT_KNOWN if value is None else human_bytes(value)


def duration(value: float | None) -> str:
    """Seconds."""
    return NOT_KNOWN if value is None else human_seconds(value)


def format_mean_std(estimates: Sequence[Estimate], sign: str = "", score: MainScore = ACCURACY) -> list[str]:
    """``"75.12 ± 0.40"``; a spread that is not known stays away, and keeps its place where other rows have one."""
    spreads = [scored(one.std, score) for one in estimates]
    width = max(map(len, spreads))
    shown = any(one.std is not None for one in estimates)
    return [
        scored(one.mean, score, sign) + (f" ± {spread:>{width}}" if shown and one.mean is not None else "")
        for one, spread in zip(estimates, spreads, strict=True)
    ]


def interval(one: Estimate, score: MainScore = ACCURACY, sign: str = "+") -> str:
    """``"[+0.10, +2.30]"``, of a difference; with ``sign=""`` that of a score, cut to 0..100 %, of an RMSE to 0."""
    if one.mean is None or one.margin is None:
        return NOT_KNOWN
    low, high = one.mean - one.margin, one.mean + one.margin
    if not sign:
        low, high = max(0.0, low), min(1.0, high) if score.is_share else high
    return f"[{score.text(low, sign)}, {score.text(high, sign)}]"


# Markdown ---------------------------------------------------------------------------------------------------------
def markdown_table(columns: Sequence[Column]) -> str:
    """GitHub's table, without a line's end after the last row."""
    cells: list[list[str]] = []
    for column in columns:
        found = map(markdown_text, column.cells)
        cells.append([f"**{text}**" if row in column.bold else text for row, text in enumerate(found)])
    lines = [
        [markdown_text(column.heading) for column in columns],
        [":--" if column.words else "--:" for column in columns],
        *zip(*cells, strict=True),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# HTML -------------------------------------------------------------------------------------------------------------
def html_table(columns: Sequence[Column]) -> str:
    """A table for a page, whose style aligns the class "words"."""
    looks = [' class="words"' if column.words else "" for column in columns]
    heads = [f"<th{look}>{html_text(column.title)}</th>" for column, look in zip(columns, looks, strict=True)]
    rows = []
    for row in range(len(columns[0].cells)):
        cells = []
        for column, look in zip(columns, looks, strict=True):
            text = html_text(column.cells[row])
            cells.append(f"<td{look}>{f'<b>{text}</b>' if row in column.bold else text}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = f"<thead><tr>{''.join(heads)}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'


def html_list(texts: Iterable[str]) -> str:
    """A list; nothing where there is no text."""
    entries = "".join(f"<li>{html_text(text)}</li>" for text in texts)
    return f"<ul>{entries}</ul>" if entries else ""


def preformatted(text: str) -> str:
    """Text as it is, line by line, in a fixed width."""
    return f"<pre>{html_text(text)}</pre>"


def details(summary: str, inside: str) -> str:
    """What opens by a click. inside: HTML."""
    return f"<details><summary>{html_text(summary)}</summary>{inside}</details>"


def image(file: Path) -> str:
    """The figure of a PNG file, within the page; its file's name stands for it where none is shown."""
    coded = base64.b64encode(file.read_bytes()).decode("ascii")
    return f'<img alt="{html_text(file.stem.replace("-", " "))}" src="data:image/png;base64,{coded}">'


# aligned text -----------------------------------------------------------------------------------------------------
def wrapped(text: str, width: int) -> str:
    """A paragraph in lines of at most `width`; all but the first are indented."""
    return textwrap.fill(visible(text), width, subsequent_indent="  ", break_on_hyphens=False)


def render_text(columns: Sequence[Column], width: int) -> str:
    """Aligned lines; the widest words are wrapped, as tightly as is still readable, until the block fits `width`."""
    columns = [replace(column, cells=[visible(cell) for cell in column.cells]) for column in columns]
    widths = [column.width for column in columns]
    wrapped_ones = [at for at, column in enumerate(columns) if column.words]
    while sum(widths) + 2 * len(widths[1:]) > width and any(widths[at] > _NAME for at in wrapped_ones):
        widths[max(wrapped_ones, key=lambda at: widths[at])] -= 1

    def lines_of(texts: Sequence[Sequence[str]]) -> list[str]:
        """One row of the table, of which each cell has as many lines."""
        cells = [
            [f"{text:<{room}}" if column.words else f"{text:>{room}}" for text in lines]
            for lines, column, room in zip(texts, columns, widths, strict=True)
        ]
        return ["  ".join(line).rstrip() for line in zip(*cells, strict=True)]

    heads = [column.heading.split("\n") for column in columns]
    height = max(map(len, heads))
    found = lines_of([[""] * (height - len(head)) + head for head in heads])
    found.append("  ".join("-" * room for room in widths))
    for row in zip(*(column.cells for column in columns), strict=True):
        split = [
            textwrap.wrap(cell, room, subsequent_indent=" ") if column.words else [cell]
            for cell, column, room in zip(row, columns, widths, strict=True)
        ]
        height = max(map(len, split))
        found += lines_of([lines + [""] * (height - len(lines)) for lines in split])
    return "\n".join(found)


def text_blocks(columns: Sequence[Column], width: int, leading: int = 1) -> str:
    """A table cut into blocks that fit, one under the other.

    Args:
        leading: how many columns say what a row is; they stand in front of each block.
    """
    blocks: list[list[Column]] = []
    for column in columns[leading:]:
        others = [*blocks[-1], column] if blocks else []
        # with the names wrapped as tightly as is still readable, and two blanks between columns
        if not others or min(others[0].width, _NAME) + sum(one.width + 2 for one in others[1:]) > width:
            blocks.append(list(columns[:leading]))
        blocks[-1].append(column)
    return "\n\n".join(render_text(block, width) for block in blocks)


@dataclass(frozen=True)
class NotedTable:
    """Columns, and paragraphs below them, for a terminal and a page."""

    columns: tuple[Column, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return self.to_text()

    def to_text(self, width: int = 120) -> str:
        """For a terminal. width: its columns."""
        return "\n\n".join([text_blocks(self.columns, width), *(wrapped(note, width) for note in self.notes)])

    def to_markdown(self) -> str:
        """For a page."""
        return "\n\n".join([markdown_table(self.columns), *map(markdown_text, self.notes)])
