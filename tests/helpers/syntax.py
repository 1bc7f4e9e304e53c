"""Syntax trees of Python files, each read once."""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, from the outermost in."""
    was_on = gc.isenabled()
    gc.disable()  # it would look through the new nodes again and again
    try:
        return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    finally:
        if was_on:
            gc.enable()
