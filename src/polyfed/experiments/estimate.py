"""Whether a recipe works and what it will cost, from a few rounds on one client of each network."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import nbytes
from polyfed.engine.executors.choice import clients_per_batch
from polyfed.engine.federation import Federation
from polyfed.engine.remarks import averaging, data_remarks
from polyfed.errors import MissingPackage, PolyfedError
from polyfed.escaping import clients_text
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache
from polyfed.experiments.run import refuse_unread_settings, resolve_recipe
from polyfed.experiments.trial_rounds import NetworkCost, TrialRounds
from polyfed.registry import METHODS
from polyfed.report.text_tables import Column, render_text
from polyfed.units import human_bytes, human_seconds

__all__ = ["CostEstimate", "check", "check_methods", "estimate_costs", "format_lines"]

_SIZES = len("1023.9 KiB to 1023.9 KiB")
_SHOWN_CLIENTS = 20  # lines of the table of clients
_SHOWN_FEATURES = 40  # columns of a table
_NAME = 24  # characters of a client's name
_LABELS = 60  # characters of a client's labels, about
_WIDTH = 120  # columns of lines that are wrapped


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
    rows = f"rows: {len(federated.holdout)} held out for the server, {federated.unused} unused"
    return replace(costs, remarks=(*costs.remarks, *federated.remarks, rows))


# one federation -----------------------------------------------------------------------------------------------------


def estimate_costs(federation: Federation) -> CostEstimate:
    """Play two rounds with one client of each network. The federation cannot be run afterwards.

    A final round counts as one more, and a client's training takes as long for each row as that of the client whose
    network was measured.

    Raises:
        RunError: the method fails; says with which client and in which round.
    """
    trial = TrialRounds(federation)
    networks = {network.name: network for network in trial.play()}
    mine = [networks[trial.networks[client.id]] for client in federation.clients]
    rounds = federation.training.rounds
    bytes_up = bytes_down = training = 0.0
    for number in range(1, rounds + (2 if federation.method.final_exchanges() else 1)):
        is_final = number > rounds
        place = 2 if is_final else min(number, 2) - 1
        present = federation.present(number)
        share = 1.0 if is_final else _asked(federation, len(present))
        for client_id in present:
            network = mine[client_id]
            work = network.work
            bytes_up += share * network.up[place]
            bytes_down += share * network.down[place]
            longer = federation.clients[client_id].n / network.rows
            training += share * (longer * work.seconds_training + work.seconds_rest)
    scored = sum(
        (len(client.data.test) + len(client.data.validation)) * network.work.seconds_row
        for client, network in zip(federation.clients, mine, strict=True)
    )
    evaluations = math.ceil(rounds / federation.evaluation.every_n_rounds) * len(federation.stages)
    workers = federation.executor.workers
    return CostEstimate(
        facts={
            **federation.facts,
            "classes": federation.classes,
            "class_names": federation.class_names,
            "feature_names": list(federation.task.feature_names),
        },
        architectures=tuple(networks.values()),
        clients=tuple(_facts(client) for client in federation.clients),
        seconds={
            "training": training / workers,
            "scoring": evaluations * scored / workers,
            "the server": rounds * trial.server_seconds,
        },
        bytes_up=bytes_up,
        bytes_down=bytes_down,
        memory=_memory(federation, mine),
        workers=workers,
        averaged=averaging(federation),
        remarks=tuple(data_remarks(federation)),
    )


def _asked(federation: Federation, present: int) -> float:
    """The share of those present that is asked in a round; where uploads are buffered, as many as fill the buffer."""
    count = federation.plugin("devices").settings.buffer_size or federation.training.cohort_size(present)
    return float(count / present)


def _memory(federation: Federation, networks: Sequence[NetworkCost]) -> dict[str, int]:
    """Bytes by what takes them. networks: of each client."""
    beside = federation.model_factory.frozen_network
    weights = sum(network.work.nbytes for network in networks) + nbytes(federation.server.state)
    asked = federation.execution
    stack = clients_per_batch(asked.executor, str(federation.model_factory.device), asked.workers)
    largest = max(network.work.peak * min(stack, network.clients) for network in networks)
    return {
        "weights and states": weights + (0 if beside is None else beside.nbytes),
        "data": _data_bytes(federation),
        "at work": federation.executor.workers * largest,
    }


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


def check_methods(
    base: Recipe, methods: Sequence[str] | None = None
) -> Iterator[tuple[str, CostEstimate | PolyfedError]]:
    """For every method, and every variant in the recipe's ``[methods]``: its costs, or why it does not fit.

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
            yield name, estimate_costs(build_federation(base.choose(name), data=data, pretrained=False))
        except MissingPackage:
            raise
        except PolyfedError as error:
            yield name, error


