"""Whether a recipe works and what it will cost, from a few rounds on one client of each network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import nbytes
from polyfed.core.method import Exchange
from polyfed.engine.executors.vectorized import clients_per_batch
from polyfed.engine.federation import Federation
from polyfed.experiments.build import build_federation, refuse_unread_settings, resolve_recipe
from polyfed.experiments.cost_estimate import ArchitectureCheck, CostEstimate
from polyfed.experiments.data_cache import DataCache
from polyfed.experiments.trial_rounds import TRIED_BATCHES, TrialRounds
from polyfed.plugins.device_simulation import Duration, Workload, estimate_duration
from polyfed.plugins.upload_buffer import predict_rounds

__all__ = ["ArchitectureCheck", "CostEstimate", "check", "estimate_costs"]


def check(
    recipe: str | Path | Recipe,
    *,
    method: str | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    workers: int | None = None,
    executor: str | None = None,
    preset: str | None = None,
) -> CostEstimate:
    """Whether a recipe works and what it costs: one batch per architecture is trained on, nothing is written.

    The arguments are those of `run`.

    Raises:
        ConfigError: the request is wrong, or models and data do not fit the method.
        RunError: the method fails; says with which client.
    """
    options = {"seed": seed, "device": device, "workers": workers, "executor": executor, "preset": preset}
    resolved = resolve_recipe(recipe, overrides, method, **options)
    data = DataCache()
    federation = build_federation(resolved, data=data, pretrained=False)
    if method is None:
        refuse_unread_settings(federation)
    federated = data.federated(resolved)
    costs = estimate_costs(federation, unused=federated.unused, holdout=len(federated.holdout))
    return replace(costs, data_remarks=federated.remarks)


def estimate_costs(
    federation: Federation, unused: int = 0, holdout: int = 0, batches: int = TRIED_BATCHES
) -> CostEstimate:
    """Play two rounds with one client of each network. The federation cannot be run afterwards.

    Args:
        federation: ready to run.
        unused, holdout: rows of its data set that no client got, for the record.
        batches: at most so many are trained on with each network.

    Raises:
        RunError: the method fails; says with which client and in which round.
    """
    trial = TrialRounds(federation, batches)
    kinds = {kind.name: kind for kind in trial.play()}
    mine = [kinds[trial.networks[client.id]] for client in federation.clients]
    durations = _durations(federation, mine)
    shares = [
        _Share(client, kind, first, later)
        for client, kind, (first, later) in zip(federation.clients, mine, _asked(federation, durations), strict=True)
    ]
    rounds, workers = federation.training.rounds, federation.executor.workers
    availability = federation.plugin("availability").settings
    answers = 1 - availability.dropout_rate  # share of those asked whose upload arrives
    reached = answers if availability.dropout_stage == "before" else 1.0  # share of those asked that train
    exchanges = [federation.method.exchanges(number) for number in range(1, rounds + 1)]
    scoring = [
        share.kind.seconds_row
        * count_scored_rows(federation, share.client, reached * (share.first + share.later) / rounds)
        for share in shares
    ]
    work = [
        reached * _training_seconds(trial, share, exchanges) + _newcomer_seconds(federation, trial, share) + scored
        for share, scored in zip(shares, scoring, strict=True)
    ]
    server = rounds * trial.server_seconds
    final_down, final_up, final_seconds = (sum(kind.final_round[place] for kind in mine) for place in range(3))
    return CostEstimate(
        facts={
            **federation.facts,
            "classes": federation.classes,
            "class_names": federation.class_names,
            "feature_names": list(federation.task.feature_names),
        },
        architectures=tuple(kinds.values()),
        clients=tuple(_facts(client) for client in federation.clients),
        unused=unused,
        holdout=holdout,
        # one client's rounds follow each other
        seconds=max(sum(work) / workers, *work) + server + final_seconds / workers,
        bytes_up=answers * sum(share.of(share.kind.up) for share in shares) + final_up,
        bytes_down=reached * sum(share.of(share.kind.down) for share in shares) + final_down,
        nbytes=sum(kind.nbytes for kind in mine) + nbytes(federation.server.state),
        workers=workers,
        **_on_device(federation),
        seconds_server=server,
        seconds_scoring=sum(scored / workers for scored in scoring),
        data_nbytes=_data_bytes(federation),
        averaged=federation.averaged,
        class_remarks=(
            *federation.held_out_remarks(),
            *federation.test_row_remarks(),
            *federation.class_remarks(),
        ),
        **_simulated(federation, durations),
    )


@dataclass(frozen=True)
class _Share:
    """How often a client is asked and there, in expectation: first: in round 1; later: in all later rounds together."""

    client: Client
    kind: ArchitectureCheck
    first: float
    later: float

    def of(self, costs: tuple[int, int]) -> float:
        """What it costs in all rounds, from the costs of round 1 and of a later round."""
        return self.first * costs[0] + self.later * costs[1]


def _training_seconds(trial: TrialRounds, share: _Share, exchanges: Sequence[Sequence[Exchange]]) -> float:
    """Of a client in all rounds, scoring apart; if it is reached whenever it is asked."""
    steps = [trial.executor.steps(share.client, of_round) for of_round in exchanges]
    later_steps = sum(steps[1:]) / max(1, len(steps) - 1)  # of a round, on average
    trained = share.first * steps[0] + share.later * later_steps
    return share.kind.seconds_batch * trained + share.kind.seconds_rest * (share.first + share.later)


def _asked(federation: Federation, durations: Sequence[_Durations]) -> list[tuple[float, float]]:
    """How often each client is asked and there, in expectation: in round 1, and in all later rounds together."""
    if federation.plugin("devices").settings.buffer_size is not None:
        began, _ = _buffered(federation, durations)
        ids = [client.id for client in federation.clients]
        return [(began[0].count(i), sum(of_round.count(i) for of_round in began[1:])) for i in ids]
    there = federation.plugin("devices").availability() or [1.0] * len(federation.clients)
    first = [0.0] * len(federation.clients)
    later = [0.0] * len(federation.clients)
    for number in range(1, federation.training.rounds + 1):
        present = federation.present(number)
        asked = first if number == 1 else later
        for client_id in present:
            asked[client_id] += there[client_id] * federation.training.cohort_size(len(present)) / len(present)
    return list(zip(first, later, strict=True))


def count_scored_rows(federation: Federation, client: Client, trains: float) -> float:
    """How many rows of a client are scored in the whole run; in this share of the rounds it trains.

    What has not changed since it was last scored is not scored again.
    """
    if client.id in federation.held_out:
        return _evaluations(federation) * len(client.data.test)
    anew = {stage: 1.0 if stage == "received" else trains for stage in federation.stages}
    tested = len(client.data.test) + len(client.missing or ())
    rows = sum(anew.values()) * tested + anew[federation.stages[0]] * len(client.data.validation)
    return _evaluations(federation) * rows


def _evaluations(federation: Federation) -> int:
    """After how many rounds clients are scored."""
    rounds, every = federation.training.rounds, federation.evaluation.every_n_rounds
    return math.ceil(rounds / every) + bool(federation.method.final_exchanges())


def _on_device(federation: Federation) -> dict[str, Any]:
    """How many clients train as one, and what stays on a GPU between rounds."""
    asked, device = federation.execution, federation.model_factory.device
    found = {"stack": clients_per_batch(asked.executor, str(device), asked.workers)}
    if device.type == "cpu":
        return found
    store = federation.store
    return {**found, "device_nbytes": store.nbytes if store.on_device else 0}


def _newcomer_seconds(federation: Federation, trial: TrialRounds, share: _Share) -> float:
    """Of a client that is held out: what it trains for its scores, and these."""
    if share.client.id not in federation.held_out or not federation.evaluation.held_out_epochs:
        return 0.0
    first = [one for one in federation.method.exchanges(2) if one.trains][:1]
    steps = trial.executor.steps(share.client, first)
    scored = share.kind.seconds_row * len(share.client.data.test)
    return _evaluations(federation) * (share.kind.seconds_batch * steps + share.kind.seconds_rest + scored)


def _data_bytes(federation: Federation) -> int:
    """Bytes of all samples; what several look into counts once."""
    data = [client.data for client in federation.clients]
    parts = [part for own in data for part in (own.train, own.validation, own.test)]
    parts += [client.missing.whole for client in federation.clients if client.missing is not None]
    public = federation.server.public
    if public is not None:
        parts.append(public.samples)
    storages = [tensor.untyped_storage() for part in parts for tensor in (part.x, part.y)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


_Durations = tuple[Duration, Duration]  # of a client's work in round 1, and in a later round


def _durations(federation: Federation, mine: Sequence[ArchitectureCheck]) -> list[_Durations]:
    """What rounds would take on the clients' devices; of one network, operations are in proportion to rows."""
    simulation = federation.plugin("devices")
    if not simulation.enabled:
        return []
    found = []
    for client, kind in zip(federation.clients, mine, strict=True):
        rows = client.n / federation.clients[kind.client].n
        first, later = (
            estimate_duration(simulation.profile(client.id), Workload(down, round(rows * operations), up))
            for down, operations, up in zip(kind.down, kind.operations, kind.up, strict=True)
        )
        found.append((first, later))
    return found


