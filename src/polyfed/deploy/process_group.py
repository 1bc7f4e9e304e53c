"""Programs that are started together and end together, whatever happens to them or to us.

A started program may start others, in sessions of their own. All of them inherit a mark in their environment, by which
those that outlive their parent are found and ended at the end (Linux). Each program writes into a log file of its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from polyfed.errors import RunError
from polyfed.signals import TERMINATION_SIGNALS, end_with_parent, raise_on_termination

__all__ = ["ProcessGroup", "free_ports", "raise_on_termination"]

_MARK = "POLYFED_STARTED_BY"
GRACE_SECONDS = 10.0  # seconds that a program has to end when it is asked to
_PAUSE = 0.1  # seconds between two looks


class ProcessGroup:
    """Programs that end with the block that holds them, last started first ended.

    Args:
        logs: folder of their log files, made if missing; what others have left there goes.
        environment: variables laid over ours.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self._mark = f"{_MARK}={os.getpid()}-{secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        self._environment = {**os.environ, **environment, name: value}
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> ProcessGroup:
        self._logs.mkdir(parents=True, exist_ok=True)
        for old in self._logs.glob("*.log"):
            old.unlink()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def log(self, name: str) -> Path:
        """Where a program's output goes."""
        return self._logs / f"{name}.log"

    def start(self, name: str, command: Sequence[str | Path], folder: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a program, in a session of its own: a Ctrl-C at the terminal is ours to handle, not its.

        Args:
            name: what it is called in messages and in `logs`; one of this name that has ended makes room.
            command: the program's file and its words; no shell reads them.
            folder: where it works; default: where we do.

        Raises:
            RunError: it cannot be started.
        """
        with self.log(name).open("ab") as log:
            try:
                process = subprocess.Popen(
                    [str(word) for word in command],
                    cwd=folder,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            except OSError as error:
                raise RunError(f"{name} cannot be started ({command[0]}): {error.strerror}") from None
        self._running[name] = process
        return process

    def is_running(self, name: str) -> bool:
        """Whether a program has not ended yet."""
        return self._running[name].poll() is None

    def wait_for_success(self, name: str, limit: float) -> None:
        """Wait for a program that has to end well.

        Raises:
            RunError: it failed, or took longer than `limit` seconds.
        """
        try:
            status = self._running[name].wait(limit)
        except subprocess.TimeoutExpired:
            raise RunError(f"{name} has not ended within {limit:g} s{self.log_tail(name)}") from None
        if status:
            raise RunError(f"{name} ended with status {status}{self.log_tail(name)}")

    def check_alive(self, names: Sequence[str]) -> None:
        """Whether these programs still run.

        Raises:
            RunError: one has ended; says with which last words.
        """
        for name in names:
            if (status := self._running[name].poll()) is not None:
                raise RunError(f"{name} has ended, with status {status}{self.log_tail(name)}")

    def wait_for_answer(self, name: str, port: int, limit: float) -> None:
        """Wait until a program takes connections on a port of this machine.

        Raises:
            RunError: it has ended, or does not within `limit` seconds.
        """
        deadline = time.monotonic() + limit
        while True:
            self.check_alive([name])
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            if time.monotonic() > deadline:
                raise RunError(f"{name} does not answer within {limit:g} s{self.log_tail(name)}")
            time.sleep(_PAUSE)

    def log_tail(self, name: str) -> str:
        """What a program said last, for the end of a message, and where the rest is."""
        try:
            lines = self.log(name).read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            lines = []
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {said} (all of it in {self.log(name)})" if said else f" (see {self.log(name)})"

    def stop(self, first: str | None = None) -> None:
        """End all of them, and what they have started; the last started ends first, or `first` does. Signals wait."""
        with _deaf():
            while self._running:
                last = first if first in self._running else next(reversed(self._running))
                kind = last.partition("-")[0]  # node-0, node-1: alike, so that they end at the same time
                alike = [self._running.pop(name) for name in [*self._running] if name.partition("-")[0] == kind]
                for process in alike:
                    _ask(process)
                deadline = time.monotonic() + GRACE_SECONDS
                for process in alike:
                    _make(process, deadline)
            for number in self.survivors():
                with contextlib.suppress(OSError):
                    os.kill(number, signal.SIGKILL)

    def survivors(self) -> list[int]:
        """The numbers of processes that bear our mark; none where the system does not tell."""
        left = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in place.read_bytes().split(b"\0"):
                    left.append(int(place.parent.name))
        return left


def _ask(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()


def _make(process: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
        process.wait()


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Within the block, signals that would stop us are ignored, where we may say so (the main thread)."""
    before = {}
    with contextlib.suppress(ValueError):
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *TERMINATION_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_ports(count: int) -> list[int]:
    """So many ports of this machine that nobody listens on at the moment."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