def format_lines(found: Iterable[tuple[str, CostEstimate | PolyfedError]]) -> Iterator[str]:
    """The answers of `check_methods` for a terminal, one by one: bytes per client, least to most, or why not.

    What several methods lack is said once, with the first of them.
    """
    column = max(map(len, METHODS))
    yield f"{'method':<{column}}  runs  {'down, per client':<{_SIZES}}  {'up, per client':<{_SIZES}}  a round"
    told: dict[str, str] = {}
    for name, answer in found:
        if isinstance(answer, PolyfedError):
            why = " ".join(str(answer).removeprefix(name).split())
            first = told.setdefault(why, name)
            yield f"{name:<{column}}  no    {why if first == name else f'as {first}'}"
            continue
        down = _range([network.down for network in answer.architectures])
        up = _range([network.up for network in answer.architectures])
        seconds = answer.seconds_round
        time = f"{1000 * seconds:.0f} ms" if seconds < 1 else human_seconds(seconds)
        yield f"{name:<{column}}  yes   {down:<{_SIZES}}  {up:<{_SIZES}}  {time}"


def _range(sizes: Sequence[tuple[int, ...]]) -> str:
    """Of round 2; of round 1, too, where more is sent in it, as by methods that send something once."""
    first = [by_round[0] for by_round in sizes]
    later = [by_round[1] for by_round in sizes]
    return f"{_span(first)}, then {_span(later)}" if max(first) > max(later) else _span(later)


def _span(sizes: Sequence[int]) -> str:
    low = human_bytes(min(sizes))
    high = human_bytes(max(sizes))
    return low if low == high else f"{low} to {high}"


# as data and as a page for people -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CostEstimate:
    """What a federation would do. ``str(check)`` is a page for people.

    Attributes:
        facts: method, dataset, rounds and so on, as in `result.json`.
        architectures: one entry for each network that is trained.
        clients: one entry each: id, architecture, train, validation, test (rows), labels (class -> training rows).
        seconds, bytes_up, bytes_down: estimates for the whole run, if it does not stop early; seconds by what takes
            them: training, scoring, the server.
        memory: bytes by what takes them: weights and states of all clients and the server; the clients' data and those
            that everybody may see; the largest network at work in every worker, of all clients that train as one.
            Python and PyTorch are not counted.
        workers: processes that do the clients' work.
        averaged: what the method averages with whom, in a line; "" where it averages no networks.
        remarks: who is held out of training; what is odd about the classes
            (`polyfed.data.classes.remarks`) and the data set (`FederatedDataset.remarks`); rows that nobody trains on.
    """

    facts: Mapping[str, Any]
    architectures: tuple[NetworkCost, ...]
    clients: tuple[Mapping[str, Any], ...]
    seconds: Mapping[str, float]
    bytes_up: float
    bytes_down: float
    memory: Mapping[str, int]
    workers: int = 1
    averaged: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def seconds_round(self) -> float:
        """Of a round, on average."""
        return sum(self.seconds.values()) / int(self.facts["rounds"])

    def __repr__(self) -> str:
        return "\n".join(_page(self))


# the page ---------------------------------------------------------------------------------------------------------


