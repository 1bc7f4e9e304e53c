"""Sentences have no intervals: tables and figures hold them, which are made of results."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "results" not in page.parts)]
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
INTERVAL = re.compile(r"\[[+-]?\d+\.\d+,\s+[+-]?\d+\.\d+\]")  # without a point, a range of values: "in [0, 1]"


def intervals_in_sentences(text: str) -> list[str]:
    """The intervals of a page outside its tables and code."""
    lines = CODE.sub("", text).splitlines()
    return INTERVAL.findall("\n".join(line for line in lines if not line.startswith("|")))


def test_sentences_have_no_intervals() -> None:
    found = [f"{page}: {each}" for page in PAGES for each in intervals_in_sentences(page.read_text(encoding="utf-8"))]
    assert not found, "\n".join(["link to the table that has it", *found])


def test_an_interval_in_a_sentence_is_found() -> None:
    text = "| +1.5 [0.5, 2.5] |\n`[0.5, 1.0]`\nIt gains 1.5 points [0.5,\n2.5] over Local, and lies in [0, 1].\n"
    assert intervals_in_sentences(text) == ["[0.5,\n2.5]"]
