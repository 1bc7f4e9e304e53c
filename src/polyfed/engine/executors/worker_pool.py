"""The clients' work shared by several workers, whatever they are: who does what, and what is done again.

The longest jobs go first, so that nobody waits long for the last one. Results are put in the order of the jobs, and no
draw depends on who carries out what: the result is that of `Serial`, bit for bit.
"""

from __future__ import annotations

import abc
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import freeze
from polyfed.core.method import TrainingResult
from polyfed.core.server import PublicPass
from polyfed.core.settings import Training
from polyfed.engine.executors.client_work import Serial, WorkerContext, run_public_pass, score_in_batches
from polyfed.engine.executors.jobs import EvalBatch, EvalJob, Job, JobResult, PassJob, Scores, TrainJob
from polyfed.engine.executors.worker_requests import make_request, read_answer
from polyfed.errors import PolyfedError, RunError

_STEP, _SAMPLE = 3e-4, 4e-10  # seconds per training step; per sample and parameter. Rough: for convolutions too little

Say = Callable[[str], None]


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
    """How long clients take, guessed by their rows and the sizes of their networks."""

    def __init__(self, context: WorkerContext, training: Training) -> None:
        template = context.model_factory.module
        self.clients = context.clients
        names = {client.architecture for client in context.clients}
        self._sizes = {name: sum(p.numel() for p in template(name).parameters()) for name in names}
        self._training = training

    def seconds(self, client: Client) -> float:
        """Seconds of one round's training."""
        rows = len(client.data.train)
        settings = self._training
        steps = -(-rows // settings.batch_size)
        return settings.local_epochs * (steps * _STEP + rows * self._sizes[client.architecture] * _SAMPLE)

    def run(self) -> float:
        """Seconds of the training of a whole run."""
        mean = sum(map(self.seconds, self.clients)) / len(self.clients)
        return self._training.rounds * self._training.cohort_size(len(self.clients)) * mean


class WorkerUnavailable(Exception):
    """No worker can be had here; says why."""


class WorkerDied(Exception):
    """The worker ended before it answered; says how."""


class Worker(abc.ABC):
    """A worker, as the run's process sees it: wait until it is there; then ask it, one thing at a time."""

    @abc.abstractmethod
    def wait_ready(self) -> None:
        """Wait until it is there.

        Raises:
            WorkerUnavailable: it cannot work here.
        """

    @abc.abstractmethod
    def send(self, request: bytes) -> None:
        """Hand it a request."""

    @abc.abstractmethod
    def receive(self) -> bytes:
        """Its answer, when it is there.

        Raises:
            WorkerDied: it is no more.
        """

    @abc.abstractmethod
    def is_alive(self) -> bool:
        """Whether it can be asked."""

    @abc.abstractmethod
    def terminate(self) -> None:
        """End it, if it has not ended. It keeps nothing that would be lost."""


class WorkerPool(abc.ABC):
    """Workers that stay for a run: made when they are first needed, ended by `close`.

    A worker that dies is replaced. Its job is done again when the others are through, alone, as memory may have run
    out; if a worker dies of it again, the client counts as dropped out, or stays without a score.

    Args:
        context: what is worked on. workers: how many. estimates: how long things take. say: is given a line when a
            worker died.
    """

    def __init__(self, context: WorkerContext, workers: int, estimates: Estimates, say: Say) -> None:
        self.workers = workers
        self.context = context
        self._estimates = estimates
        self.say = say
        self.running: list[Worker] = []
        self._evaluation = 0
        self._serial: Serial | None = None  # where no worker can be had

    @abc.abstractmethod
    def hire(self) -> Worker:
        """Begin to make one more worker."""

    @abc.abstractmethod
    def answered(self, busy: Collection[Worker]) -> list[Worker]:
        """Those whose answer is there, or who are no more; waits for the first."""

    def run(self, jobs: Sequence[TrainJob], done: Callable[[int], None]) -> list[JobResult]:
        if not jobs:
            return []
        if not self._with_workers():
            assert self._serial is not None
            return self._serial.run(jobs, done)
        found = self._run_all(jobs, done)
        if len(jobs) > 1 and not any(found):
            raise RunError(f"the worker of every client died, twice, in round {jobs[0].round}; try fewer workers")
        lost = [JobResult(job.client.id, freeze({}), None, {}, TrainingResult(), dropped=True) for job in jobs]
        return [one or instead for one, instead in zip(found, lost, strict=True)]

    def score(self, asked: Sequence[EvalJob]) -> list[Scores]:
        if not asked:
            return []
        if not self._with_workers():
            assert self._serial is not None
            return self._serial.score(asked)
        self._evaluation += 1

        def carry_out(batches: Sequence[EvalBatch]) -> list[list[Scores]]:
            found: list[list[Scores] | None] = self._run_all(batches, lambda _: None)
            return [one or [{} for _ in batch.jobs] for batch, one in zip(batches, found, strict=True)]

        return score_in_batches(asked, self.context, carry_out)

    def run_passes(self, passes: Sequence[PublicPass]) -> list[Tensor]:
        """See `Server.run_passes`; a single one is not worth sending, and what workers die of is done here."""
        found: list[Tensor | None] = [None] * len(passes)
        if len(passes) > 1 and self._with_workers():
            found = self._run_all([PassJob(self.context.clients[p.client_id], p) for p in passes], lambda _: None)
        return [
            run_public_pass(asked, self.context) if one is None else one
            for asked, one in zip(passes, found, strict=True)
        ]

    def close(self) -> None:
        while self.running:
            self.running.pop().terminate()

    def replace(self, worker: Worker) -> None:
        """Have another worker in place of one that died."""
        self.running.remove(worker)
        worker.terminate()
        try:
            self.running.append(self.hire())
            self.running[-1].wait_ready()
        except WorkerUnavailable as reason:
            raise RunError(f"a worker died, and there can be no other: {reason}") from None

    def _with_workers(self) -> bool:
        """Whether there are workers; those that are missing are made."""
        if self._serial is not None:
            return False
        for gone in [worker for worker in self.running if not worker.is_alive()]:
            self.running.remove(gone)
            gone.terminate()
        try:
            ready = len(self.running)
            for _ in range(ready, self.workers):
                self.running.append(self.hire())
            for worker in self.running[ready:]:
                worker.wait_ready()
        except WorkerUnavailable as reason:
            self.close()
            self.say(f"there can be no worker processes ({reason}); all is done by this one")
            self._serial = Serial(self.context)
        return self._serial is None

    def _run_all(self, asked: Sequence[Any], done: Callable[[int], None]) -> list[Any]:
        """All results; None where workers died of it, twice."""
        found: list[Any] = [None] * len(asked)
        through = 0

        def keep(index: int, result: Any) -> None:
            nonlocal through
            found[index] = result
            through += 1
            done(through)

        order = sorted(range(len(asked)), key=lambda index: -self._estimates.seconds(asked[index].client))
        try:
            for lost in self._assign_jobs(asked, order, keep):
                if self._assign_jobs(asked, [lost], keep):
                    keep(lost, None)
                    then = "the run's own process does its work" if isinstance(asked[lost], PassJob) else None
                    self.say(f"{_worker_of(asked[lost])} died again; {then or 'it counts as dropped out'}")
        except BaseException:
            self.close()  # whatever the others are at
            raise
        return found

    def _assign_jobs(self, asked: Sequence[Any], order: Sequence[int], keep: Callable[[int, Any], None]) -> list[int]:
        """Have jobs done by all workers, in this order of their indices; the indices of those whose worker died."""
        waiting = deque(order)
        busy = dict[Worker, int]()
        died = list[int]()
        failed: dict[int, PolyfedError] = {}
        while waiting or busy:
            for worker in [worker for worker in self.running if worker not in busy][: len(waiting)]:
                busy[worker] = waiting.popleft()
                worker.send(make_request(asked[busy[worker]], self._evaluation))
            for worker in self.answered(busy):
                index = busy.pop(worker)
                try:
                    result = read_answer(asked[index], worker.receive(), self.context.store)
                except WorkerDied as how:
                    died.append(index)
                    self.say(f"{_worker_of(asked[index])} died ({how}); its work is done again")
                    self.replace(worker)
                except PolyfedError as error:
                    failed[index] = error
                    waiting = deque(other for other in waiting if other < index)
                else:
                    keep(index, result)
        if failed:
            raise failed[min(failed)]
        return died


def _worker_of(asked: Job) -> str:
    who = asked.title if isinstance(asked, EvalBatch) else asked.client.title
    return f"round {asked.round}: the worker of {who}"
