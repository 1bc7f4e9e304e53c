"""How the clients' work of one exchange is carried out: the executors' common ground, and `Serial`.

`Serial` is the reference that any other must equal, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import clone, contiguous, first_nonfinite, freeze
from polyfed.core.method import Method, TrainingResult, scalar_metrics
from polyfed.core.model_factory import ModelFactory
from polyfed.core.public_passes import run_pass
from polyfed.core.randomness import derive_seed, seeded_global_rng
from polyfed.core.server import PublicPass
from polyfed.engine.executors.client_scoring import score_parts
from polyfed.engine.executors.jobs import EvalJob, JobResult, Scores, TrainJob, placed
from polyfed.engine.executors.made_upload import MadeUpload, encoded, fetch
from polyfed.engine.executors.working_copy import client_weights, working_copy
from polyfed.engine.local_training import train
from polyfed.engine.operation_counter import OperationCounter, training_operations
from polyfed.engine.scoring import ScoreCache, evaluate_model
from polyfed.engine.uploads import sent_nbytes
from polyfed.engine.weight_store import WeightRow, WeightStore
from polyfed.functional.device_copies import copy_once, move_together
from polyfed.profiling import timed


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
    """What the server's own pass would give (`core.public_passes.public_outputs`)."""
    architecture = context.clients[asked.client_id].architecture
    model = context.model_factory.load(architecture, "", asked.weights, alone=True).eval()
    first = context.clients[0]  # whose preparation is the server's
    return run_pass(asked, model, first.public, first.prepare)


