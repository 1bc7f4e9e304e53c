"""The clients' work shared by worker processes.

A worker with one computing thread for each core is faster than many threads on one client at a time, and much faster
beside busy neighbors. The longest jobs go first, so that nobody waits long for the last one. Results are put in
the order of the jobs, and no draw depends on who carries out what: the result is that of `Serial`, bit for bit.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import mmap
import os
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import freeze
from polyfed.core.method import TrainingResult
from polyfed.core.server import PublicPass
from polyfed.core.settings import Training
from polyfed.engine.executors.client_work import Serial, WorkerContext, run_public_pass, score_in_batches
from polyfed.engine.executors.jobs import EvalBatch, EvalJob, Job, JobResult, PassJob, Scores, TrainBatch, TrainJob
from polyfed.engine.executors.worker_requests import (
    Buffer,
    Tree,
    Worker,
    WorkerDied,
    WorkerLoop,
    WorkerUnavailable,
    pack,
)
from polyfed.errors import PolyfedError, RunError
from polyfed.profiling import section, timed
from polyfed.signals import TERMINATION_SIGNALS

_STEP, _SAMPLE = 3e-4, 4e-10  # seconds per training step; per sample and parameter. Rough: for convolutions too little
_RUNS_BUSINESS = (signal.SIGINT, *TERMINATION_SIGNALS)  # upon which it ends its workers
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4  # of mallopt
_GRACE = 1.0  # seconds from the end of a worker's line to the end of the process
_SPARE = 1.25  # how much larger memory is made than asked for, so that it is not enlarged again at once
_TAKE_ME_FIRST = "500"  # of -1000 to 1000: where memory runs out, a worker goes before the run

_GONE = "it counts as dropped out"
_THEN = {PassJob: "the run's own process does its work", TrainBatch: "each is trained alone"}  # who died of it twice

Say = Callable[[str], None]
Rebuild = Callable[[], Any]  # -> a federation, which this file need not know


def unavailable_reason(device: str) -> str | None:
    """Why there can be no worker processes here, or None. device: type of the device where networks compute."""
    if sys.platform != "linux":
        return "worker processes need Linux"
    return None if device == "cpu" else f"worker processes need device 'cpu', and this one is '{device}'"


def available_cores() -> int:
    """How many cores this process may use: those it is bound to, and its share of them where a container has one."""
    count = getattr(os, "process_cpu_count", lambda: len(os.sched_getaffinity(0)))()
    try:
        share, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        quota = math.inf if share == "max" else int(share) / int(period)
    except (OSError, ValueError):
        quota = math.inf
    return max(1, min(count or 1, math.ceil(quota) if math.isfinite(quota) else sys.maxsize))


class Estimates:
    """How long a client takes: guessed by its rows and its network's size until it has been measured."""

    def __init__(self, context: WorkerContext, training: Training) -> None:
        template = context.model_factory.module
        self.clients = context.clients
        names = {client.architecture for client in context.clients}
        self._sizes = {name: sum(p.numel() for p in template(name).parameters()) for name in names}
        self._training = training
        self._measured: dict[tuple[int, str], float] = {}

    def training(self, client: Client) -> float:
        """Seconds of one round's training, guessed."""
        rows = len(client.data.train)
        settings = self._training
        steps = -(-rows // settings.batch_size)
        return settings.local_epochs * (steps * _STEP + rows * self._sizes[client.architecture] * _SAMPLE)

    def run(self) -> float:
        """Seconds of the training of a whole run, guessed."""
        mean = sum(map(self.training, self.clients)) / len(self.clients)
        return self._training.rounds * self._training.cohort_size(len(self.clients)) * mean

    def seconds(self, asked: Job) -> float:
        """What it took last time, or the guess."""
        known = self._measured.get((asked.client.id, _work(asked)))
        clients = [job.client for job in asked.jobs] if isinstance(asked, TrainBatch) else [asked.client]
        return sum(map(self.training, clients)) if known is None else known

    def note(self, asked: Job, seconds: float) -> None:
        """It took so long."""
        self._measured[asked.client.id, _work(asked)] = seconds


def _work(asked: Job) -> str:
    """What takes a client the same time again."""
    if isinstance(asked, PassJob):
        return "pass"
    first = asked.jobs[0] if isinstance(asked, TrainBatch) else asked
    return "training" if isinstance(first, TrainJob) and first.exchange.trains else "other"


class ProcessPool:
    """Worker processes that stay for a run: made when they are first needed, ended by `close`. Here they are forked.

    A worker that dies is replaced. Its job is done again when the others are through, alone, as memory may have run
    out; if a worker dies of it again, the client counts as dropped out, or stays without a score.

    Args:
        context: what is worked on. workers: how many. estimates: how long things take. say: as above.
    """

    def __init__(self, context: WorkerContext, workers: int, estimates: Estimates, say: Say) -> None:
        self.workers = workers
        self._context = context
        self.estimates = estimates
        self._say = say
        self.running: list[Worker] = []
        self._evaluation = 0
        # where no worker can be had
        self._instead = Serial(context)
        self._unable = False

    @timed("idle")
    def run(self, jobs: Sequence[TrainJob], done: Callable[[int], None]) -> list[JobResult]:
        if not jobs:
            return []
        if not self._with_workers():
            return self._instead.run(jobs, done)
        found = self.train_all(jobs, done)
        if len(jobs) > 1 and not any(found):
            raise RunError(f"the worker of every client died, twice, in round {jobs[0].round}; try fewer workers")
        lost = [JobResult(job.client.id, freeze({}), None, {}, TrainingResult(), dropped=True) for job in jobs]
        return [one or instead for one, instead in zip(found, lost, strict=True)]

    def train_all(self, jobs: Sequence[TrainJob], done: Callable[[int], None]) -> list[JobResult | None]:
        """The results of all jobs; None where workers died of it, twice."""
        return self._run_all(jobs, done)

    @timed("idle")
    def score(self, asked: Sequence[EvalJob]) -> list[Scores]:
        if not asked:
            return []
        if not self._with_workers():
            return self._instead.score(asked)
        self._evaluation += 1

        def carry_out(batches: Sequence[EvalBatch]) -> list[list[Scores]]:
            found: list[list[Scores] | None] = self._run_all(batches, lambda _: None)
            return [one or [{} for _ in batch.jobs] for batch, one in zip(batches, found, strict=True)]

        return score_in_batches(asked, self._context, carry_out)

    def run_passes(self, passes: Sequence[PublicPass]) -> list[Tensor]:
        """See `Server.run_passes`; a single one is not worth sending, and what workers die of is done here."""
        found: list[Tensor | None] = [None] * len(passes)
        if len(passes) > 1 and self._with_workers():
            with section("idle"):
                found = self._run_all([PassJob(self._context.clients[p.client_id], p) for p in passes], lambda _: None)
        return [
            run_public_pass(asked, self._context) if one is None else one
            for asked, one in zip(passes, found, strict=True)
        ]

    def close(self) -> None:
        while self.running:
            self.running.pop().terminate()

    def hire(self) -> Worker:
        """Begin to make one more worker."""
        return ForkedWorker(self._context, [worker for worker in self.running if isinstance(worker, ForkedWorker)])

    def answered(self, busy: Collection[Worker]) -> list[Worker]:
        """Those whose answer is there, or who are no more; waits for the first."""
        lines = {worker.line: worker for worker in busy if isinstance(worker, ForkedWorker)}
        return [lines[line] for line in wait(list(lines))]  # type: ignore[index]

    def _with_workers(self) -> bool:
        """Whether there are workers; those that are missing are made."""
        if self._unable:
            return False
        for gone in [worker for worker in self.running if not worker.is_alive()]:
            self.running.remove(gone)
            gone.terminate()
        try:
            fresh = self.workers - len(self.running)
            for _ in range(fresh):
                self.running.append(self.hire())
            for worker in self.running[len(self.running) - fresh :]:
                worker.wait_ready()
        except WorkerUnavailable as reason:
            self.close()
            self._say(f"there can be no worker processes ({reason}); all is done by this one")
            self._unable = True
        return not self._unable

    def _replace(self, worker: Worker) -> None:
        self.running.remove(worker)
        worker.terminate()
        try:
            self.running.append(self.hire())
            self.running[-1].wait_ready()
        except WorkerUnavailable as reason:
            raise RunError(f"a worker died, and there can be no other: {reason}") from None

    def _run_all(self, asked: Sequence[Any], done: Callable[[int], None]) -> list[Any]:
        """All results; None where workers died of it, twice."""
        found: list[Any] = [None] * len(asked)
        through = 0

        def keep(place: int, result: Any) -> None:
            nonlocal through
            found[place] = result
            through += len(asked[place].jobs) if isinstance(asked[place], TrainBatch) else 1
            done(through)

        order = sorted(range(len(asked)), key=lambda place: -self.estimates.seconds(asked[place]))
        try:
            for place in self._assign_jobs(asked, order, keep):
                for again in self._assign_jobs(asked, [place], keep):
                    keep(again, None)
                    self._say(f"{_whose(asked[again])} died again; {_THEN.get(type(asked[again]), _GONE)}")
        except BaseException:
            self.close()  # whatever the others are at
            raise
        return found

    def _assign_jobs(self, asked: Sequence[Any], order: Sequence[int], keep: Callable[[int, Any], None]) -> list[int]:
        """Have what stands at these places done by all workers; the places of those whose worker died."""
        waiting = deque(order)
        busy = dict[Worker, int]()
        died = list[int]()
        failed: dict[int, PolyfedError] = {}
        while waiting or busy:
            for worker in [worker for worker in self.running if worker not in busy][: len(waiting)]:
                busy[worker] = waiting.popleft()
                worker.send(asked[busy[worker]], self._evaluation)
            for worker in self.answered(busy):
                place = busy.pop(worker)
                try:
                    result, seconds = worker.receive()
                except WorkerDied as how:
                    died.append(place)
                    self._say(f"{_whose(asked[place])} died ({how}); its work is done again")
                    self._replace(worker)
                except PolyfedError as error:
                    failed[place] = error
                    waiting = deque(one for one in waiting if one < place)
                else:
                    self.estimates.note(asked[place], seconds)
                    keep(place, result)
        if failed:
            raise failed[min(failed)]
        return died


def _whose(asked: Job) -> str:
    who = asked.title if isinstance(asked, EvalBatch | TrainBatch) else asked.client.title
    return f"round {asked.round}: the worker of {who}"


# a worker that is forked ---------------------------------------------------------------------------------------------


class _SharedMemory:
    """Memory that a process and one forked from it hold, one of which writes. It is used as far as it is written to."""

    def __init__(self) -> None:
        self._file = os.memfd_create("polyfed")
        self._memory: mmap.mmap | None = None

    def room(self, size: int) -> memoryview:
        """Its first bytes, so many; the one who writes has it grow."""
        if os.fstat(self._file).st_size < size:
            os.ftruncate(self._file, int(_SPARE * size))
        if self._memory is None or len(self._memory) < size:
            self._memory = mmap.mmap(self._file, 0)
        return memoryview(self._memory)[:size]

    def close(self) -> None:
        """Give up this process's hold on it."""
        os.close(self._file)
        self._memory = None


class ForkedWorker(Worker):
    """A process forked from the run's own: it has data, networks and the method by that. See `Worker`.

    It answers when its line can be read.

    Args:
        context: what it works on. others: the other workers, whose lines it must not hold open.
    """

    def __init__(self, context: WorkerContext, others: Sequence[ForkedWorker] = ()) -> None:
        super().__init__(context.store)
        self._inbox = _SharedMemory()
        self._outbox = _SharedMemory()
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
                _live(run, theirs, [self.line, *(other.line for other in others)], context, self._inbox, self._outbox)
        theirs.close()

    def wait_ready(self) -> None:
        try:
            if trouble := json.loads(self.line.recv_bytes())["trouble"]:
                raise WorkerUnavailable(str(trouble))
        except (EOFError, OSError):
            raise WorkerUnavailable(f"it {self._how()}") from None

    def transmit(self, facts: Mapping[str, Any], tree: Tree) -> None:
        size = len(pack(facts, tree, self._inbox.room))
        with contextlib.suppress(OSError):  # it is no more, as `await_reply` will say
            self.line.send_bytes(size.to_bytes(8, "little"))

    def await_reply(self) -> Buffer:
        try:
            return self._outbox.room(int.from_bytes(self.line.recv_bytes(), "little"))
        except (EOFError, OSError):
            raise WorkerDied(self._how()) from None

    def is_alive(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # somebody else has looked after it
            return False

    def terminate(self) -> None:
        self.line.close()
        self._inbox.close()
        self._outbox.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)

    def _how(self) -> str:
        """How it ended, after its line has."""
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


def _live(
    run: int,
    line: Connection,
    closed: Sequence[Connection],
    context: WorkerContext,
    inbox: _SharedMemory,
    outbox: _SharedMemory,
) -> None:
    """The life of a worker; it never returns to what its parent was doing."""
    try:
        for number in _RUNS_BUSINESS:  # which a terminal and a service's manager send to all processes
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _RUNS_BUSINESS)
        _settle(run)
        for each in closed:
            each.close()  # or nobody would notice that the run has ended
        line.send_bytes(json.dumps({"trouble": find_trouble()}).encode())
        loop = WorkerLoop(context, outbox.room)
        while True:
            request = inbox.room(int.from_bytes(line.recv_bytes(), "little"))
            line.send_bytes(len(loop.reply(request)).to_bytes(8, "little"))
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
