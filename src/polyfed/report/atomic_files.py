"""Writes a report's files whole or not at all."""

from __future__ import annotations

from pathlib import Path

from polyfed.errors import ConfigError
from polyfed.records.read import atomic_write


def make_folder(folder: str | Path) -> Path:
    """The folder, made if it is missing.

    Raises:
        ConfigError: something else stands there, or it cannot be made.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror or error}") from error
    return path


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file so that a reader sees the old one or the new one, never half of one.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    try:
        atomic_write(path, content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    return path
