"""Paths as they are named in recipes, in run folders and by users: such that the system can look for them."""

from __future__ import annotations

import os
from pathlib import Path

from polyfed.errors import RequestError

_MISSING = (FileNotFoundError, NotADirectoryError, PermissionError)  # which the reader tells


def check_name(path: str | os.PathLike[str]) -> None:
    """Whether there could be something at a path; whether there is does not matter.

    Raises:
        RequestError: its name is too long, or holds what no name can.
    """
    try:
        os.lstat(path)
    except _MISSING:
        return
    except OSError as error:
        raise RequestError(
            f"expected the name of a file or folder, came '{str(path)[:60]}': {error.strerror}"
        ) from None
    except ValueError:  # a zero byte, or half a character
        raise RequestError(f"expected the name of a file or folder, came {str(path)[:60]!r}, which is none") from None


def place_of(name: str | os.PathLike[str]) -> Path:
    """The path of this name; ``~`` is the user's own folder.

    Raises:
        RequestError: see `check_name`; or there is no such user.
    """
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise RequestError(f"expected a folder of a user that there is, came '{str(name)[:60]}'") from None
    check_name(path)
    return path
