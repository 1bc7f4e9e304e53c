"""What a federation will cost, measured on one client of each architecture, before anything is written.

Two rounds are played, as some methods' first messages are smaller than the later ones. Training takes a few batches
only; all else (receiving, what is computed for the upload, scoring) is done as in a run, so that bytes are those of the
messages.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polyfed.core.client import Client
from polyfed.core.message import Message, copied, nbytes, read_only
from polyfed.core.method import Trained
from polyfed.engine.evaluation import score_model
from polyfed.engine.executors import at_work
from polyfed.engine.federation import Federation
from polyfed.engine.fit import one_input
from polyfed.engine.training import data_of, train
from polyfed.errors import PolyfedError, RunError
from polyfed.models.split import SplitModel, cuts
from polyfed.units import human_bytes, human_seconds

__all__ = ["ArchitectureCheck", "Check", "measure"]

_TRIED_SECONDS, _TRIED_BATCHES = 1.0, 10  # about so long, and so many at most, in round 2; one in round 1
_SHOWN_CLIENTS = 20  # lines of the table of clients


@dataclass(frozen=True)
class ArchitectureCheck:
    """What one architecture is and costs, measured on one of its clients.

    Attributes:
        name: of the architecture.
        client: number of the client that was measured. clients: how many have this architecture.
        parameters: how many numbers are trained. nbytes: what such a client keeps: weights, buffers, state.
        cut: shape of a sample where it leaves the extractor. feature_dim: width of its representation.
        down, up: bytes that go to and come from this client in rounds 1 and 2.
        seconds_batch: one training step. seconds_rest: all else that one client costs in a round, scoring included.
    """

    name: str
    client: int
    clients: int
    parameters: int
    nbytes: int
    cut: tuple[int, ...] | None
    feature_dim: int | None
    down: tuple[int, int]
    up: tuple[int, int]
    seconds_batch: float
    seconds_rest: float


@dataclass(frozen=True)
class Check:
    """What a federation would do. ``str(check)`` is a page for people.

    Attributes:
        facts: method, dataset, rounds and so on, as in `result.json`.
        architectures: one entry each.
        clients: one entry each: id, architecture, train, validation, test (rows), labels (class -> training rows).
        unused: rows of the data set that nobody gets. holdout: rows that the server holds.
        seconds, bytes_up, bytes_down: estimates for the whole run.
        nbytes: of all clients' weights and states and the server's, in memory.
    """

    facts: Mapping[str, Any]
    architectures: tuple[ArchitectureCheck, ...]
    clients: tuple[Mapping[str, Any], ...]
    unused: int
    holdout: int
    seconds: float
    bytes_up: float
    bytes_down: float
    nbytes: int

    def __str__(self) -> str:
        facts = self.facts
        kinds = ["architecture", "clients", "parameters", "cut", "features", "down, rounds 1, 2", "up, rounds 1, 2"]
        lines = [
            f"{facts['label'] or facts['method']} on {facts['dataset']}: {facts['clients']} clients, "
            f"{facts['rounds']} rounds, seed {facts['seed']}. Models and data fit the method.",
            "",
            *_table([*kinds, "one batch"], [_shown(kind) for kind in self.architectures], left=1),
            "",
            *_table(
                ["client", "train", "valid.", "test", "architecture", "training rows of each class"],
                [_shown_client(client) for client in self.clients[:_SHOWN_CLIENTS]],
                left=-2,
            ),
        ]
        if len(self.clients) > _SHOWN_CLIENTS:
            lines.append(f"... and {len(self.clients) - _SHOWN_CLIENTS} more")
        return "\n".join(
            [
                *lines,
                "",
                f"rows: {self.holdout} held out for the server, {self.unused} unused",
                f"whole run, about: {human_seconds(self.seconds)}; {human_bytes(self.bytes_up)} up, "
                f"{human_bytes(self.bytes_down)} down; {human_bytes(self.nbytes)} of weights and states in memory",
            ]
        )


def measure(federation: Federation, unused: int = 0, holdout: int = 0) -> Check:
    """Play two rounds with one client of each architecture. The federation cannot be run afterwards.

    Args:
        federation: ready to run.
        unused, holdout: rows of its data set that no client got, for the record.

    Raises:
        RunError: the method fails; says with which client and in which round.
    """
    trial = _Trial(federation)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a run does
    try:
        kinds = {kind.name: kind for kind in trial.play()}
    finally:
        torch.set_num_threads(threads)
    clients, training = federation.clients, federation.training
    share = training.drawn(len(clients)) / len(clients)
    mine = [kinds[client.architecture] for client in clients]
    busy = sum(kind.seconds_batch * trial.steps(c) + kind.seconds_rest for kind, c in zip(mine, clients, strict=True))
    later = training.rounds - 1
    return Check(
        facts=federation.facts,
        architectures=tuple(kinds.values()),
        clients=tuple(_facts(client) for client in clients),
        unused=unused,
        holdout=holdout,
        seconds=training.rounds * (share * busy + trial.server_seconds),
        bytes_up=share * sum(kind.up[0] + later * kind.up[1] for kind in mine),
        bytes_down=share * sum(kind.down[0] + later * kind.down[1] for kind in mine),
        nbytes=sum(kind.nbytes for kind in mine) + nbytes(federation.server.state),
    )


# playing ----------------------------------------------------------------------------------------------------------


@dataclass
class _Cost:
    """What a client costs in a round."""

    down: int = 0  # bytes
    up: int = 0
    kept: int = 0
    batch: float = 0.0  # seconds
    rest: float = 0.0


class _Trial:
    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        firsts = {client.architecture: client for client in reversed(federation.clients)}
        self._members = sorted(firsts.values(), key=lambda client: client.id)
        self._batches = {member.id: 1 for member in self._members}
        self.server_seconds = 0.0  # of one round

    def play(self) -> list[ArchitectureCheck]:
        """Both rounds; every architecture's costs."""
        self._federation.method.start(self._federation.server)
        first, second = self._round(1), self._round(2)
        return [self._described(member, first[member.id], second[member.id]) for member in self._members]

    def steps(self, client: Client) -> int:
        """Training steps of a client in a round; where a phase takes some rows only, as if it took all."""
        method, size = self._federation.method, client.training.batch_size
        phases = method.phases(client.training)
        once = sum(phase.epochs * -(-len(data_of(client, phase)[0]) // size) for phase in phases)
        return once * sum(exchange.trains for exchange in method.exchanges(1))

    def _round(self, number: int) -> dict[int, _Cost]:
        method, server = self._federation.method, self._federation.server
        costs = {member.id: _Cost() for member in self._members}
        server.round, self.server_seconds = number, 0.0
        began = time.perf_counter()
        method.plan(server, list(costs))
        for exchange in method.exchanges(number):
            server.exchange = exchange.name
            messages = {member.id: read_only(method.broadcast(server, member.id)) for member in self._members}
            self.server_seconds += time.perf_counter() - began
            uploads = {}
            for member in self._members:
                member.round, member.exchange = number, exchange.name
                uploads[member.id] = self._work(member, messages[member.id], exchange.trains, costs[member.id])
            began = time.perf_counter()
            method.aggregate(server, uploads)
        self.server_seconds += time.perf_counter() - began
        server.exchange = "train"
        return costs

    def _work(self, member: Client, message: Message, trains: bool, cost: _Cost) -> Message:
        """One client's part of an exchange."""
        federation, method = self._federation, self._federation.method
        client = at_work(member, method.variant(federation.server, member.id), federation.architectures)
        try:
            began = time.perf_counter()
            context = client.context = method.receive(client, message)
            received = time.perf_counter()
            trained = train(client, method, context, self._batches[member.id]) if trains else Trained()
            done = time.perf_counter()
            upload = read_only(copied(method.upload(client, trained)))
            if len(client.data.test):
                score_model(client, method, client.data.test)
            cost.rest += time.perf_counter() - done + received - began
            cost.batch = max(cost.batch, (done - received) / max(trained.steps, 1) if trains else 0.0)
        except PolyfedError as error:
            raise type(error)(f"client {member.id}, round {member.round}: {error}") from error
        except Exception as error:
            place = f"client {member.id} ({member.architecture}), round {member.round}"
            raise RunError(f"{place}: {type(error).__name__}: {error}") from error
        self._batches[member.id] = max(1, min(_TRIED_BATCHES, int(_TRIED_SECONDS / max(cost.batch, 1e-6))))
        member.weights = {name: tensor.detach().cpu().clone() for name, tensor in client.model.state_dict().items()}
        member.state = client.state
        cost.down += nbytes(message)
        cost.up += nbytes(upload)
        cost.kept = nbytes({"weights": member.weights}) + nbytes(member.state)
        return upload

    def _described(self, member: Client, first: _Cost, second: _Cost) -> ArchitectureCheck:
        architectures = self._federation.architectures
        module = architectures.template(member.architecture)
        split = module if isinstance(module, SplitModel) else None
        return ArchitectureCheck(
            name=member.architecture,
            client=member.id,
            clients=sum(client.architecture == member.architecture for client in self._federation.clients),
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            nbytes=second.kept,
            cut=None if split is None else tuple(cuts(split, one_input(member, split))[0]),
            feature_dim=None if split is None else split.feature_dim,
            down=(first.down, second.down),
            up=(first.up, second.up),
            seconds_batch=second.batch,
            seconds_rest=second.rest,
        )


# showing ----------------------------------------------------------------------------------------------------------


def _facts(client: Client) -> dict[str, Any]:
    data = client.data
    return {
        "id": client.id,
        "architecture": client.architecture,
        "train": len(data.train),
        "validation": len(data.validation),
        "test": len(data.test),
        "labels": dict(sorted(Counter(data.train.y.tolist()).items())),
    }


def _shown(kind: ArchitectureCheck) -> list[str]:
    return [
        kind.name,
        str(kind.clients),
        f"{kind.parameters:,}",
        "-" if kind.cut is None else "x".join(map(str, kind.cut)),
        "-" if kind.feature_dim is None else str(kind.feature_dim),
        ", ".join(map(human_bytes, kind.down)),
        ", ".join(map(human_bytes, kind.up)),
        f"{1000 * kind.seconds_batch:.1f} ms",
    ]


def _shown_client(client: Mapping[str, Any]) -> list[str]:
    sizes = [str(client[key]) for key in ("id", "train", "validation", "test")]
    return [*sizes, client["architecture"], " ".join(f"{label}:{n}" for label, n in client["labels"].items())]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Aligned lines; the first (or last, if negative) `left` columns are words, the others numbers."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    words = range(len(heads))[:left] if left > 0 else range(len(heads))[left:]
    return [
        "  ".join(
            f"{c:<{w}}" if i in words else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [heads, ["-" * width for width in widths], *rows]
    ]
