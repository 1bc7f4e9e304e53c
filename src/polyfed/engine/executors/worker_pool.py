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
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from polyfed.core.server import PublicPass
from polyfed.engine.executors.executor import Done, Executor, ExecutorSetup, run_public_pass
from polyfed.engine.executors.jobs import EvalBatch, Job, JobResult, Scores, TrainJob
from polyfed.engine.executors.serial import Serial
from polyfed.engine.executors.worker_requests import make_request, read_answer
from polyfed.errors import PolyfedError, RunError

_STEP, _SAMPLE = 3e-4, 4e-10  # seconds per training step; per sample and parameter. Rough: for convolutions too little


class WorkerUnavailable(Exception):
    """No worker can be had here; says why."""


class WorkerDied(Exception):
    """The worker ended before it answered; says how."""


class Worker(abc.ABC):
    """A worker, as the run's process sees it, which is asked one thing at a time and keeps nothing."""

    @abc.abstractmethod
    def wait_ready(self) -> None:
        """Wait until it is there; `WorkerUnavailable`: it cannot work here."""

    @abc.abstractmethod
    def send(self, request: bytes) -> None:
        """Hand it a request."""

    @abc.abstractmethod
    def receive(self) -> bytes:
        """Its answer, when it is there; `WorkerDied`: it is no more."""

    @abc.abstractmethod
    def terminate(self) -> None:
        """End it, if it has not ended."""


class WorkerPool(Executor):
    """Workers that stay for a run: made when they are first needed, ended by `close`.

    A worker that dies is replaced, and its job done again after the others. If a worker dies of it again, the run ends.
    """

    def __init__(self, setup: ExecutorSetup) -> None:
        super().__init__(setup)
        self.workers = worker_count(setup)
        self.running: list[Worker] = []
        self._seconds = seconds_of_training(setup)
        self._is_alone = False  # no worker can be had

    @abc.abstractmethod
    def hire(self) -> Worker:
        """Begin to make one more worker."""

    @abc.abstractmethod
    def answered(self, busy: Collection[Worker]) -> list[Worker]:
        """Those whose answer is there, or who are no more; waits for the first."""

    def run(self, jobs: Sequence[TrainJob], done: Done) -> list[JobResult]:
        if not jobs:
            return []
        if not self._has_workers():
            return Serial(replace(self.setup, workers=None)).run(jobs, done)
        return self._run_all(jobs, done)

    def score_batches(self, batches: Sequence[EvalBatch]) -> Sequence[list[Scores]]:
        if not self._has_workers():
            return super().score_batches(batches)
        return self._run_all(batches, lambda done: None)

    def run_passes(self, passes: Sequence[PublicPass]) -> list[Tensor]:
        """See `Server.run_passes`; a single one is not worth sending."""
        if len(passes) > 1 and self._has_workers():
            return self._run_all(passes, lambda done: None)
        return [run_public_pass(asked, self.setup) for asked in passes]

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

    def _has_workers(self) -> bool:
        """Whether there are workers; those that are missing are made."""
        try:
            ready = len(self.running)
            for _ in range(ready, 0 if self._is_alone else self.workers):
                self.running.append(self.hire())
            for worker in self.running[ready:]:
                worker.wait_ready()
        except WorkerUnavailable as reason:
            self.close()
            self.setup.say(f"there can be no worker processes ({reason}); all is done by this one")
            self._is_alone = True
        return not self._is_alone

    def _run_all(self, asked: Sequence[Any], done: Done) -> list[Any]:
        """All results."""
        waiting = deque(sorted(range(len(asked)), key=lambda place: -self._seconds[_client_id(asked[place])]))
        found: dict[int, Any] = {}  # by place
        busy = dict[Worker, int]()
        died = set[int]()
        failed: dict[int, PolyfedError] = {}
        try:
            while waiting or busy:
                for worker in [worker for worker in self.running if worker not in busy][: len(waiting)]:
                    busy[worker] = waiting.popleft()
                    worker.send(make_request(asked[busy[worker]]))
                for worker in self.answered(busy):
                    place = busy.pop(worker)
                    try:
                        answer = read_answer(asked[place], worker.receive())
                    except WorkerDied as how:
                        who = f"{self._worker_of(asked[place])} died"
                        if place in died:
                            raise RunError(f"{who} twice ({how}); go on with fewer workers") from None
                        self.setup.say(f"{who} ({how}); its work is done again")
                        died.add(place)
                        waiting.append(place)
                        self.replace(worker)
                    except PolyfedError as error:
                        failed[place] = error
                        waiting = deque(other for other in waiting if other < place)
                    else:
                        found[place] = answer
                        done(len(found))
            if failed:
                raise failed[min(failed)]
        except BaseException:
            self.close()  # whatever the others are at
            raise
        return [found[place] for place in range(len(asked))]

    def _worker_of(self, asked: Job) -> str:
        who = asked.title if isinstance(asked, EvalBatch) else self.setup.clients[_client_id(asked)].title
        return f"round {asked.round}: the worker of {who}"


def _client_id(asked: Job) -> int:
    return asked.client_id if isinstance(asked, PublicPass) else asked.client.id


# how many workers, and how much work there is for them ---------------------------------------------------------------


def available_cores() -> int:
    """How many cores this process may use: those it is bound to, and its share of them where a container has one."""
    count = getattr(os, "process_cpu_count", lambda: len(os.sched_getaffinity(0)))()
    try:
        share, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        quota = math.inf if share == "max" else int(share) / int(period)
    except (OSError, ValueError):
        quota = math.inf
    return max(1, min(count or 1, math.ceil(quota) if math.isfinite(quota) else sys.maxsize))


def worker_count(setup: ExecutorSetup) -> int:
    """How many workers there are to be: as asked for or one for each core, and no more than clients."""
    return min(setup.workers or available_cores(), len(setup.clients))


def seconds_of_training(setup: ExecutorSetup) -> list[float]:
    """Seconds of a round's training by number of client, guessed by rows and the sizes of networks."""
    training = setup.training
    names = {client.architecture for client in setup.clients}
    sizes = {name: sum(p.numel() for p in setup.model_factory.module(name).parameters()) for name in names}
    found = []
    for client in setup.clients:
        rows = len(client.data.train)
        steps = math.ceil(rows / training.batch_size)
        found.append(training.local_epochs * (steps * _STEP + rows * sizes[client.architecture] * _SAMPLE))
    return found
