"""The command that writes a project to begin with."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.output import print_files, print_text
from polyfed.errors import ConfigError

_TEMPLATES = resources.files("polyfed.cli") / "project_template"


def new(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Created if missing; must be empty.")]) -> None:
    """Write a recipe, two networks, a method and its test, to begin with.

    \b
    polyfed new first
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"expected a new or empty folder, got {folder}, which has files")
        for template in sorted(_TEMPLATES.iterdir(), key=lambda one: one.name):
            file = folder / template.name.removesuffix(".template")
            file.write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
            written.append(file)
    except OSError as error:
        raise ConfigError(f"expected a place for {folder}, got {error.strerror}") from None
    print_files(written)
    print_text(f"next: {folder / 'README.md'}")
