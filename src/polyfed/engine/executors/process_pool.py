"""The clients' work shared by worker processes of this machine, forked from the run's own.

A worker with one computing thread for each core is faster than many threads on one client at a time, and much faster
beside busy neighbors.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Collection
from multiprocessing.connection import Connection, wait

import torch

from polyfed.engine.executors.executor import ExecutorSetup
from polyfed.engine.executors.worker_pool import Worker, WorkerDied, WorkerPool, WorkerUnavailable
from polyfed.engine.executors.worker_requests import RequestHandler
from polyfed.errors import ConfigError
from polyfed.signals import TERMINATION_SIGNALS

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4  # of mallopt
_GRACE = 1.0  # seconds from the end of a worker's line to the end of the process
_TAKE_ME_FIRST = "500"  # of -1000 to 1000: where memory runs out, a worker goes before the run


def problem_of_processes(device: str) -> str:
    """Why there can be no worker processes here, and what to take instead; "" where there can.

    device: type of the device where networks compute.
    """
    if sys.platform != "linux":
        return "expected the executor 'serial' with 1 worker, as worker processes need Linux"
    if device != "cpu":
        return f"expected the executor 'vectorized', as worker processes need device 'cpu', and this one is '{device}'"
    return ""


class ProcessPool(WorkerPool):
    """Processes forked from the run's own, on Linux. See `WorkerPool`."""

    def __init__(self, setup: ExecutorSetup) -> None:
        if problem := problem_of_processes(setup.device):
            raise ConfigError(problem)
        super().__init__(setup)

    def hire(self) -> Worker:
        return ForkedWorker(self.setup)

    def answered(self, busy: Collection[Worker]) -> list[Worker]:
        lines = {worker.line: worker for worker in busy if isinstance(worker, ForkedWorker)}
        return [lines[line] for line in wait(list(lines))]  # type: ignore[index]


class ForkedWorker(Worker):
    """A process forked from the run's own: it has data, networks and the method by that. See `Worker`.

    Attributes:
        line: can be read when it has answered, or is no more. process: it.
    """

    def __init__(self, setup: ExecutorSetup) -> None:
        self.line, theirs = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=_live, args=(os.getpid(), theirs, setup), daemon=True)
        try:
            with warnings.catch_warnings():  # of threads, which hold nothing that a worker waits for
                warnings.simplefilter("ignore", DeprecationWarning)
                self.process.start()
        except OSError as error:
            raise WorkerUnavailable(f"no process can be started: {error.strerror}") from None
        theirs.close()

    def wait_ready(self) -> None:
        try:
            trouble = self.line.recv_bytes()
        except (EOFError, OSError):
            raise WorkerUnavailable(f"it {self._how()}") from None
        if trouble:
            raise WorkerUnavailable(trouble.decode())

    def send(self, request: bytes) -> None:
        with contextlib.suppress(OSError):  # it is no more, as `receive` will say
            self.line.send_bytes(request)

    def receive(self) -> bytes:
        try:
            return self.line.recv_bytes()
        except (EOFError, OSError):
            raise WorkerDied(self._how()) from None

    def terminate(self) -> None:
        self.line.close()
        self.process.kill()
        self.process.join()

    def _how(self) -> str:
        """How it ended, after its line has."""
        self.process.join(_GRACE)
        status = self.process.exitcode
        if status is None:
            return "closed its line"
        if status >= 0:
            return f"ended with status {status}"
        memory = ", as when memory runs out" if -status == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-status).name}{memory}"


def _live(run: int, line: Connection, setup: ExecutorSetup) -> None:
    """The life of a worker: it ends with the run, and goes first where memory runs out."""
    for number in (signal.SIGINT, *TERMINATION_SIGNALS):  # which a terminal and a service's manager send to all
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != run:  # it ended before
        return
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(_TAKE_ME_FIRST)
    tune_process()
    gc.freeze()  # what was there before is not looked through again, which would copy its memory
    with contextlib.suppress(EOFError, OSError):  # the run has ended
        line.send_bytes((find_trouble() or "").encode())
        handler = RequestHandler(setup)
        while True:
            line.send_bytes(handler.reply(line.recv_bytes()))


def tune_process() -> None:
    """One computing thread, and memory that is freed is kept for what comes next."""
    torch.set_num_threads(1)
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):  # others have no such settings
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def find_trouble() -> str | None:
    """Why this process cannot compute, if it cannot."""
    try:
        x = torch.ones((), requires_grad=True)
        torch.autograd.grad(x * x, x)
    except RuntimeError as error:  # where there is a GPU, PyTorch refuses to after a gradient was taken by the parent
        return " ".join(str(error).split())
    return None
