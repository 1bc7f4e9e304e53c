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
from polyfed.core.message import Message, State, contiguous, copied, first_nonfinite, read_only, shallow
from polyfed.core.method import Exchange, Method, TrainingResult, numbers
from polyfed.core.model_factory import Architectures
from polyfed.core.randomness import derive, seeded_global_rng
from polyfed.engine.evaluation import Memory, Score, score_model
from polyfed.engine.local_training import train
from polyfed.engine.operation_counter import Operations, training_operations
from polyfed.engine.rejected import Rejected
from polyfed.engine.uploads import sent_nbytes
from polyfed.engine.weight_store import Row, Store
from polyfed.errors import PolyfedError, RunError
from polyfed.models.split import SplitModel
from polyfed.profiling import timed


@dataclass(frozen=True)
class Job:
    """One client's part in an exchange: what it is told, which of its networks it trains."""

    client: Client
    message: Message
    variant: str
    exchange: Exchange
    round: int
    scores: bool = False  # score it right after local training, too
    from_scores: Sequence[str] = ()  # with these figures of `evaluation.FROM_SCORES`
    closing: bool = False  # the exchange is one of the closing round's
    place: int = 0  # where among the round's exchanges it stands
    counted: bool = False  # tell how many operations it takes
    uploads: bool = True  # else nothing comes of it but a score: it sends nothing, and the client stays as it is


@dataclass(frozen=True)
class Scoring:
    """A client that is to be scored: as it stands, or after receiving `message`."""

    client: Client
    variant: str
    message: Message | None
    round: int
    parts: Sequence[str]  # of its data: "test", "validation"
    shared: Collection[str] = ()  # those that are the same samples for all clients


Scores = Mapping[str, Score]  # part of the data -> score


@dataclass(frozen=True)
class Outcome:
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
class Crew:
    """What is worked on.

    clients: by number. store: of their weights. from_scores: scores come with these of `evaluation.FROM_SCORES`.
    """

    method: Method
    architectures: Architectures
    clients: Sequence[Client]
    store: Store
    from_scores: Sequence[str]


class Executor(Protocol):
    """Runs the jobs of an exchange and scores clients; what comes of it is in the order of what was asked.

    workers: processes among which it is dealt; 1: one does it all.
    """

    workers: int

    def run(self, jobs: Sequence[Job], done: Callable[[int], None]) -> list[Outcome]:
        """Carry out `jobs`; `done(count)` is called as they finish."""
        ...

    def score(self, asked: Sequence[Scoring]) -> list[Scores]:
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
        self, method: Method, architectures: Architectures, store: Store, from_scores: Sequence[str] = ()
    ) -> None:
        self._method = method
        self._architectures = architectures
        self._store = store
        self._memory = Memory(from_scores)

    def run(self, jobs: Sequence[Job], done: Callable[[int], None]) -> list[Outcome]:
        """See `Executor`."""
        outcomes = []
        for count, job in enumerate(jobs, 1):
            fresh = functools.partial(self._store.fresh, job.client.architecture, job.variant)
            outcomes.append(carry_out(job, self._method, self._architectures, fresh))
            done(count)
        return outcomes

    def score(self, asked: Sequence[Scoring]) -> list[Scores]:
        """See `Executor`."""
        scores: list[Scores] = [score_parts(each, self._method, self._architectures, self._memory) for each in asked]
        self._memory.forget_content()
        return scores

    def close(self) -> None:
        """See `Executor`."""


def train_job(client: Client, job: Job, method: Method, architectures: Architectures) -> TrainingResult:
    """The training of a job; the client is at work."""
    return train(client, method, client.context, phases=job.exchange.phases, step=architectures.training)


