"""Writes a report's files whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from polyfed.errors import ConfigError


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
    """Write beside the target, then rename: a reader sees the old file or the new one, never half of one.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's 0600 is for secrets, a table is to be shared
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    return path
