"""Whether a recipe works and what it will cost, from a few rounds on one client of each network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import nbytes
from polyfed.engine.executors.choice import clients_per_batch
from polyfed.engine.federation import Federation
from polyfed.engine.remarks import averaging, data_remarks
from polyfed.errors import MissingPackage, PolyfedError
from polyfed.experiments.build import build_federation
from polyfed.experiments.cost_estimate import CostEstimate
from polyfed.experiments.data_cache import DataCache
from polyfed.experiments.run import refuse_unread_settings, resolve_recipe
from polyfed.experiments.trial_rounds import TrialRounds
from polyfed.registry import METHODS
from polyfed.units import human_bytes, human_seconds

__all__ = ["Compatibility", "check", "check_methods", "estimate_costs", "format_lines"]

_SIZES = len("1023.9 KiB to 1023.9 KiB")


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
    """Whether a recipe works and what it costs: some batches per architecture are trained on, nothing is written.

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
    costs = estimate_costs(federation)
    return replace(
        costs,
        unused=federated.unused,
        holdout=len(federated.holdout),
        remarks=(*costs.remarks, *federated.remarks),
    )


# one federation -----------------------------------------------------------------------------------------------------


def estimate_costs(federation: Federation) -> CostEstimate:
    """Play two rounds with one client of each network. The federation cannot be run afterwards.

    Raises:
        RunError: the method fails; says with which client and in which round.
    """
    trial = TrialRounds(federation)
    kinds = {kind.name: kind for kind in trial.play()}
    mine = [kinds[trial.networks[client.id]] for client in federation.clients]
    asked = _asked(federation)
    rounds, workers = federation.training.rounds, federation.executor.workers
    availability = federation.plugin("availability").settings
    answers = 1 - availability.dropout_rate  # share of those asked whose upload arrives
    reached = answers if availability.dropout_stage == "before" else 1.0  # share of those asked that train
    exchanges = [federation.method.exchanges(number) for number in range(1, rounds + 1)]
    every = federation.evaluation.every_n_rounds
    scoring = []
    work = []
    up = down = 0.0
    for client, kind, (first, later) in zip(federation.clients, mine, asked, strict=True):
        trains = reached * (first + later) / rounds
        scored = kind.seconds_row * count_scored_rows(federation, client, trains, every)
        steps = [trial.executor.steps(client, of_round) for of_round in exchanges]
        later_steps = sum(steps[1:]) / max(1, len(steps) - 1)  # steps of a round, on average
        trained = kind.seconds_batch * (first * steps[0] + later * later_steps) + kind.seconds_rest * (first + later)
        scoring.append(scored)
        work.append(reached * trained + scored)
        up += answers * (first * kind.up[0] + later * kind.up[1])
        down += reached * (first * kind.down[0] + later * kind.down[1])
    device = federation.model_factory.device
    store = federation.store
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
        # one client's rounds follow each other
        seconds=max(sum(work) / workers, *work) + server + final_seconds / workers,
        bytes_up=up + final_up,
        bytes_down=down + final_down,
        nbytes=sum(kind.nbytes for kind in mine) + nbytes(federation.server.state),
        workers=workers,
        stack=clients_per_batch(federation.execution.executor, str(device), federation.execution.workers),
        device_nbytes=None if device.type == "cpu" else store.nbytes if store.on_device else 0,
        seconds_server=server,
        seconds_scoring=sum(scoring) / workers,
        data_nbytes=_data_bytes(federation),
        averaged=averaging(federation),
        remarks=tuple(data_remarks(federation)),
    )


def _asked(federation: Federation) -> list[tuple[float, float]]:
    """How often each client is asked and there, in expectation: in round 1, and in all later rounds together.

    Where uploads are buffered, as many are in a round as fill the buffer.
    """
    simulation = federation.plugin("devices")
    there = simulation.availability() or [1.0] * len(federation.clients)
    first = [0.0] * len(federation.clients)
    later = [0.0] * len(federation.clients)
    for number in range(1, federation.training.rounds + 1):
        present = federation.present(number)
        asked = first if number == 1 else later
        count = simulation.settings.buffer_size or federation.training.cohort_size(len(present))
        for client_id in present:
            asked[client_id] += there[client_id] * count / len(present)
    return list(zip(first, later, strict=True))


