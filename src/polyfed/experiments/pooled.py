"""Training on the rows of all clients, which takes the data of all in one place: no federated method.

With ``run.control = "pooled"`` all clients of a network share one, which a round trains with the epochs of
``[training]`` on the rows of all: the job of the first of them does, and the others take over its weights. It is scored
on the test rows of each client k, in three ways:

pooled    by the shared network: argmax over all classes of s_c(x), also over those that the client has no rows of
shares    argmax of s_c(x) + log(pi_kc / pi_c), with the shares pi_k of the classes in the client's training rows, and
          pi in those of all
tuned     by the shared network after E more epochs on the client's own training rows. E, of 1 to `MOST_EPOCHS` and the
          same for all clients, has the best accuracy, or RMSE, over the validation rows of all clients; 1 without any

The first is the network that the run keeps, in every round; the others are further predictors of it
(`Method.alternative_predictors`). The tuned weights come of a final round, and lie in the client's state; before it,
"tuned" is as "pooled". Where numbers are predicted there are no shares: each client's numbers are in its own unit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import Message, get_group, get_tensor, members
from polyfed.core.method import Context, Exchange, Method, Phase, TrainingResult
from polyfed.core.modules import FrozenModel, load_state
from polyfed.core.server import Server
from polyfed.data.samples import ClientData, LabeledSamples
from polyfed.engine.executors.executor import Done, RunJobs
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.scoring import evaluate_model, part_of
from polyfed.errors import ConfigError
from polyfed.functional.closed_forms import share_shift
from polyfed.methods.local import Local

__all__ = ["MOST_EPOCHS", "OTHER_SECTIONS", "pool"]

MOST_EPOCHS = 5  # on a client's own rows
# what is not plain training
OTHER_SECTIONS = ("availability", "privacy", "devices", "robust_aggregation", "adversaries", "secure_sums")

# names of exchanges, and of what is kept
_SHARES = "class shares"
_TUNE = "tune "
_RESTORE = "restore"
_POOLED = "pooled weights"
_TUNED = "tuned weights"


def pool(
    recipe: Recipe, clients: Sequence[ClientData], classes: int
) -> tuple[Method, list[ClientData], Callable[[RunJobs], RunJobs]]:
    """What trains on the rows of all, the rows that each client then has, and what shares a network among its clients.

    clients: with their own training rows. classes: their number; 0: numbers are predicted.

    Raises:
        ConfigError: a recipe asks for more than plain training; says what is in the way.
    """
    on = [section for section in OTHER_SECTIONS if getattr(recipe, section).effective()]
    wrong = ""
    if recipe.method.name != "local":
        wrong = f"the method '{recipe.method.name}'"
    elif on:
        wrong = f"[{on[0]}]"
    elif recipe.training.client_fraction < 1:
        wrong = f"training.client_fraction = {recipe.training.client_fraction:g}"
    elif recipe.data.label_space == "own":
        wrong = "data.label_space 'own'"
    elif recipe.evaluation.held_out:
        wrong = "evaluation.held_out"
    if wrong:
        raise ConfigError(
            f"run.control '{recipe.run.control}': expected plain training on the rows of all (method 'local', all "
            f"clients, nothing else), got {wrong}"
        )
    has_validation = any(len(client.validation) for client in clients)
    method = Pooled(_own_rows(clients), _shifts(clients, classes), MOST_EPOCHS if has_validation else 1)
    return method, _with_pooled_rows(clients), shared_by_network


def _with_pooled_rows(clients: Sequence[ClientData]) -> list[ClientData]:
    """The clients' data, each with the training rows of all, in the order of the clients."""
    x = torch.cat([client.train.x for client in clients])
    y = torch.cat([client.train.y for client in clients])
    everybody = LabeledSamples(x, y)
    if not everybody.are_numbers:
        return [dataclasses.replace(client, train=everybody) for client in clients]
    # numbers to predict are in each client's own unit, as those of a network that is averaged
    return [dataclasses.replace(client, train=LabeledSamples(x, y, client.train.scale)) for client in clients]


def _own_rows(clients: Sequence[ClientData]) -> list[Tensor]:
    """Which of the rows of all are each client's own: (N_k,) int64."""
    ends = list(itertools.accumulate(len(client.train) for client in clients))
    return [torch.arange(end - len(client.train), end) for end, client in zip(ends, clients, strict=True)]


def _shifts(clients: Sequence[ClientData], classes: int) -> list[Tensor]:
    """log(pi_kc / pi_c) for each client: (C,); none where numbers are predicted."""
    if not classes:
        return []
    counts = [torch.bincount(client.train.y, minlength=classes) for client in clients]
    every = torch.stack(counts).sum(dim=0)
    return [share_shift(own, every) for own in counts]


