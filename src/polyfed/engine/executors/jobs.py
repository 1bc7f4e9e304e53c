"""What is asked of a client, and its result."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, State, freeze
from polyfed.core.method import Exchange, Method, TrainingResult
from polyfed.core.server import PublicPass
from polyfed.engine.scoring import Score
from polyfed.errors import PolyfedError, RunError

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TrainJob:
    """One client's part in an exchange: what it is sent, which of its networks it trains."""

    client: Client
    message: Message
    variant: str
    exchange: Exchange
    round: int
    scores: bool = False  # score it right after local training, too
    figures: Sequence[str] = ()  # with these beside the main score
    is_final: bool = False  # the exchange is one of the final round's
    exchange_index: int = 0  # where among the round's exchanges it stands
    counted: bool = False  # tell how many operations it takes
    device: torch.device = _CPU  # where its upload is wanted (`core.message.places_of`)
    uploads: bool = True  # else nothing comes of it but a score: it sends nothing, and the client stays as it is


def make_job(
    method: Method,
    client: Client,
    message: Message,
    *,
    round: int,
    exchange_index: int,
    is_final: bool = False,
    **more: Any,
) -> TrainJob:
    """A client's part in an exchange of a round, wherever it works. more: fields of `TrainJob`."""
    exchanges = method.final_exchanges() if is_final else method.exchanges(round)
    return TrainJob(
        client,
        freeze(message),
        exchange=exchanges[exchange_index],
        round=round,
        is_final=is_final,
        exchange_index=exchange_index,
        **more,
    )


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
class EvalBatch:
    """Clients that are scored together: one, or several that are sent the same and then hold the same model."""

    jobs: Sequence[EvalJob]

    @property
    def client(self) -> Client:
        """The first."""
        return self.jobs[0].client

    @property
    def round(self) -> int:
        return self.jobs[0].round

    @property
    def title(self) -> str:
        """All of them in messages: "client 0, client 3 ('north')"."""
        return ", ".join(job.client.title for job in self.jobs)

    @property
    def architecture(self) -> str:
        """Of all of them."""
        return self.client.architecture


Job = TrainJob | EvalBatch | PublicPass
Scores = Mapping[str, Score]  # part of the data -> score


@dataclass(frozen=True)
class JobResult:
    """The result of a job. `message` is what left the client, `bytes_up` its size.

    `refused` says why nothing of it counts; `dropped`: nothing arrived. Weights and state do not matter then.
    """

    client_id: int
    message: Message = field(default_factory=lambda: freeze({}))
    weights: Mapping[str, Tensor] | None = None  # those from before where it was asked something and changed nothing
    state: State = field(default_factory=dict)
    trained: TrainingResult = field(default_factory=TrainingResult)
    bytes_up: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    score: Score | None = None
    refused: str | None = None
    dropped: bool = False
    largest: float = 0.0  # of what lies on a device of the message, the largest magnitude
    operations: int = 0  # of receiving, training, uploading, where they are counted
    is_remote: bool = False  # it comes from another machine, and nothing of its message is known

    @property
    def counts(self) -> bool:
        """Whether its message, weights and state are taken over."""
        return self.refused is None and not self.dropped


def placed(error: Exception, client: Client | EvalBatch, stage: str, round: int) -> PolyfedError:
    """The error with client, or clients scored together, round and stage in front."""
    if isinstance(error, PolyfedError):
        return type(error)(f"{client.title}, round {round}, {stage}: {error}")
    place = f"{client.title} ({client.architecture}), round {round}, {stage}"
    why = "memory ran out" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
    return RunError(f"{place}: {why}")
