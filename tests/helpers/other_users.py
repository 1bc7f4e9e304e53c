"""What other users of the machine get, tried as one of them: a fork of root that becomes nobody."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can become another user")


def as_nobody(act: Callable[[], Any]) -> Any:
    """What comes of it, as JSON has it, when that user does it, who is in no group of ours.

    Raises:
        RuntimeError: it failed; says why.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = {"found": act()}
        except BaseException as error:
            said = {"error": repr(error)}
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = json.loads(pipe.read())
    os.waitpid(child, 0)
    if "error" in said:
        raise RuntimeError(said["error"])
    return said["found"]


def open_to_nobody(*places: Path) -> list[str]:
    """What that user can read, write, list or move of these files and folders and all that lies in them."""

    def look() -> list[str]:
        paths = [path for place in places for path in (place, *(p for p in _within(place)))]
        return [str(path) for path in paths if os.access(path, os.R_OK) or os.access(path, os.W_OK)]

    found: list[str] = as_nobody(look)
    return found


def _within(place: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(place):
        for name in (*folders, *files):
            yield Path(folder) / name


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder as others make theirs: all may look into it and go through it, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "public").write_text("for all")
        assert open_to_nobody(folder) == [str(folder), str(folder / "public")], "nobody gets as far as this"
        yield folder
