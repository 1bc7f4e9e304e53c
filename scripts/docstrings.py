"""What the site's reference needs of docstrings: examples and what is laid out by hand become blocks of code.

A setting's comment, on its line in the source, is its docstring.

An extension of griffe, which reads the sources for mkdocs.yml's mkdocstrings.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_BY_HAND = re.compile(r"\S {2,}\S")  # columns


def fenced(docstring: str) -> str:
    """The docstring with its doctests and its paragraphs in columns as blocks of code; sections stay as they are."""
    return "\n\n".join(map(_fenced, docstring.split("\n\n")))


def _fenced(paragraph: str) -> str:
    if paragraph.startswith(">>> "):
        return f"```pycon\n{paragraph.rstrip()}\n```"
    first = paragraph.partition("\n")[0]
    if _BY_HAND.search(paragraph) and not first.startswith(" ") and not re.fullmatch(r"\w+:", first):
        return f"```text\n{paragraph.rstrip()}\n```"
    return paragraph


class Blocks(griffe.Extension):
    """Called for everything that is read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring in place, or make one."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
        elif obj.is_attribute and "  # " in obj.source:
            obj.docstring = griffe.Docstring(obj.source.splitlines()[0].partition("  # ")[2], parent=obj)