def _buffered(federation: Federation, durations: Sequence[_Durations]) -> tuple[list[list[int]], float]:
    """Who begins in each round where uploads are buffered, and how long all rounds take."""
    return predict_rounds(
        federation.plugin("devices").settings,
        federation.training,
        federation.seed,
        federation.present,
        lambda number, client: durations[client][number > 1].seconds,
    )


def _simulated(federation: Federation, durations: Sequence[_Durations]) -> dict[str, Any]:
    """The clients' devices, and what all rounds would take on them."""
    simulation = federation.plugin("devices")
    if not simulation.enabled:
        return {}
    devices: list[dict[str, Any]] = []
    slowest = [0.0, 0.0]
    for client, of_client in zip(federation.clients, durations, strict=True):
        memory = simulation.profile(client.id).memory_bytes
        need = simulation.requirements[client.id]
        fits = client.id not in simulation.excluded
        later = of_client[1]
        device = {"id": client.id, "device": simulation.names[client.id], "memory": memory, "needs": need}
        devices.append({**device, "fits": fits, **later._asdict(), "seconds": later.seconds})
        if fits:
            slowest = [max(longest, own.seconds) for longest, own in zip(slowest, of_client, strict=True)]
    if simulation.settings.buffer_size is not None:
        return {"devices": tuple(devices), "simulated_seconds": _buffered(federation, durations)[1]}
    deadline = simulation.settings.round_timeout
    limit = math.inf if deadline is None else deadline
    first, later_rounds = (min(limit, longest) for longest in slowest)
    seconds = first + (federation.training.rounds - 1) * later_rounds
    return {"devices": tuple(devices), "simulated_seconds": seconds}


def _facts(client: Client) -> dict[str, Any]:
    data = client.data
    return {
        "id": client.id,
        "name": client.name,
        "architecture": client.architecture,
        "train": len(data.train),
        "validation": len(data.validation),
        "test": len(data.test),
        "labels": {int(label): count for label, count in data.train.counts().items()},
    }
