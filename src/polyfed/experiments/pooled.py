"""The ceiling: each network trained on everybody's training rows, scored on each client's own test rows.

No federated method, as it needs the data of all in one place. All clients of a network share one: the job of the first
of them trains it, and the others take over its weights. With ``run.control = "pooled"`` a round has the epochs of
``[training]`` over the rows of all clients; with "pooled-steps" as many steps as a client takes on average, each on
rows that are drawn of all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Context, Method, Phase, TrainingResult
from polyfed.core.settings import Training
from polyfed.data.samples import ClientData, LabeledSamples
from polyfed.engine.executors.client_work import Executor
from polyfed.engine.executors.jobs import EvalJob, JobResult, Scores, TrainJob
from polyfed.errors import ConfigError
from polyfed.methods.local import Local

__all__ = ["is_pooled", "pool"]

_SECTIONS = ("availability", "privacy", "compression", "devices", "robust_aggregation", "adversaries")


def is_pooled(recipe: Recipe) -> bool:
    """Whether clients train on the rows of all."""
    return recipe.run.control in ("pooled", "pooled-steps")


def pool(
    recipe: Recipe, clients: Sequence[ClientData]
) -> tuple[Method, list[ClientData], Callable[[Executor], Executor]]:
    """What a ceiling trains by, the rows that each client trains on, and what shares a network among its clients.

    clients: with their own training rows.

    Raises:
        ConfigError: a recipe cannot be that of a ceiling; says what is in the way.
    """
    on = [section for section in _SECTIONS if getattr(recipe, section).effective()]
    wrong = ""
    if recipe.method.name != "local":
        wrong = f"the method '{recipe.method.name}'"
    elif on:
        wrong = f"[{on[0]}]"
    elif recipe.training.client_fraction < 1:
        wrong = f"training.client_fraction = {recipe.training.client_fraction:g}"
    elif recipe.run.executor == "ray":
        wrong = "run.executor 'ray'"
    elif recipe.data.label_space == "own":
        wrong = "data.label_space 'own'"
    elif recipe.evaluation.held_out:
        wrong = "evaluation.held_out"
    if wrong:
        raise ConfigError(
            f"run.control '{recipe.run.control}': expected plain training on the rows of all (method 'local', all "
            f"clients, nothing else), got {wrong}"
        )
    return _method(recipe, clients), _with_pooled_rows(clients), SharedByNetwork


def _with_pooled_rows(clients: Sequence[ClientData]) -> list[ClientData]:
    """The clients' data, each with the training rows of all, in the order of the clients."""
    x = torch.cat([client.train.x for client in clients])
    y = torch.cat([client.train.y for client in clients])
    everybody = LabeledSamples(x, y)
    if not everybody.are_numbers:
        return [dataclasses.replace(client, train=everybody) for client in clients]
    # numbers to predict are in each client's own unit, as those of a network that is averaged
    return [dataclasses.replace(client, train=LabeledSamples(x, y, client.train.scale)) for client in clients]


def _method(recipe: Recipe, clients: Sequence[ClientData]) -> Method:
    """Local; where a round is to have a client's steps, with so many rows that are drawn."""
    if recipe.run.control == "pooled":
        return Local()
    mean = sum(len(client.train) for client in clients) / len(clients)
    return LocalByRows(rows=max(1, round(recipe.training.local_epochs * mean)))


class LocalByRows(Local):
    """Local training on so many rows in every round, drawn anew: without replacement as long as there are others.

    Args:
        rows: per round, each seen once. No hyperparameter: it follows from the data.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        vars(self)["rows"] = rows

    def receive(self, client: Client, message: Message) -> Context:
        """Draw the round's rows: (M,) int64."""
        draws = client.generator("pooled rows")
        wanted: int = vars(self)["rows"]
        passes = math.ceil(wanted / client.n)
        every = torch.cat([torch.randperm(client.n, generator=draws) for _ in range(passes)])
        return {"rows": every[:wanted]}

    def phases(self, training: Training) -> Sequence[Phase]:
        """One pass over them."""
        return (Phase(1, rows="rows"),)


class SharedByNetwork:
    """Runs one job per network, whose outcome is that of all clients of that network.

    Args:
        inner: carries out the jobs.
    """

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.workers = inner.workers

    def run(self, jobs: Sequence[TrainJob], done: Callable[[int], None]) -> list[JobResult]:
        """See `Executor`."""
        first = {job.client.architecture: job for job in reversed(jobs)}
        asked = sorted(first.values(), key=lambda job: job.client.id)
        outcomes = self._inner.run(asked, done)
        found = {job.client.architecture: outcome for job, outcome in zip(asked, outcomes, strict=True)}
        done(len(jobs))
        return [_of_client(found[job.client.architecture], job.client.id) for job in jobs]

    def score(self, asked: Sequence[EvalJob]) -> list[Scores]:
        """See `Executor`."""
        return self._inner.score(asked)

    def close(self) -> None:
        """See `Executor`."""
        self._inner.close()


def _of_client(outcome: JobResult, client_id: int) -> JobResult:
    """The outcome as this client's; work counts where it was done."""
    if outcome.client_id == client_id:
        return outcome
    return dataclasses.replace(
        outcome, client_id=client_id, trained=TrainingResult(), sums={}, score=None, operations=0
    )
