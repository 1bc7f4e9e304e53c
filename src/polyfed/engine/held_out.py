"""Clients that are held out of training and scored as newcomers: `[evaluation] held_out`.

They are in no round. The server does not know of them, as of a client that has yet to join: nothing of theirs is
aggregated, and no draw of another client changes. After a round that is evaluated, each of them receives, by itself,
what the server would send to somebody who joins now, and is scored with it ("received"). With `held_out_epochs` it then
trains on its own rows as the method has clients train, with so many local epochs, and is scored again
("after_training"). Nothing of that is kept or uploaded: the next evaluation begins anew.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from polyfed.core.client import Client
from polyfed.core.message import Message, freeze
from polyfed.core.method import Method
from polyfed.core.randomness import generator
from polyfed.core.server import Server
from polyfed.core.settings import EACH_GROUP, Evaluation
from polyfed.data.samples import LabeledSamples
from polyfed.engine.evaluation_record import summarize
from polyfed.engine.executors.base import Executor
from polyfed.engine.executors.jobs import EvalJob, TrainJob
from polyfed.engine.scoring import Score
from polyfed.errors import ConfigError
from polyfed.escaping import clients_text


def held_out_of(evaluation: Evaluation, clients: Sequence[Client], seed: int) -> frozenset[int]:
    """The numbers of the clients that are held out.

    Args:
        evaluation: says how many, which are then drawn, or which. clients: all, by number. seed: of the draw.

    Raises:
        ConfigError: no such client, nobody left to train, or none of them has test rows.
    """
    asked = evaluation.held_out
    if asked == EACH_GROUP:
        raise ConfigError(
            f"evaluation.held_out: expected a number or a list in a single run, got '{EACH_GROUP}', which is for "
            "`polyfed compare`"
        )
    count = len(clients)
    if isinstance(asked, int):
        order = torch.randperm(count, generator=generator(seed, "held out"))
        numbers = frozenset(order[:asked].tolist())
    else:
        numbers = frozenset(_number(value, count) for value in asked)
    if numbers and (asked if isinstance(asked, int) else len(numbers)) >= count:
        raise ConfigError(
            f"evaluation.held_out: expected fewer than the {count} clients, as one at least trains, got {asked}"
        )
    if numbers and not any(len(clients[number].data.test) for number in numbers):
        told = clients_text(numbers, [client.name for client in clients])
        raise ConfigError(f"evaluation.held_out: expected clients with test rows, got clients {told} without any")
    return numbers


def _number(value: int | str, count: int) -> int:
    """A client's number as it was given."""
    if isinstance(value, int) and 0 <= value < count:
        return value
    hint = "; groups go by name in a recipe with data.partition 'by_group'" if isinstance(value, str) else ""
    raise ConfigError(f"evaluation.held_out: expected numbers of clients from 0 to {count - 1}, got {value!r}{hint}")


def remarks_on(held_out: Collection[int], names: Sequence[str]) -> list[str]:
    """What a user is told of them before round 1. names: of all clients."""
    return [f"held out of training: clients {clients_text(held_out, names)}"] if held_out else []


class Newcomers:
    """Scores the clients that are held out, as if each of them joined now.

    Args:
        clients: all, by number. executor: does the work. held_out: who is held out.
        from_scores: figures that need the scores of all samples, as the executor takes them.
        shared_test: the samples that all are tested on.
    """

    def __init__(
        self,
        method: Method,
        clients: Sequence[Client],
        server: Server,
        executor: Executor,
        evaluation: Evaluation,
        held_out: Collection[int],
        from_scores: Sequence[str],
        shared_test: LabeledSamples | None,
    ) -> None:
        self._method = method
        self._server = server
        self._executor = executor
        self._evaluation = evaluation
        self._from_scores = from_scores
        self._shared_test = shared_test
        self._clients = [clients[number] for number in sorted(held_out) if len(clients[number].data.test)]
        if evaluation.held_out_epochs:
            for client in self._clients:
                client.training = client.training.model_copy(update={"local_epochs": evaluation.held_out_epochs})

    def record(self) -> dict[str, Any]:
        """The figures for the round's record; nothing where nobody is held out."""
        if not self._clients:
            return {}
        scores = {"received": self._received()}
        if self._evaluation.held_out_epochs:
            scores["after_training"] = self._trained()
        told = {stage: found for stage, found in scores.items() if found}
        return {
            "held_out": {stage: summarize(found.values(), self._evaluation.weighting) for stage, found in told.items()},
            "held_out_per_client": {
                stage: {str(number): getattr(score, score.main.name) for number, score in found.items()}
                for stage, found in told.items()
            },
        }

    def _received(self) -> dict[int, Score]:
        """Each with what it would receive now."""
        asked = []
        for client, message, variant in self._sent("train"):
            shared = ["test"] if client.data.test is self._shared_test else []
            asked.append(EvalJob(client, variant, message or None, self._server.round, ["test"], shared))
        found = self._executor.score(asked)
        return {one.client.id: scores["test"] for one, scores in zip(asked, found, strict=True) if "test" in scores}

    def _trained(self) -> dict[int, Score]:
        """Each after local training on what it would receive now; nothing in a round in which nobody trains."""
        number = self._server.round
        training = [(place, one) for place, one in enumerate(self._method.exchanges(number)) if one.trains]
        if not training:
            return {}
        place, exchange = training[0]
        jobs = [
            TrainJob(
                client,
                freeze(message),
                variant,
                exchange,
                number,
                scores=True,
                from_scores=self._from_scores,
                exchange_index=place,
                uploads=False,
            )
            for client, message, variant in self._sent(exchange.name)
        ]
        outcomes = self._executor.run(jobs, lambda done: None)
        return {outcome.client_id: outcome.score for outcome in outcomes if outcome.score is not None}

    def _sent(self, exchange: str) -> Iterator[tuple[Client, Message, str]]:
        """Each with what the server would send it in an exchange, and the variant of its network."""
        for client in self._clients:
            trial = copy.copy(self._server)
            trial.state = dict(self._server.state)
            trial.log = {}
            trial.exchange = exchange
            trial.set_available(sorted([*self._server.clients, client.id]))
            yield client, self._method.broadcast(trial, client.id), self._method.variant(trial, client.id)
