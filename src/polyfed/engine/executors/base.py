"""How the clients' work of one exchange is carried out, and how they are scored.

`Serial` is the reference that any other must equal, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, State, clone, contiguous, first_nonfinite, freeze, shallow_copy
from polyfed.core.method import Exchange, Method, TrainingResult, scalar_metrics, uses_default_predict
from polyfed.core.model_factory import ModelFactory
from polyfed.core.public_passes import run_pass
from polyfed.core.randomness import derive_seed, seeded_global_rng
from polyfed.core.server import PublicPass
from polyfed.engine.evaluation import Score, ScoreCache, evaluate_model
from polyfed.engine.executors.made_upload import MadeUpload, encoded, fetch
from polyfed.engine.local_training import train
from polyfed.engine.operation_counter import OperationCounter, training_operations
from polyfed.engine.uploads import sent_nbytes
from polyfed.engine.weight_store import WeightRow, WeightStore
from polyfed.errors import PolyfedError, RunError
from polyfed.functional.device_copies import copy_once, move_together
from polyfed.models.split import SplitModel
from polyfed.profiling import timed


@dataclass(frozen=True)
class TrainJob:
    """One client's part in an exchange: what it is told, which of its networks it trains."""

    client: Client
    message: Message
    variant: str
    exchange: Exchange
    round: int
    scores: bool = False  # score it right after local training, too
    from_scores: Sequence[str] = ()  # with these figures of `evaluation.FROM_SCORES`
    is_final: bool = False  # the exchange is one of the closing round's
    exchange_index: int = 0  # where among the round's exchanges it stands
    counted: bool = False  # tell how many operations it takes
    uploads: bool = True  # else nothing comes of it but a score: it sends nothing, and the client stays as it is


@dataclass(frozen=True)
class EvalJob:
    """A client that is to be scored: as it stands, or after receiving `message`."""

    client: Client
    variant: str
    message: Message | None
    round: int
    parts: Sequence[str]  # of its data: "test", "validation"
    shared: Collection[str] = ()  # those that are the same samples for all clients


@dataclass(frozen=True)
class PassJob:
    """A pass over public inputs that the server asks for, by the network of this client."""

    client: Client
    asked: PublicPass

    @property
    def round(self) -> int:
        return self.asked.round


Job = TrainJob | EvalJob | PassJob
Scores = Mapping[str, Score]  # part of the data -> score


@dataclass(frozen=True)
class JobResult:
    """What came of a job. `message` is what left the client, `bytes_up` its size.

    `refused` says why nothing of it counts; `dropped`: nothing came back. Weights and state do not matter then.
    """

    client_id: int
    message: Message
    weights: Mapping[str, Tensor] | None  # those from before where it was only asked something and has changed nothing
    state: State
    trained: TrainingResult
    bytes_up: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    score: Score | None = None
    refused: str | None = None
    dropped: bool = False
    operations: int = 0  # of receiving, training, uploading, where they are counted

    @property
    def counts(self) -> bool:
        """Whether its message, weights and state are taken over."""
        return self.refused is None and not self.dropped


@dataclass(frozen=True)
class WorkerContext:
    """What is worked on.

    clients: by number. store: of their weights. from_scores: scores come with these of `evaluation.FROM_SCORES`.
    compiles: losses of clients that train as one are compiled.
    """

    method: Method
    model_factory: ModelFactory
    clients: Sequence[Client]
    store: WeightStore
    from_scores: Sequence[str]
    compiles: bool = False


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
        store: where new weights go. from_scores: scores come with these of `evaluation.FROM_SCORES`.
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


@timed("score")
def score_parts(asked: EvalJob, method: Method, model_factory: ModelFactory, memory: ScoreCache) -> dict[str, Score]:
    """The scores of all the parts asked for, by the same working copy of the client.

    Raises:
        RunError: the method failed; says for which client and in which round.
    """
    before = client_weights(asked.client, asked.variant, model_factory)
    client = working_copy(asked.client, asked.variant, model_factory, before)
    client.round = asked.round
    try:
        if asked.message is not None:
            method.receive(client, freeze(asked.message))
        same = asked.message is None or only_head_differs(client, asked.variant, method, model_factory, before)
        body = asked.variant if same else None
        scores = {}
        for part in asked.parts:
            samples = getattr(client.data, part)
            scores[part] = memory.score(client, method, samples, part in asked.shared, counts_others(part), body)
        return scores
    except Exception as error:
        raise placed(error, client, "scoring", asked.round) from error


def only_head_differs(
    client: Client, variant: str, method: Method, model_factory: ModelFactory, before: Mapping[str, Tensor]
) -> bool:
    """Whether a client at work has, but for the head of what is scored, the weights that it had before."""
    model = method.personal_model(client.model)
    if not isinstance(model, SplitModel) or not uses_default_predict(method):  # nobody asks
        return False
    head = {id(tensor) for tensor in model.head.state_dict(keep_vars=True).values()}
    tensors = model_factory.state(client.architecture, variant)
    return _alike(before, {name: tensor for name, tensor in tensors.items() if id(tensor) not in head})


def counts_others(part: str) -> bool:
    """Whether a client is scored by the method's other predictors, too: not where its own chooses rounds."""
    return part == "test"


def placed(error: Exception, client: Client, stage: str, round: int) -> PolyfedError:
    """The error with client, round and stage in front."""
    if isinstance(error, PolyfedError):
        return type(error)(f"client {client.id}, round {round}, {stage}: {error}")
    place = f"client {client.id} ({client.architecture}), round {round}, {stage}"
    why = "memory ran out" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
    return RunError(f"{place}: {why}")


def working_copy(
    client: Client, variant: str, model_factory: ModelFactory, weights: Mapping[str, Tensor] | None = None
) -> Client:
    """A working copy of the client with its weights in the template; the client itself stays as it is.

    weights: `client_weights`, where they are known.
    """
    worker = copy.copy(client)
    worker.state = shallow_copy(client.state)
    weights = client_weights(client, variant, model_factory) if weights is None else weights
    worker.bound = model_factory.load(client.architecture, variant, weights).train()
    return worker


def has_weights(client: Client, variant: str, model_factory: ModelFactory) -> bool:
    """Whether the client has weights of its own, and of its present network."""
    weights = client.weights
    if weights is None:
        return False
    if isinstance(weights, WeightRow) and (weights.architecture, weights.variant) == (client.architecture, variant):
        return True
    template = model_factory.state(client.architecture, variant)
    return all(name in weights and weights[name].shape == tensor.shape for name, tensor in template.items())


def client_weights(client: Client, variant: str, model_factory: ModelFactory) -> Mapping[str, Tensor]:
    """The client's weights, or those it starts from (again, if its network is now another one)."""
    if client.weights is None or not has_weights(client, variant, model_factory):
        return model_factory.starting_state(client.architecture, variant, client.id, client.given)
    held = client.weights.views if isinstance(client.weights, WeightRow) else client.weights
    return {name: held[name] for name in model_factory.state(client.architecture, variant)}


def _alike(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Whether a network is bit for bit as it was; of one that is not, the first tensor mostly tells."""
    names = list(after)
    return all(_equal(before, after, some) for some in (names[:1], names[1:]))


def _equal(before: Mapping[str, Tensor], after: Mapping[str, Tensor], names: Sequence[str]) -> bool:
    tensors = [found[name] for found in (before, after) for name in names]
    here = move_together(tensors, [torch.device("cpu")] * len(tensors))
    return all(map(torch.equal, here[: len(names)], here[len(names) :]))


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