class Pooled(Local):
    """Local training, where a client has the rows of all; at the end for some epochs on its own.

    No argument is a hyperparameter: they follow from the data.

    Args:
        rows: which are each client's own. shifts: what is added to its scores by shares; none: there are none.
        most: epochs that are tried on a client's own rows.
    """

    name = "local"  # by which a recipe makes it again
    rows: Sequence[Tensor]
    shifts: Sequence[Tensor]
    most: int

    def __init__(self, rows: Sequence[Tensor], shifts: Sequence[Tensor], most: int) -> None:
        super().__init__()
        vars(self).update(rows=rows, shifts=shifts, most=most)  # hyperparameters are frozen, and so is what has them

    @property
    def alternative_predictors(self) -> Mapping[str, Method]:
        by_shares = {"shares": ByShares()} if self.shifts else {}
        return {**by_shares, "tuned": Tuned()}

    def exchanges(self, round: int) -> Sequence[Exchange]:
        """Before the first round's training every client notes its shares."""
        notes = round == 1 and self.shifts
        return (Exchange(_SHARES, trains=False), Exchange()) if notes else (Exchange(),)

    def final_exchanges(self) -> Sequence[Exchange]:
        """An epoch on the client's own rows in each exchange; then the pooled weights again."""
        epoch = (Phase(1, rows="rows", follows_schedule=False),)
        tuning = (Exchange(f"{_TUNE}{number}", "all", phases=epoch) for number in range(1, self.most + 1))
        return (*tuning, Exchange(_RESTORE, "all", trains=False))

    # server ------------------------------------------------------------------------------------------------
    def broadcast(self, server: Server, client_id: int) -> Message:
        """Say whether the epochs of the last exchange are the best so far."""
        if server.exchange != _RESTORE and not server.exchange.startswith(_TUNE):
            return {}
        tuning = members(server.state, "tuning")
        return {"is_best": torch.tensor(bool(tuning) and bool(tuning["best"] == tuning["epochs"]))}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Keep the number of epochs that is best on the validation rows of all; of equals the fewest."""
        rows = sum(int(get_tensor(upload, "n")) for upload in uploads.values() if "n" in upload)
        sign = 1 if server.classes else -1  # of what is best: the share that is right, or minus the mean squared error
        found = {}
        for name in ("total", "by_shares"):
            total = sum(float(get_tensor(upload, name)) for upload in uploads.values() if name in upload)
            found[name] = sign * total / max(rows, 1)
        if server.exchange == _RESTORE and rows:
            server.log["validation"] = _as_score(found["total"], server.classes)
            if self.shifts:
                server.log["validation_by_shares"] = _as_score(found["by_shares"], server.classes)
        if not server.exchange.startswith(_TUNE):
            return
        epochs = int(server.exchange.removeprefix(_TUNE))
        merit = found["total"]
        best = members(server.state, "tuning")
        if epochs == 1 or merit > float(best["merit"]):
            best = {"best": torch.tensor(epochs), "merit": torch.tensor(merit, dtype=torch.float64)}
        server.state["tuning"] = {**best, "epochs": torch.tensor(epochs)}
        server.log["tuned_epochs"] = int(best["best"])
        if rows:
            server.log[f"validation_after_{epochs}"] = _as_score(merit, server.classes)

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        """In the final round: keep the weights if they are the best so far, and name the client's own rows."""
        if client.exchange == "train":
            return {}
        if client.exchange == _SHARES:
            client.state["shift"] = self.shifts[client.id]
            return {}
        weights = {name: tensor.detach().clone() for name, tensor in client.model.state_dict().items()}
        client.state.setdefault(_POOLED, weights)
        if get_tensor(message, "is_best"):
            client.state[_TUNED] = weights
        if client.exchange == _RESTORE:
            load_state(client.model, get_group(client.state, _POOLED))
            del client.state[_POOLED]
        return {"rows": self.rows[client.id]}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        """In the final round: on validation rows, how many are right, or the sum of squared errors."""
        if client.exchange != _RESTORE and not client.exchange.startswith(_TUNE):
            return {}
        found = {"total": _on_validation(client, self), "n": torch.tensor(len(client.data.validation))}
        if client.exchange == _RESTORE and self.shifts:
            found["by_shares"] = _on_validation(client, ByShares())
        return found


def _on_validation(client: Client, method: Method) -> Tensor:
    samples = client.data.validation
    total = 0.0
    if len(samples):
        (score,) = evaluate_model(client, method, [part_of(client, "validation")])
        total = round(score.value * score.total) if client.classes else score.value**2 * score.total
    return torch.tensor(total, dtype=torch.float64)


def _as_score(merit: float, classes: int) -> float:
    return merit if classes else (-merit) ** 0.5


class ByShares(Local):
    """Scores of a network that was trained on the rows of all, for the shares of the client's classes."""

    name = "local"  # by which a recipe makes it again

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """See `share_shift`."""
        shift: Tensor = context["shift"].to(x.device)
        return super().predict(model, x, context) + shift


class Tuned(Local):
    """Scores of the network after training on the client's own rows; before that, of the network as it is."""

    name = "local"  # by which a recipe makes it again

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """By the weights that the client keeps."""
        if _TUNED not in context:
            return super().predict(model, x, context)
        weights = {name: tensor.to(x.device) for name, tensor in get_group(context, _TUNED).items()}
        return super().predict(FrozenModel(model, weights), x, context)


def shared_by_network(run: RunJobs) -> RunJobs:
    """Runs one job per network, whose outcome is that of all clients of that network.

    Only where the rows of all are trained on; on its own rows each client has its own job.
    """

    def run_shared(jobs: Sequence[TrainJob], done: Done) -> list[JobResult]:
        if any(job.exchange.name != "train" for job in jobs):
            return run(jobs, done)
        first = {job.client.architecture: job for job in reversed(jobs)}
        asked = sorted(first.values(), key=lambda job: job.client.id)
        outcomes = run(asked, done)
        found = {job.client.architecture: outcome for job, outcome in zip(asked, outcomes, strict=True)}
        done(len(jobs))
        return [_of_client(found[job.client.architecture], job.client) for job in jobs]

    return run_shared


def _of_client(outcome: JobResult, client: Client) -> JobResult:
    """The outcome as this client's, which keeps its own state; work counts where it was done."""
    if outcome.client_id == client.id:
        return outcome
    trained = TrainingResult()
    return dataclasses.replace(
        outcome, client_id=client.id, state=client.state, trained=trained, sums={}, score=None, operations=0
    )
