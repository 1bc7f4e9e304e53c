"""How the clients' work of one exchange is carried out, and how they are scored.

`Serial` is the reference that any other must equal, bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from polyfed.core.architectures import Architectures
from polyfed.core.client import Client
from polyfed.core.message import Message, State, copied, nbytes, not_finite, read_only, shallow
from polyfed.core.method import Exchange, Method, Trained, numbers
from polyfed.core.randomness import derive, scoped_global
from polyfed.engine.evaluation import Memory, Score, score_model
from polyfed.engine.training import train
from polyfed.errors import PolyfedError, RunError


@dataclass(frozen=True)
class Job:
    """One client's part in an exchange: what it is told, which of its networks it trains."""

    client: Client
    message: Message
    variant: str
    exchange: Exchange
    round: int
    scores: bool = False  # score it right after local training, too
    auc: bool = False  # with the area under the ROC curve
    closing: bool = False  # the exchange is one of the closing round's
    place: int = 0  # where among the round's exchanges it stands


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
    """What came of a job.

    `refused` says why nothing of it counts; `dropped`: nothing came back. Weights and state do not matter then.
    """

    client_id: int
    message: Message
    weights: dict[str, Tensor] | None  # those from before where it had none of its own, and was only asked something
    state: State
    trained: Trained
    bytes_up: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    score: Score | None = None
    refused: str | None = None
    dropped: bool = False

    @property
    def counts(self) -> bool:
        """Whether its message, weights and state are taken over."""
        return self.refused is None and not self.dropped


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
        auc: scores come with the area under the ROC curve.
    """

    workers = 1

    def __init__(self, method: Method, architectures: Architectures, auc: bool = False) -> None:
        self._method = method
        self._architectures = architectures
        self._memory = Memory(auc)

    def run(self, jobs: Sequence[Job], done: Callable[[int], None]) -> list[Outcome]:
        """See `Executor`."""
        outcomes = []
        for count, job in enumerate(jobs, 1):
            outcomes.append(carry_out(job, self._method, self._architectures))
            done(count)
        return outcomes

    def score(self, asked: Sequence[Scoring]) -> list[Scores]:
        """See `Executor`."""
        scores: list[Scores] = [score_parts(each, self._method, self._architectures, self._memory) for each in asked]
        self._memory.forget_content()
        return scores

    def close(self) -> None:
        """See `Executor`."""


def carry_out(job: Job, method: Method, architectures: Architectures) -> Outcome:
    """Receive, train, upload: on copies, so that a refused or failed client is as it was.

    Raises:
        RunError: the method failed; says for which client, in which round and at which stage.
    """
    client = at_work(job.client, job.variant, architectures)
    client.round, client.exchange = job.round, job.exchange.name
    stage, trained = "receiving", Trained()
    try:
        with scoped_global(derive(client.seed, "layers", client.exchange, client.round, client.id)):
            context = client.context = method.receive(client, read_only(job.message))
            if job.exchange.trains:
                stage = "training"
                trained = train(client, method, context, phases=job.exchange.phases)
            score, message = None, read_only({})
            bad = _untrained(job, trained, client.model)
            if bad is None and job.scores and len(client.data.test):
                stage = "scoring"
                score = score_model(client, method, client.data.test, job.auc)
            if bad is None:  # a model of NaN sends nothing: who knows what the method's upload makes of it
                stage = "uploading"
                message = read_only(copied(method.upload(client, trained)))
                if name := not_finite(message):
                    bad = f"the upload is not finite ('{name}')"
    except Exception as error:
        raise placed(error, client, stage, job.round) from error
    weights = {name: tensor.detach().cpu().clone() for name, tensor in client.model.state_dict().items()}
    passed_by = not job.exchange.trains and _still_initial(job.client, weights, job.variant, architectures)
    return Outcome(
        client.id,
        message,
        job.client.weights if passed_by else weights,
        client.state,
        trained,
        nbytes(message),
        {} if bad else numbers(trained.sums or {}),
        None if bad else score,
        bad,
    )


def score_parts(asked: Scoring, method: Method, architectures: Architectures, memory: Memory) -> dict[str, Score]:
    """The scores of all the parts asked for, by the same working copy of the client.

    Raises:
        RunError: the method failed; says for which client and in which round.
    """
    client = at_work(asked.client, asked.variant, architectures)
    client.round = asked.round
    try:
        if asked.message is not None:
            method.receive(client, read_only(asked.message))
        scores = {}
        for part in asked.parts:
            samples, others = getattr(client.data, part), part == "test"  # rounds are chosen by the method's own
            scores[part] = memory.score(client, method, samples, part in asked.shared, others)
        return scores
    except Exception as error:
        raise placed(error, client, "scoring", asked.round) from error


def placed(error: Exception, client: Client, stage: str, round: int) -> PolyfedError:
    """The error with client, round and stage in front."""
    if isinstance(error, PolyfedError):
        return type(error)(f"client {client.id}, round {round}, {stage}: {error}")
    place = f"client {client.id} ({client.architecture}), round {round}, {stage}"
    return RunError(f"{place}: {type(error).__name__}: {error}")


def at_work(client: Client, variant: str, architectures: Architectures) -> Client:
    """A working copy of the client with its weights in the template; the client itself stays as it is."""
    worker = copy.copy(client)
    worker.state = shallow(client.state)
    template = architectures.template(client.architecture, variant)
    weights = own_weights(client, variant, architectures)
    worker.bound = architectures.bound(client.architecture, variant, weights)
    template.train()
    return worker


def has_own(client: Client, variant: str, architectures: Architectures) -> bool:
    """Whether the client has weights of its own, and of its present network."""
    if client.weights is None:
        return False
    return _fits(client.weights, architectures.template(client.architecture, variant).state_dict())


def own_weights(client: Client, variant: str, architectures: Architectures) -> dict[str, Tensor]:
    """The client's weights, or those it starts from (again, if its network is now another one)."""
    if client.weights is not None:
        template = architectures.template(client.architecture, variant).state_dict()
        if _fits(client.weights, template):
            return {name: client.weights[name] for name in template}
    return architectures.begun(client.architecture, variant, client.id, client.given)


def _fits(weights: Mapping[str, Tensor], template: Mapping[str, Tensor]) -> bool:
    return all(name in weights and weights[name].shape == t.shape for name, t in template.items())


def _still_initial(client: Client, weights: dict[str, Tensor], variant: str, architectures: Architectures) -> bool:
    """Whether a client without weights of its own, of its present network, has them as it would start from them."""
    if has_own(client, variant, architectures):
        return False
    initial = own_weights(client, variant, architectures)
    return all(torch.equal(tensor, initial[name].cpu()) for name, tensor in weights.items())


def _untrained(job: Job, trained: Trained, model: nn.Module) -> str | None:
    """Why a client's work counts for nothing, if it does."""
    if job.exchange.trains and trained.steps == 0:
        return "no training step: too few samples for a batch of this model"
    if not math.isfinite(trained.loss):
        return f"the training loss is {trained.loss}"
    if name := not_finite({"model": model.state_dict()}):
        return f"the model is not finite ('{name}')"
    return None
