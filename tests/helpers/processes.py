"""Commands in a process of their own that has PyTorch already: a fork of this one, where a new Python takes seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """What a process left behind. status: as the shell has it, below 0 for a signal."""

    status: int
    stdout: str
    stderr: str


def forked(words: Sequence[str], folder: Path, encoding: str = "utf-8") -> Ended:
    """Run ``polyfed WORDS`` in a folder, as ``python -m polyfed`` would, with the modules that this process has.

    Args:
        words: of the command line. folder: where it works. encoding: of what it writes.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        child = os.fork()
        if child == 0:
            _run(words, folder, encoding, out.fileno(), error.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        written = []
        for file in (out, error):
            file.seek(0)
            written.append(file.read().decode(encoding))
    return Ended(status, *written)


def _run(words: Sequence[str], folder: Path, encoding: str, out: int, error: int) -> None:
    """The child's part; it does not come back."""
    status = 70
    try:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        for handle, number in ((out, 1), (error, 2)):
            os.dup2(handle, number)
        sys.stdout = open(1, "w", encoding=encoding, errors="strict", closefd=False)  # noqa: SIM115  ends with the process
        sys.stderr = open(2, "w", 1, encoding=encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
        from polyfed.cli.app import main

        main(list(words))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def started(words: Sequence[str], log: Path) -> int:
    """The number of a process of `polyfed WORDS`; what it prints goes to a file."""
    child = os.fork()
    if child:
        return child
    with contextlib.suppress(BaseException):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        from polyfed.cli.app import status

        os._exit(status(list(words)))
    os._exit(99)


def ended(process: int) -> int:
    """Wait for a process that `started` gave. Returns its status, below 0 for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def children(process: int) -> list[int]:
    """The processes that a process has started."""
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def alive(process: int) -> bool:
    """Whether a process runs: it is there and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def becomes_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, so long at most. Returns whether it does."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()