class Executor(Protocol):
    """Runs the jobs of an exchange and scores clients; what comes of it is in the order of what was asked.

    workers: processes among which it is dealt; 1: one does it all.
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
    """One client after the other, in this process.

    Args:
        store: where new weights go. from_scores: scores come with these of `scoring.FROM_SCORES`.
    """

    workers = 1

    def __init__(
        self, method: Method, model_factory: ModelFactory, store: WeightStore, from_scores: Sequence[str] = ()
    ) -> None:
        self._method = method
        self._model_factory = model_factory
        self._store = store
        self._memory = ScoreCache(from_scores)

    def run(self, jobs: Sequence[TrainJob], done: Callable[[int], None]) -> list[JobResult]:
        """See `Executor`."""
        outcomes = []
        for count, job in enumerate(jobs, 1):
            fresh = functools.partial(self._store.allocate, job.client.architecture, job.variant)
            outcomes.append(run_job(job, self._method, self._model_factory, fresh))
            done(count)
        return outcomes

    def score(self, asked: Sequence[EvalJob]) -> list[Scores]:
        """See `Executor`."""
        scores: list[Scores] = [score_parts(each, self._method, self._model_factory, self._memory) for each in asked]
        self._memory.forget_content()
        return scores

    def close(self) -> None:
        """See `Executor`."""


def train_job(client: Client, job: TrainJob, method: Method, model_factory: ModelFactory) -> TrainingResult:
    """The training of a job; the client is at work."""
    return train(client, method, client.context, phases=job.exchange.phases, step=model_factory.training)


@timed("messages")
def run_job(
    job: TrainJob,
    method: Method,
    model_factory: ModelFactory,
    fresh: Callable[[], WeightRow],
    training: Callable[[Client, TrainJob, Method, ModelFactory], TrainingResult] = train_job,
) -> JobResult:
    """Receive, train, upload: on copies, so that a refused or failed client is as it was.

    Args:
        fresh: gives the row for the client's new weights, if there are any. training: trains the client.

    Raises:
        RunError: the method failed; says for which client, in which round and at which stage.
    """
    before = client_weights(job.client, job.variant, model_factory)
    client = working_copy(job.client, job.variant, model_factory, before)
    with own_layers(client, job):
        operations = receive(client, job, method, model_factory)
        trained = TrainingResult()
        if job.exchange.trains:
            with at_stage(client, job, "training"):
                trained = training(client, job, method, model_factory)
        after = model_factory.state(client.architecture, job.variant)
        nonfinite = first_nonfinite({"model": after})
        made = make_upload(client, job, trained, nonfinite, method, after, before, operations)
        return finish_job(client, job, trained, made, method, fresh)


def own_layers(client: Client, job: TrainJob) -> AbstractContextManager[None]:
    """Within the block PyTorch's global generators are the client's own, for what its layers draw in this job."""
    return seeded_global_rng(derive_seed(client.seed, "layers", job.exchange.name, job.round, client.id))


@timed("messages")
def receive(client: Client, job: TrainJob, method: Method, model_factory: ModelFactory) -> int:
    """First half of a job: the client, at work, takes in what it is told.

    Returns:
        Where they are counted, the operations of that and of the training to come; else 0.

    Raises:
        RunError: the method failed, as for `run_job`.
    """
    client.round, client.exchange = job.round, job.exchange.name
    with at_stage(client, job, "receiving"), _counting(job) as done:
        client.context = method.receive(client, freeze(job.message))
    if done is None or not job.exchange.trains:
        return 0 if done is None else done.count
    with at_stage(client, job, "training"):
        phases = method.phases(client.training) if job.exchange.phases is None else job.exchange.phases
        return done.count + training_operations(client, method, client.context, phases, model_factory.training)


def _counting(job: TrainJob) -> AbstractContextManager[OperationCounter | None]:
    return OperationCounter() if job.counted else contextlib.nullcontext()


@timed("messages")
def make_upload(
    client: Client,
    job: TrainJob,
    trained: TrainingResult,
    nonfinite: str | None,
    method: Method,
    after: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    operations: int = 0,
) -> MadeUpload:
    """Second part of a job, after the training: judge, score, make the upload.

    Args:
        client: at work, with its new weights in the template. nonfinite: the first of them that holds NaN or infinity.
        after: the template's tensors. before: the client's weights before the job. operations: until now.

    Raises:
        RunError: the method failed, as for `run_job`.
    """
    score = None
    bad = _untrained(job, trained, nonfinite)
    if bad is None and job.scores and len(client.data.test):
        with at_stage(client, job, "scoring"):
            score = evaluate_model(client, method, client.data.test, job.from_scores)
    message = None
    if bad is None and job.uploads:  # a model of NaN sends nothing: who knows what the method's upload makes of it
        with at_stage(client, job, "uploading"), _counting(job) as done:
            message = method.upload(client, trained)
        operations += 0 if done is None else done.count
    unchanged = None if job.exchange.trains else _unchanged(before, after)
    return MadeUpload(message, after, score, bad, operations, unchanged)


@timed("messages")
def finish_job(
    client: Client,
    job: TrainJob,
    trained: TrainingResult,
    made: MadeUpload,
    method: Method,
    fresh: Callable[[], WeightRow],
) -> JobResult:
    """Last part of a job: what was made leaves the device.

    Args:
        client: at work. fresh: see `run_job`.

    Raises:
        RunError: the method failed, as for `run_job`.
    """
    message = freeze({})
    bad = made.refused
    with copy_once():  # what is uploaded of the network's tensors is not copied once more to be kept
        with at_stage(client, job, "uploading"):
            fetch(made.leaving(client, trained))
        if made.message is not None:
            with at_stage(client, job, "uploading"):
                message, bad = encoded(clone(made.message), client, method, job.message)
        same = bad is not None or not job.uploads or made.is_unchanged()
        weights = job.client.weights if same else fresh().write(made.after)
        sums = {} if bad else scalar_metrics(trained.sums)
        state = contiguous(client.state)
    return JobResult(
        client.id,
        message,
        weights,
        state,
        trained,
        sent_nbytes(method, message),
        sums,
        None if bad else made.score,
        bad,
        operations=made.operations,
    )


@contextlib.contextmanager
def at_stage(client: Client, job: TrainJob, stage: str) -> Iterator[None]:
    """Errors within the block name client, round and stage."""
    try:
        yield
    except Exception as error:
        raise placed(error, client, stage, job.round) from error


def _unchanged(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Tensor:
    """As `_alike` for a network that is most likely as it was: 0-d, where it now lies, so that nobody waits."""
    there = move_together([before[name] for name in after], [tensor.device for tensor in after.values()])
    same = [(one == other).all() for one, other in zip(there, after.values(), strict=True)]
    return torch.stack(same).all()


def _untrained(job: TrainJob, trained: TrainingResult, nonfinite: str | None) -> str | None:
    """Why a client's work counts for nothing, if it does."""
    if job.exchange.trains and trained.steps == 0:
        return "no training step: too few samples for a batch of this model"
    if not math.isfinite(trained.loss):
        return f"the training loss is {trained.loss}"
    if nonfinite is not None:
        return f"the model is not finite ('{nonfinite}')"
    return None