@timed("messages")
def carry_out(
    job: Job,
    method: Method,
    architectures: Architectures,
    fresh: Callable[[], Row],
    training: Callable[[Client, Job, Method, Architectures], TrainingResult] = train_job,
) -> Outcome:
    """Receive, train, upload: on copies, so that a refused or failed client is as it was.

    Args:
        fresh: gives the row for the client's new weights, if there are any. training: trains the client.

    Raises:
        RunError: the method failed; says for which client, in which round and at which stage.
    """
    before = own_weights(job.client, job.variant, architectures)
    client = at_work(job.client, job.variant, architectures, before)
    with own_layers(client, job):
        operations = receive(client, job, method, architectures)
        trained = TrainingResult()
        if job.exchange.trains:
            with at_stage(client, job, "training"):
                trained = training(client, job, method, architectures)
        return hand_in(client, job, trained, method, architectures, fresh, before, operations)


def own_layers(client: Client, job: Job) -> AbstractContextManager[None]:
    """Within the block PyTorch's global generators are the client's own, for what its layers draw in this job."""
    return seeded_global_rng(derive(client.seed, "layers", job.exchange.name, job.round, client.id))


@timed("messages")
def receive(client: Client, job: Job, method: Method, architectures: Architectures) -> int:
    """First half of a job: the client, at work, takes in what it is told.

    Returns:
        Where they are counted, the operations of that and of the training to come; else 0.

    Raises:
        RunError: the method failed, as for `carry_out`.
    """
    client.round, client.exchange = job.round, job.exchange.name
    with at_stage(client, job, "receiving"), _counting(job) as done:
        client.context = method.receive(client, read_only(job.message))
    if done is None or not job.exchange.trains:
        return 0 if done is None else done.count
    with at_stage(client, job, "training"):
        phases = method.phases(client.training) if job.exchange.phases is None else job.exchange.phases
        return done.count + training_operations(client, method, client.context, phases, architectures.training)


def _counting(job: Job) -> AbstractContextManager[Operations | None]:
    return Operations() if job.counted else contextlib.nullcontext()


@timed("messages")
def hand_in(
    client: Client,
    job: Job,
    trained: TrainingResult,
    method: Method,
    architectures: Architectures,
    fresh: Callable[[], Row],
    before: Mapping[str, Tensor],
    operations: int = 0,
) -> Outcome:
    """Second half of a job, after the training: judge, score, upload.

    Args:
        client: at work, with its new weights in the template. before: its weights before the job. fresh: see
            `carry_out`. operations: until now.

    Raises:
        RunError: the method failed, as for `carry_out`.
    """
    score = None
    message = read_only({})
    bad = _untrained(job, trained, architectures)
    if bad is None and job.scores and len(client.data.test):
        with at_stage(client, job, "scoring"):
            score = score_model(client, method, client.data.test, job.from_scores)
    if bad is None and job.uploads:  # a model of NaN sends nothing: who knows what the method's upload makes of it
        with at_stage(client, job, "uploading"):
            with _counting(job) as done:
                made = copied(method.upload(client, trained))
            operations += 0 if done is None else done.count
            message, bad = encoded(made, client, method, job.message)
    after = architectures.tensors(client.architecture, job.variant)
    same = bad is not None or not job.uploads or (not job.exchange.trains and _alike(before, after))
    return Outcome(
        client.id,
        message,
        job.client.weights if same else fresh().write(after),
        contiguous(client.state),
        trained,
        sent_nbytes(method, message),
        {} if bad else numbers(trained.sums),
        None if bad else score,
        bad,
        operations=operations,
    )


def encoded(made: Message, client: Client, method: Method, received: Message) -> tuple[Message, str | None]:
    """What leaves the client in place of what its method made; and why nothing of it counts, if it does not."""
    upload = read_only(made)
    name = first_nonfinite(upload)
    if name is not None:
        return upload, f"the upload is not finite ('{name}')"
    try:
        for plugin in client.plugins:
            changed = plugin.encode(upload, client, method, received)
            if changed is not upload:
                upload = read_only(changed)
    except Rejected as problem:
        return read_only({}), str(problem)
    return upload, None


@contextlib.contextmanager
def at_stage(client: Client, job: Job, stage: str) -> Iterator[None]:
    """Errors within the block name client, round and stage."""
    try:
        yield
    except Exception as error:
        raise placed(error, client, stage, job.round) from error


