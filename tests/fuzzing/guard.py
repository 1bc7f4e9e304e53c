"""What no input may bring about, whatever it holds: anything unpickled, started or connected to, or a file elsewhere.

Python's audit events tell of all of it. A hook cannot be removed, so one is added once and listens only while asked.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401  makes a folder when it is first imported, as it is with the first network on "meta"

from polyfed.errors import PolyfedError

FORBIDDEN = {"pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "os.fork"}
FORBIDDEN |= {"socket.connect", "socket.getaddrinfo", "socket.bind", "os.kill", "os.chown"}
CHANGES = {"os.chmod", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_allowed: list[str] = []  # folders in which files may change; empty: the hook does not listen
_seen: list[str] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _allowed:
        return
    if event in FORBIDDEN:
        _seen.append(f"{event}{arguments!r:.80}")
    elif event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING):
        _check(event, arguments[0])


def _check(event: str, path: Any) -> None:
    if not isinstance(path, str | bytes | os.PathLike) or not os.path.isabs(path):
        return  # an open file, or relative to one
    place = os.path.realpath(os.fsdecode(path))
    if place != os.devnull and not any((place + os.sep).startswith(folder) for folder in _allowed):
        _seen.append(f"{event}({place!r})")


sys.addaudithook(_hook)


@contextlib.contextmanager
def harmless_folder() -> Iterator[Path]:
    """A folder for an input, and for decoded copies. At the end of the block nothing forbidden may have happened.

    Within it, a `PolyfedError` of one line is a fine answer, and so is none.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("POLYFED_CACHE", os.path.join(folder, "cache"))
        _seen.clear()
        _allowed[:] = [os.path.realpath(folder) + os.sep]
        try:
            yield Path(folder)
        except PolyfedError as error:
            if len(str(error).splitlines()) != 1:
                raise AssertionError("expected an error of one line") from error
        finally:
            _allowed.clear()
        if _seen:
            raise AssertionError(f"expected nothing but a result or an error, got {_seen[0]}")
