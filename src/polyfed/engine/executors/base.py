"""How the clients' work of one exchange is carried out: the protocol of executors, and `Serial`.

`Serial` is the reference that any other must equal, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.inference import run_pass
from polyfed.core.method import Method
from polyfed.core.model_factory import ModelFactory
from polyfed.core.server import PublicPass
from polyfed.engine.executors.client_work import run_job, score_parts
from polyfed.engine.executors.jobs import EvalJob, JobResult, Scores, TrainJob
from polyfed.engine.scoring import ScoreCache
from polyfed.engine.weight_store import WeightStore


@dataclass(frozen=True)
class WorkerContext:
    """What is worked on.

    clients: by number. store: of their weights. from_scores: scores come with these of `scoring.FROM_SCORES`.
    """

    method: Method
    model_factory: ModelFactory
    clients: Sequence[Client]
    store: WeightStore
    from_scores: Sequence[str]


def run_public_pass(asked: PublicPass, context: WorkerContext) -> Tensor:
    """What the server's own pass would give (`core.inference.public_outputs`)."""
    architecture = context.clients[asked.client_id].architecture
    model = context.model_factory.load(architecture, "", asked.weights, alone=True).eval()
    first = context.clients[0]  # whose preparation is the server's
    return run_pass(asked, model, first.public, first.prepare)


class Executor(Protocol):
    """Runs the jobs of an exchange and scores clients; results are in the order of what was asked.

    workers: processes that share the work; 1: one does it all.
    """

    workers: int

    def run(self, jobs: Sequence[TrainJob], done: Callable[[int], None]) -> list[JobResult]:
        """Carry out `jobs`; `done(count)` is called as they finish."""
        ...

    def score(self, asked: Sequence[EvalJob]) -> list[Scores]:
        """Score clients; a part that could not be scored is left out."""
        ...

    def close(self) -> None:
        """Give back what it holds; it may be used again."""
        ...


class Serial:
    """One client after the other, in this process."""

    workers = 1

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def run(self, jobs: Sequence[TrainJob], done: Callable[[int], None]) -> list[JobResult]:
        context = self._context
        outcomes = []
        for count, job in enumerate(jobs, 1):
            fresh = functools.partial(context.store.allocate, job.client.architecture, job.variant)
            outcomes.append(run_job(job, context.method, context.model_factory, fresh))
            done(count)
        return outcomes

    def score(self, asked: Sequence[EvalJob]) -> list[Scores]:
        context = self._context
        scores = ScoreCache(context.from_scores)
        return [score_parts(each, context.method, context.model_factory, scores) for each in asked]

    def close(self) -> None:
        """See `Executor`."""