@timed("score")
def score_parts(asked: Scoring, method: Method, architectures: Architectures, memory: Memory) -> dict[str, Score]:
    """The scores of all the parts asked for, by the same working copy of the client.

    Raises:
        RunError: the method failed; says for which client and in which round.
    """
    before = own_weights(asked.client, asked.variant, architectures)
    client = at_work(asked.client, asked.variant, architectures, before)
    client.round = asked.round
    try:
        if asked.message is not None:
            method.receive(client, read_only(asked.message))
        same = asked.message is None or _only_head_differs(client, asked.variant, method, architectures, before)
        body = asked.variant if same else None
        scores = {}
        for part in asked.parts:
            samples = getattr(client.data, part)
            others = part == "test"  # rounds are chosen by the method's own
            scores[part] = memory.score(client, method, samples, part in asked.shared, others, body)
        return scores
    except Exception as error:
        raise placed(error, client, "scoring", asked.round) from error


def _only_head_differs(
    client: Client, variant: str, method: Method, architectures: Architectures, before: Mapping[str, Tensor]
) -> bool:
    """Whether a client at work has, but for the head of what is scored, the weights that it had before."""
    model = method.personal_model(client.model)
    if not isinstance(model, SplitModel):
        return False
    head = {id(tensor) for tensor in model.head.state_dict(keep_vars=True).values()}
    tensors = architectures.tensors(client.architecture, variant)
    return _alike(before, {name: tensor for name, tensor in tensors.items() if id(tensor) not in head})


def placed(error: Exception, client: Client, stage: str, round: int) -> PolyfedError:
    """The error with client, round and stage in front."""
    if isinstance(error, PolyfedError):
        return type(error)(f"client {client.id}, round {round}, {stage}: {error}")
    place = f"client {client.id} ({client.architecture}), round {round}, {stage}"
    why = "memory ran out" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
    return RunError(f"{place}: {why}")


def at_work(
    client: Client, variant: str, architectures: Architectures, weights: Mapping[str, Tensor] | None = None
) -> Client:
    """A working copy of the client with its weights in the template; the client itself stays as it is.

    weights: `own_weights`, where they are known.
    """
    worker = copy.copy(client)
    worker.state = shallow(client.state)
    weights = own_weights(client, variant, architectures) if weights is None else weights
    worker.bound = architectures.bound(client.architecture, variant, weights).train()
    return worker


def has_own(client: Client, variant: str, architectures: Architectures) -> bool:
    """Whether the client has weights of its own, and of its present network."""
    weights = client.weights
    if weights is None:
        return False
    if isinstance(weights, Row) and (weights.architecture, weights.variant) == (client.architecture, variant):
        return True
    template = architectures.tensors(client.architecture, variant)
    return all(name in weights and weights[name].shape == tensor.shape for name, tensor in template.items())


def own_weights(client: Client, variant: str, architectures: Architectures) -> Mapping[str, Tensor]:
    """The client's weights, or those it starts from (again, if its network is now another one)."""
    if client.weights is None or not has_own(client, variant, architectures):
        return architectures.begun(client.architecture, variant, client.id, client.given)
    return {name: client.weights[name] for name in architectures.tensors(client.architecture, variant)}


def _alike(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Whether a network is bit for bit as it was."""
    return all(torch.equal(tensor.cpu(), before[name].cpu()) for name, tensor in after.items())


def _untrained(job: Job, trained: TrainingResult, architectures: Architectures) -> str | None:
    """Why a client's work counts for nothing, if it does."""
    if job.exchange.trains and trained.steps == 0:
        return "no training step: too few samples for a batch of this model"
    if not math.isfinite(trained.loss):
        return f"the training loss is {trained.loss}"
    if name := first_nonfinite({"model": architectures.tensors(job.client.architecture, job.variant)}):
        return f"the model is not finite ('{name}')"
    return None
