"""Names and values as users and recipes give them: such that files can be called by them, and hold them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.errors import ConfigError

LARGEST = 2**63  # from here on files, tensors and generators have no whole numbers
_ABSOLUTE = re.compile(r"""(?<![\w./~-])/(?!/)[^\s'",\]]+""")
_MISSING = (FileNotFoundError, NotADirectoryError, PermissionError)  # which the reader tells


def check_name(path: str | os.PathLike[str]) -> None:
    """Whether there could be something at a path; whether there is does not matter.

    Raises:
        ConfigError: its name is too long, or holds what no name can.
    """
    try:
        os.lstat(path)
    except _MISSING:
        return
    except OSError as error:
        raise ConfigError(f"expected the name of a file or folder, got '{str(path)[:60]}': {error.strerror}") from None
    except ValueError:  # a zero byte, or half a character
        raise ConfigError(f"expected the name of a file or folder, got {str(path)[:60]!r}, which is none") from None


def place_of(name: str | os.PathLike[str]) -> Path:
    """The path of this name; ``~`` is the user's own folder.

    Raises:
        ConfigError: see `check_name`; or there is no such user.
    """
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise ConfigError(f"expected a folder of a user that there is, got '{str(name)[:60]}'") from None
    check_name(path)
    return path


def told_place(path: str | os.PathLike[str]) -> str:
    """A place as files that people pass on tell it: below the present folder, or else its last two parts.

    >>> told_place("/disk/ana/runs/fedgh/seed-0")
    'fedgh/seed-0'
    """
    whole = Path(os.path.abspath(path))
    here = Path.cwd()
    below = whole.relative_to(here) if here in whole.parents else Path(*whole.parts[1:][-2:])
    return below.as_posix()


def without_places(text: str) -> str:
    """A text in which each absolute path is what `told_place` makes of it; for commands, settings and names.

    >>> without_places("data.dataset=csv:/disk/ana/hospital/rows.csv")
    'data.dataset=csv:hospital/rows.csv'
    """
    return _ABSOLUTE.sub(lambda found: told_place(found[0]), text)


def check_values(value: Any, place: str = "") -> None:
    """Whether files, and those who read them, can hold all names, texts and whole numbers in settings.

    Raises:
        ConfigError: one holds half a character, or is a whole number from 2^63 on.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            check_values(key, place)
            check_values(inner, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            check_values(inner, place)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{place or 'sections'}: expected text, got half a character: '{value[:60]}'") from None
    elif isinstance(value, int) and abs(value) >= LARGEST:
        raise ConfigError(f"{place}: expected a whole number below 2^63, got one of {value.bit_length()} bits")
