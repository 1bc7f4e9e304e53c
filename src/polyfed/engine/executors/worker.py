"""A worker: a process forked from the run's own, which carries out one job after the other.

It has data, networks and the method by being forked, and shares the store of the clients' weights, of which it is told
where to read and where to write. Whatever else changes in a run travels with each job, in shared memory, and so does
what comes of it. So a worker keeps nothing, and another one can take its place at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from polyfed import profiling
from polyfed.engine.executors.base import WorkerContext
from polyfed.engine.executors.job_requests import (
    WorkerDied,
    WorkerLoop,
    WorkerUnavailable,
    check_reply,
    read_answer,
    request_facts,
    request_row,
    request_tensors,
)
from polyfed.engine.executors.jobs import Job, TrainJob
from polyfed.engine.executors.shared_buffer import SharedBuffer
from polyfed.engine.weight_store import WeightRow
from polyfed.signals import TERMINATION_SIGNALS

_RUNS_BUSINESS = (signal.SIGINT, *TERMINATION_SIGNALS)  # upon which it ends its workers
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4  # of mallopt
_GRACE = 1.0  # seconds from the end of a worker's line to the end of the process
_TAKE_ME_FIRST = "500"  # of -1000 to 1000: where memory runs out, a worker goes before the run


class ForkedWorker:
    """See `Worker`; it answers when its line can be read.

    Args:
        context: what it works on. others: the other workers, whose lines it must not hold open.

    Raises:
        Unable: no process can be forked.
    """

    def __init__(self, context: WorkerContext, others: Sequence[ForkedWorker] = ()) -> None:
        self._inbox = SharedBuffer()
        self._outbox = SharedBuffer()
        self._store = context.store
        self._store.open()
        self._asked: Job | None = None
        self._fresh: WeightRow | None = None  # for the weights that come of a job
        self.line, theirs = Pipe()
        run = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or closed
                stream.flush()  # or the worker has it to flush, too
        with _no_interruption():
            try:
                with warnings.catch_warnings():  # of threads, which hold nothing that a worker waits for
                    warnings.simplefilter("ignore", DeprecationWarning)
                    self.process = os.fork()
            except OSError as error:
                raise WorkerUnavailable(f"no process can be started: {error.strerror}") from None
            if self.process == 0:
                _live(
                    run,
                    theirs,
                    [self.line, *(other.line for other in others)],
                    context,
                    self._inbox,
                    self._outbox,
                )
        theirs.close()

    def wait_ready(self) -> None:
        """See `Worker`."""
        try:
            if trouble := json.loads(self.line.recv_bytes())["trouble"]:
                raise WorkerUnavailable(str(trouble))
        except (EOFError, OSError):
            raise WorkerUnavailable(f"it {self._how()}") from None

    @profiling.timed("messages")
    def send(self, asked: Job, evaluation: int = 0) -> None:
        """See `Worker`."""
        self._asked = asked
        self._fresh = (
            self._store.allocate(asked.client.architecture, asked.variant) if isinstance(asked, TrainJob) else None
        )
        described = self._inbox.write(request_tensors(asked))
        rows = {"own": _place(request_row(asked)), "fresh": _place(self._fresh)}
        request = {**request_facts(asked, evaluation), "tensors": described, **rows}
        with contextlib.suppress(OSError):  # it is no more, as `receive` will say
            self.line.send_bytes(json.dumps(request).encode())

    @profiling.timed("messages")
    def receive(self) -> tuple[Any, float]:
        """See `Worker`."""
        try:
            reply = json.loads(self.line.recv_bytes())
        except (EOFError, OSError):
            raise WorkerDied(self._how()) from None
        check_reply(reply)
        assert self._asked is not None
        found = read_answer(self._asked, reply, self._outbox.read(reply["tensors"]), self._fresh)
        self._asked = self._fresh = None
        return found, reply["seconds"]

    def is_alive(self) -> bool:
        """See `Worker`."""
        try:
            return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # somebody else has looked after it
            return False

    def terminate(self) -> None:
        """See `Worker`."""
        self.line.close()
        self._inbox.close()
        self._outbox.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)

    def _how(self) -> str:
        """How it ended, of which its line has told."""
        late = time.monotonic() + _GRACE
        while self.is_alive() and time.monotonic() < late:
            time.sleep(0.001)
        with contextlib.suppress(ChildProcessError):
            if found := os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_code == os.CLD_EXITED:
                    return f"ended with status {found.si_status}"
                memory = ", as when memory runs out" if found.si_status == signal.SIGKILL else ""
                return f"was killed by {signal.Signals(found.si_status).name}{memory}"
        return "closed its line"


@contextlib.contextmanager
def _no_interruption() -> Iterator[None]:
    """Ctrl-C and the like wait until the block is over, so that no process is made that nobody knows of."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _RUNS_BUSINESS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _place(row: WeightRow | None) -> list[Any] | None:
    """Where a client's row lies."""
    return None if row is None else [row.variant, row.begin]


# the worker's side ------------------------------------------------------------------------------------------------


def _live(
    run: int,
    line: Connection,
    closed: Sequence[Connection],
    context: WorkerContext,
    inbox: SharedBuffer,
    outbox: SharedBuffer,
) -> None:
    """The life of a worker; it never returns to what its parent was doing."""
    try:
        for number in _RUNS_BUSINESS:  # a terminal and a service's manager tell all processes
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _RUNS_BUSINESS)
        _settle(run)
        for each in closed:
            each.close()  # or nobody would notice that the run has ended
        line.send_bytes(json.dumps({"trouble": find_trouble()}).encode())
        loop = WorkerLoop(context, inbox, outbox)
        while True:
            line.send_bytes(json.dumps(loop.reply(json.loads(line.recv_bytes()))).encode())
    except (EOFError, OSError):  # the run has ended
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    finally:
        os._exit(0)


def _settle(run: int) -> None:
    """What a worker sets for itself: it ends with the run, goes first where memory runs out, has its own streams."""
    library = ctypes.CDLL(None)
    library.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != run:  # it ended before
        os._exit(0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(_TAKE_ME_FIRST)
    tune_process()
    gc.freeze()  # what was there before is not looked through again, which would copy its memory
    with contextlib.suppress(OSError):  # streams of its own, as another thread may have held those of the run
        sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115


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