def count_scored_rows(federation: Federation, client: Client, trains: float, every: int) -> float:
    """How many rows of a client, which trains in this share of the rounds, are scored in the whole run.

    What has not changed since it was last scored is not scored again. every: rounds between evaluations.
    """
    rounds = federation.training.rounds
    evaluations = math.ceil(rounds / every) + bool(federation.method.final_exchanges())
    if client.id in federation.held_out:
        return evaluations * len(client.data.test)
    has_trained = 1 - (1 - trains) ** every
    anew = {stage: 1.0 if stage == "received" else has_trained for stage in federation.stages}
    tested = len(client.data.test) + len(client.missing or ())
    rows = sum(anew.values()) * tested + anew[federation.stages[0]] * len(client.data.validation)
    return evaluations * rows


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


# method by method ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compatibility:
    """Whether a recipe can run a method.

    Attributes:
        method: its name, or a variant's of the recipe. why: what does not fit; None where all does.
        down, up: network -> bytes to and from one client in rounds 1 and 2; empty where it does not fit.
        seconds: of a round on average.
    """

    method: str
    why: str | None
    down: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    up: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    seconds: float | None = None


def check_methods(base: Recipe, methods: Sequence[str] | None = None) -> Iterator[Compatibility]:
    """For every method, and every variant in the recipe's ``[methods]``: does it run on these models and data?

    With the hyperparameters that the recipe gives to a method; the others have their defaults. Two rounds are played
    with one client of every network. Nothing is written.

    Args:
        methods: only these methods and variants.

    Raises:
        ConfigError: a method is not known, or the data are not there.
    """
    names = list(dict.fromkeys([*METHODS, *base.variants()] if methods is None else methods))
    if methods is not None:
        for name in names:
            base.choose(name)  # one that is not known is an error before the first line
    data = DataCache()
    data.federated(base)
    for name in names:
        try:
            federation = build_federation(base.choose(name), data=data, pretrained=False)
            found = estimate_costs(federation)
        except MissingPackage:
            raise
        except PolyfedError as error:
            yield Compatibility(name, str(error))
        else:
            down = {kind.name: kind.down for kind in found.architectures}
            up = {kind.name: kind.up for kind in found.architectures}
            yield Compatibility(name, None, down, up, found.seconds_round)


def format_lines(found: Iterable[Compatibility]) -> Iterator[str]:
    """The answers of `check_methods` for a terminal, one by one: bytes per client, least to most, or why not.

    What several methods lack is said once, with the first of them.
    """
    column = max(map(len, METHODS))
    yield f"{'method':<{column}}  runs  {'down, per client':<{_SIZES}}  {'up, per client':<{_SIZES}}  a round"
    told: dict[str, str] = {}
    for one in found:
        if one.why is not None:
            why = " ".join(one.why.removeprefix(one.method).split())
            first = told.setdefault(why, one.method)
            yield f"{one.method:<{column}}  no    {why if first == one.method else f'as {first}'}"
            continue
        seconds = one.seconds or 0.0
        time = f"{1000 * seconds:.0f} ms" if seconds < 1 else human_seconds(seconds)
        yield f"{one.method:<{column}}  yes   {_range(one.down):<{_SIZES}}  {_range(one.up):<{_SIZES}}  {time}"


def _range(sizes: Mapping[str, tuple[int, int]]) -> str:
    """Of round 2; of round 1, too, where more is sent in it, as by methods that send something once."""
    first, later = zip(*sizes.values(), strict=True)
    once = f"{_span(first)}, then " if max(first) > max(later) else ""
    return once + _span(later)


def _span(sizes: Sequence[int]) -> str:
    low = human_bytes(min(sizes))
    high = human_bytes(max(sizes))
    return low if low == high else f"{low} to {high}"