def _page(check: CostEstimate) -> Iterator[str]:
    facts = check.facts
    yield (
        f"{facts['label'] or facts['method']} on {facts['dataset']}: {facts['clients']} clients, "
        f"{facts['rounds']} rounds, seed {facts['seed']}. Models and data fit the method."
    )
    yield from _wrap([check.averaged])
    yield ""
    yield from _networks(check.architectures)
    yield from _clients(check)
    yield ""
    features = facts["feature_names"]
    classes = facts["class_names"]
    if features:
        more = f", ... and {len(features) - _SHOWN_FEATURES} more" if len(features) > _SHOWN_FEATURES else ""
        yield from _wrap([f"features: {', '.join(features[:_SHOWN_FEATURES])}{more}"])
    if list(classes) != [str(label) for label in range(len(classes))]:
        listed = ", ".join(f"{k} {name}" for k, name in enumerate(classes))
        yield from textwrap.wrap(f"classes: {listed}", _WIDTH)
    yield from _client_summary(check.clients)
    yield from _wrap(check.remarks)
    workers = f" with {check.workers} workers" if check.workers > 1 else ""
    seconds = check.seconds
    yield (
        f"whole run, about: {human_seconds(sum(seconds.values()))}{workers} (scoring "
        f"{human_seconds(seconds['scoring'])}, the server {human_seconds(seconds['the server'])}); "
        f"{human_bytes(check.bytes_up)} up, {human_bytes(check.bytes_down)} down"
    )
    memory = {what: human_bytes(size) for what, size in check.memory.items()}
    yield (
        f"memory, about: {human_bytes(sum(check.memory.values()))} beside Python and PyTorch: "
        f"{memory['weights and states']} of weights and states, {memory['data']} of data, "
        f"{memory['at work']} at work{workers}"
    )


def _networks(kinds: Sequence[NetworkCost]) -> Iterator[str]:
    columns = [
        Column("network", [kind.name for kind in kinds], words=True),
        Column("clients", [str(kind.clients) for kind in kinds]),
        Column("parameters", [f"{kind.parameters:,}" for kind in kinds]),
        Column("FLOPs", [f"{kind.flops:,}" for kind in kinds]),
        Column("down, rounds 1, 2", [", ".join(map(human_bytes, kind.down[:2])) for kind in kinds]),
        Column("up, rounds 1, 2", [", ".join(map(human_bytes, kind.up[:2])) for kind in kinds]),
        Column("one batch", [f"{1000 * kind.work.seconds_batch:.1f} ms" for kind in kinds]),
        Column("memory at work", [human_bytes(kind.work.peak) for kind in kinds]),
    ]
    yield render_text(columns, _WIDTH)
    yield ""


def _clients(check: CostEstimate) -> Iterator[str]:
    shown = check.clients[:_SHOWN_CLIENTS]
    columns = [
        Column(head, [str(one[key]) for one in shown])
        for head, key in (("client", "id"), ("train", "train"), ("valid.", "validation"), ("test", "test"))
    ]
    columns.append(Column("architecture", [one["architecture"] for one in shown], words=True))
    if any(one.get("name") for one in check.clients):
        columns.append(Column("name", [one["name"][:_NAME] for one in shown], words=True))
    if any(one["labels"] for one in check.clients):  # else numbers are predicted
        labels = [" ".join(f"{label}:{n}" for label, n in one["labels"].items()) for one in shown]
        cells = [
            text if len(text) <= _LABELS else f"{len(one['labels'])} classes"
            for text, one in zip(labels, shown, strict=True)
        ]
        columns.append(Column("training rows of each class", cells, words=True))
    yield render_text(columns, _WIDTH)
    more = len(check.clients) - _SHOWN_CLIENTS
    if more > 0:
        yield f"... and {more} more"


def _client_summary(clients: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Over all clients: how unequal they are."""
    counted = {
        "training rows": [client["train"] for client in clients],
        "test rows": [client["test"] for client in clients],
        "classes": [len(client["labels"]) for client in clients],
    }
    ranges = [
        f"{what} {min(sizes)} to {max(sizes)}, median {statistics.median_low(sizes)}"
        for what, sizes in counted.items()
        if what != "classes" or any(sizes)
    ]
    yield f"a client has: {'; '.join(ranges)}"
    names = [client.get("name", "") for client in clients]
    alone = [client["id"] for client in clients if len(client["labels"]) == 1]
    untested = [client["id"] for client in clients if not client["test"]]
    for what, who in (
        ("clients with one class only", alone),
        ("clients without test rows, which are not scored", untested),
    ):
        if who:
            yield from _wrap([f"{what} ({len(who)}): {clients_text(who, names)}"])


def _wrap(lines: Sequence[str]) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, _WIDTH, subsequent_indent="  ")]
