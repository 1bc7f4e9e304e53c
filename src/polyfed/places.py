"""Names and values as users and recipes give them, which files can have and hold; folders that others cannot enter."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyfed.errors import ConfigError
from polyfed.escaping import without_passwords

LARGEST = 2**63  # from here on files, tensors and generators have no whole numbers
_ABSOLUTE = re.compile(r"""(?<![\w./~<-])/(?!/)[^\s'",\]]+""")
_MISSING = (FileNotFoundError, NotADirectoryError, PermissionError)  # the reader tells of these


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


def shown_place(path: str | os.PathLike[str]) -> str:
    """A place as shown in files that people pass on: below the present folder, or else its last two parts.

    >>> shown_place("/disk/ana/runs/fedgh/seed-0")
    'fedgh/seed-0'
    """
    whole = Path(os.path.abspath(path))
    here = Path.cwd()
    below = whole.relative_to(here) if here in whole.parents else Path(*whole.parts[1:][-2:])
    return below.as_posix()


def without_places(text: str) -> str:
    """A text in which each absolute path is what `shown_place` makes of it, and addresses are `without_passwords`.

    It is for commands, settings and names.

    >>> without_places("data.dataset=csv:/disk/ana/hospital/rows.csv")
    'data.dataset=csv:hospital/rows.csv'
    """
    return _ABSOLUTE.sub(lambda found: shown_place(found[0]), without_passwords(text))


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


# what other users of the machine get: nothing ------------------------------------------------------------------------


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Whatever this process and those that it starts make within the block is for its user alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def make_private(place: Path) -> None:
    """A folder into which only its user can look: it is made, or closed to others if it is there.

    Raises:
        ConfigError: it cannot be made, is somebody else's, or others could put files there.
    """
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = place.stat()
        if not hasattr(os, "geteuid"):  # Windows, where a user's folders are closed to others
            return
        if found.st_uid != os.geteuid():
            raise ConfigError(f"expected a folder of this user's own, got {place}, which belongs to another")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and any(place.iterdir()):
            raise ConfigError(
                f"expected a folder into which only its user can write, got {place}; look at what is in it, then: "
                f"chmod go-rwx {place}"
            )
        if found.st_mode & 0o077:
            place.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"expected a place for {place}, got {error.strerror}") from None
