"""The clients' work shared by several workers, whatever they are: who does what, and what is done again.

The longest jobs go first, so that nobody waits long for the last one. Results are put in the order of the jobs, and no
draw depends on who carries out what: the result is that of `Serial`, bit for bit.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from polyfed.core.server import PublicPass
from polyfed.engine.executors.executor import Done, Executor, ExecutorSetup, run_public_pass
from polyfed.engine.executors.jobs import EvalBatch, Job, JobResult, PassJob, Scores, TrainJob
from polyfed.engine.executors.serial import Serial
from polyfed.engine.executors.worker_requests import make_request, read_answer
from polyfed.engine.executors.workload import Estimates, worker_count
from polyfed.errors import PolyfedError, RunError


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


class WorkerPool(Executor):
    """Workers that stay for a run: made when they are first needed, ended by `close`.

    A worker that dies is replaced. Its job is done again when the others are through, alone, as memory may have run
    out; if a worker dies of it again, the client counts as dropped out, or stays without a score.
    """

    def __init__(self, setup: ExecutorSetup) -> None:
        super().__init__(setup)
        self.workers = worker_count(setup)
        self.running: list[Worker] = []
        self._estimates = Estimates(setup)
        self._serial: Serial | None = None  # where no worker can be had

    @abc.abstractmethod
    def hire(self) -> Worker:
        """Begin to make one more worker."""

    @abc.abstractmethod
    def answered(self, busy: Collection[Worker]) -> list[Worker]:
        """Those whose answer is there, or who are no more; waits for the first."""

    def run(self, jobs: Sequence[TrainJob], done: Done) -> list[JobResult]:
        if not jobs:
            return []
        if serial := self._instead():
            return serial.run(jobs, done)
        found = self._run_all(jobs, done)
        if len(jobs) > 1 and not any(found):
            raise RunError(f"the worker of every client died, twice, in round {jobs[0].round}; try fewer workers")
        return [one or JobResult(job.client.id, dropped=True) for one, job in zip(found, jobs, strict=True)]

    def score_batches(self, batches: Sequence[EvalBatch]) -> Sequence[list[Scores]]:
        if serial := self._instead():
            return serial.score_batches(batches)
        found: list[list[Scores] | None] = self._run_all(batches, lambda done: None)
        return [one or [{} for _ in batch.jobs] for batch, one in zip(batches, found, strict=True)]

    def run_passes(self, passes: Sequence[PublicPass]) -> list[Tensor]:
        """See `Server.run_passes`; a single one is not worth sending, and what workers die of is done here."""
        found: list[Tensor | None] = [None] * len(passes)
        if len(passes) > 1 and not self._instead():
            found = self._run_all([PassJob(self.setup.clients[p.client_id], p) for p in passes], lambda done: None)
        return [
            run_public_pass(asked, self.setup) if one is None else one for asked, one in zip(passes, found, strict=True)
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

    def _instead(self) -> Serial | None:
        """What does the work where there can be no workers; else those that are missing are made."""
        if self._serial is not None:
            return self._serial
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
            self.setup.say(f"there can be no worker processes ({reason}); all is done by this one")
            self._serial = Serial(replace(self.setup, workers=None))
        return self._serial

    def _run_all(self, asked: Sequence[Any], done: Done) -> list[Any]:
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
                    self.setup.say(f"{_worker_of(asked[lost])} died again; {then or 'it counts as dropped out'}")
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
                worker.send(make_request(asked[busy[worker]]))
            for worker in self.answered(busy):
                index = busy.pop(worker)
                try:
                    result = read_answer(asked[index], worker.receive(), self.setup.store)
                except WorkerDied as how:
                    died.append(index)
                    self.setup.say(f"{_worker_of(asked[index])} died ({how}); its work is done again")
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
