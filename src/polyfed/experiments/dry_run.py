"""What a federation will cost, measured on one client of each network, before anything is written.

Two rounds are played, the first and the next in which somebody trains, as some methods' first messages are smaller than
the later ones; and the closing round, where there is one. Training takes a few batches only; all else (receiving, what
is computed for the upload, scoring) is done as in a run, so that bytes are those of the messages. The server has as
much to do as in a run, too: as many as would be drawn are heard, who was not measured with the upload of one who was
and has the same network.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from polyfed.core.client import Client
from polyfed.core.message import Message, copied, nbytes, read_only, tensor
from polyfed.core.method import Context, Exchange, Phase, Trained
from polyfed.data.samples import Samples
from polyfed.engine.compatibility import one_input
from polyfed.engine.evaluation import CHUNK, score_model
from polyfed.engine.executors.base import at_work, encoded
from polyfed.engine.federation import Federation
from polyfed.engine.local_training import data_of, train
from polyfed.engine.operation_counter import Operations, training_operations
from polyfed.engine.round_costs import Allocations, flops
from polyfed.errors import PolyfedError, RunError
from polyfed.markup import preformatted
from polyfed.models.split import SplitModel, cuts
from polyfed.plugins.compression import restored_upload
from polyfed.plugins.device_simulation import Effort, spent
from polyfed.units import human_bytes, human_seconds

__all__ = ["ArchitectureCheck", "Check", "measure", "message_bytes"]

_TRIED_SECONDS, _TRIED_BATCHES = 1.0, 10  # about so long, and so many at most, in round 2; one in round 1
_SHOWN_CLIENTS = 20  # lines of the table of clients
_LABELS = 60  # characters of a client's labels, about
_WIDTH = 120  # of lines that are wrapped


@dataclass(frozen=True)
class ArchitectureCheck:
    """What one network is and costs, measured on one of its clients.

    Attributes:
        name: of the architecture, with the variant of it that the clients train, where the method has several; where
            these change from round to round, as in round 2.
        client: number of the client that was measured. clients: how many have this network.
        parameters: how many numbers are trained. nbytes: what such a client keeps: weights, buffers, state.
        flops: floating-point operations of one sample's way forward (`polyfed.engine.round_costs.flops`).
        peak: bytes of such a client at work: the network, and what training a batch or scoring 128 rows makes.
        cut: shape of a sample where it leaves the extractor. feature_dim: width of its representation.
        down, up: bytes that go to and come from this client in rounds 1 and 2.
        seconds_batch: one training step. seconds_row: scoring one row. seconds_rest: all else that one client costs in
            a round.
        closing: bytes down, bytes up and seconds of the closing round; zeros where there is none.
        operations: of this client's receiving, training and uploading in rounds 1 and 2; counted where devices are
            simulated.
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
    seconds_row: float = 0.0
    flops: int = 0
    peak: int = 0
    closing: tuple[int, int, float] = (0, 0, 0.0)
    operations: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Check:
    """What a federation would do. ``str(check)`` is a page for people.

    Attributes:
        facts: method, dataset, rounds and so on, as in `result.json`.
        architectures: one entry for each network that is trained.
        clients: one entry each: id, architecture, train, validation, test (rows), labels (class -> training rows).
        unused: rows of the data set that nobody gets. holdout: rows that the server holds.
        seconds, bytes_up, bytes_down: estimates for the whole run, if it does not stop early.
        seconds_server, seconds_scoring: what of the seconds is the server's, and what is scoring.
        nbytes: of all clients' weights and states and the server's, in memory. data_nbytes: of the clients' samples and
            those that everybody may see.
        workers: among so many processes the clients' work is dealt.
        devices: where devices are simulated, one entry for each client: id, device, memory (bytes it has), needs (bytes
            that training takes), fits, and the seconds down, train and up of a later round.
        simulated_seconds: of the whole run, if all are asked in every round; None where no devices are simulated.
        averaged: what the method averages with whom, in a line; "" where it averages no networks.
        class_remarks: what is odd about the classes (`polyfed.data.classes.remarks`).
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
    workers: int = 1
    seconds_server: float = 0.0
    seconds_scoring: float = 0.0
    data_nbytes: int = 0
    devices: tuple[Mapping[str, Any], ...] = ()
    simulated_seconds: float | None = None
    averaged: str = ""
    class_remarks: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes in memory with the largest network at work in every worker; Python and PyTorch are not counted."""
        return self.nbytes + self.data_nbytes + self.peak_at_work

    @property
    def peak_at_work(self) -> int:
        """Those at work, in all workers together."""
        return self.workers * max(kind.peak for kind in self.architectures)

    @property
    def seconds_round(self) -> float:
        """Of a round, on average."""
        return self.seconds / int(self.facts["rounds"])

    def __repr__(self) -> str:
        facts, cost = self.facts, f"about {human_seconds(self.seconds)}, {human_bytes(self.bytes_up)} up"
        what = f"{facts['label'] or facts['method']} on {facts['dataset']}, {facts['clients']} clients"
        return f"Check({what}: models and data fit; {cost}, {human_bytes(self.bytes_down)} down)"

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def __str__(self) -> str:
        facts = self.facts
        network = ["network", "clients", "parameters", "FLOPs", "cut", "features"]
        costs = ["network", "down, rounds 1, 2", "up, rounds 1, 2", "one batch", "memory at work"]
        client = ["client", "train", "valid.", "test", "architecture", "training rows of each class"]
        workers = f" with {self.workers} workers" if self.workers > 1 else ""
        more = len(self.clients) - _SHOWN_CLIENTS
        return "\n".join(
            [
                f"{facts['label'] or facts['method']} on {facts['dataset']}: {facts['clients']} clients, "
                f"{facts['rounds']} rounds, seed {facts['seed']}. Models and data fit the method.",
                *_wrapped([self.averaged]),
                "",
                *_table(network, [_shown(kind) for kind in self.architectures], left=1),
                "",
                *_table(costs, [_shown_costs(kind) for kind in self.architectures], left=1),
                "",
                *_table(client, [_shown_client(one) for one in self.clients[:_SHOWN_CLIENTS]], left=-2),
                *([f"... and {more} more"] if more > 0 else []),
                "",
                *_named(self.facts["class_names"]),
                *_shown_devices(self),
                *_summed(self.clients),
                *_wrapped(self.class_remarks),
                f"rows: {self.holdout} held out for the server, {self.unused} unused",
                f"whole run, about: {human_seconds(self.seconds)}{workers} (scoring "
                f"{human_seconds(self.seconds_scoring)}, the server {human_seconds(self.seconds_server)}); "
                f"{human_bytes(self.bytes_up)} up, {human_bytes(self.bytes_down)} down",
                f"memory, about: {human_bytes(self.peak)} beside Python and PyTorch: "
                f"{human_bytes(self.nbytes)} of weights and states, {human_bytes(self.data_nbytes)} of data, "
                f"{human_bytes(self.peak_at_work)} at work{workers}",
            ]
        )


def measure(federation: Federation, unused: int = 0, holdout: int = 0, batches: int = _TRIED_BATCHES) -> Check:
    """Play two rounds with one client of each network. The federation cannot be run afterwards.

    Args:
        federation: ready to run.
        unused, holdout: rows of its data set that no client got, for the record.
        batches: at most so many are trained on with each network.

    Raises:
        RunError: the method fails; says with which client and in which round.
    """
    trial = _Trial(federation, batches)
    kinds = {kind.name: kind for kind in trial.play()}
    clients, training, workers = federation.clients, federation.training, federation.executor.workers
    mine = [kinds[trial.networks[client.id]] for client in clients]
    availability = federation.plugin("availability").settings
    drop = availability.drop
    reached = 1 - drop if availability.drop_when == "before" else 1.0
    closing = [sum(kind.closing[place] for kind in mine) for place in range(3)]
    asked, passages = _asked(federation), [federation.method.exchanges(n) for n in range(1, training.rounds + 1)]
    taking, work, scoring = list(zip(mine, asked, strict=True)), [], 0.0
    for client, (kind, (first, later)) in zip(clients, taking, strict=True):
        steps = [trial.steps(client, exchanges) for exchanges in passages]
        trained = first * steps[0] + later * sum(steps[1:]) / max(1, len(steps) - 1)
        scored = kind.seconds_row * _scored_rows(federation, client, reached * (first + later) / training.rounds)
        work.append(reached * (kind.seconds_batch * trained + kind.seconds_rest * (first + later)) + scored)
        scoring += scored / workers
    server = training.rounds * trial.server_seconds
    return Check(
        facts={**federation.facts, "classes": federation.classes, "class_names": federation.class_names},
        architectures=tuple(kinds.values()),
        clients=tuple(_facts(client) for client in clients),
        unused=unused,
        holdout=holdout,
        seconds=max(sum(work) / workers, *work)
        + server
        + closing[2] / workers,  # one client's rounds follow each other
        bytes_up=(1 - drop) * sum(first * kind.up[0] + later * kind.up[1] for kind, (first, later) in taking)
        + closing[1],
        bytes_down=reached * sum(first * kind.down[0] + later * kind.down[1] for kind, (first, later) in taking)
        + closing[0],
        nbytes=sum(kind.nbytes for kind in mine) + nbytes(federation.server.state),
        workers=workers,
        seconds_server=server,
        seconds_scoring=scoring,
        data_nbytes=_data_bytes(federation),
        averaged=federation.averaged,
        class_remarks=tuple(federation.class_remarks()),
        **_simulated(federation, mine),
    )


def message_bytes(federation: Federation) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes down and up in round 2 by network (`ArchitectureCheck.name`), from a trial of one batch a round.

    Nobody is scored. So that methods that pass over all of a client's data stay quick, a client keeps the first rows of
    every class only: as many as a batch has, or as the largest whole number among the method's knobs, which may count
    rows. The federation cannot be run afterwards.

    Raises:
        RunError: the method fails; says with which client and in which round.
    """
    counts = [value for value in vars(federation.method).values() if isinstance(value, int)]
    rows = max([federation.training.batch_size, *counts])
    for client in federation.clients:
        data = client.data
        client.data = replace(data, train=_first(data.train, rows), validation=_first(data.validation, rows))
        client.n = len(client.data.train)
    kinds = _Trial(federation, batches=1, scores=False).play()
    return {kind.name: kind.down[1] for kind in kinds}, {kind.name: kind.up[1] for kind in kinds}


def _first(samples: Samples, rows: int) -> Samples:
    """The first `rows` rows of every class."""
    places = [(samples.y == label).nonzero().flatten()[:rows] for label in samples.y.unique()]
    return samples.select(torch.cat(places).sort().values) if places else samples


def _asked(federation: Federation) -> list[tuple[float, float]]:
    """How often each client is asked and there, in expectation: in round 1, and in all later rounds together."""
    there = federation.plugin("devices").availability() or [1.0] * len(federation.clients)
    often = [[0.0, 0.0] for _ in federation.clients]
    for number in range(1, federation.training.rounds + 1):
        present = federation.present(number)
        for client_id in present:
            often[client_id][number > 1] += there[client_id] * federation.training.drawn(len(present)) / len(present)
    return [(first, later) for first, later in often]


def _scored_rows(federation: Federation, client: Client, trains: float) -> float:
    """How many rows of a client are scored in the whole run; in this share of the rounds it trains.

    What has not changed since it was last scored is not scored again.
    """
    rounds, every = federation.training.rounds, federation.evaluation.every
    evaluations = rounds // every + bool(rounds % every) + bool(federation.method.closing())
    anew = {stage: 1.0 if stage == "received" else trains for stage in federation.stages}
    rows = sum(anew.values()) * len(client.data.test) + anew[federation.stages[0]] * len(client.data.validation)
    return evaluations * rows


def _data_bytes(federation: Federation) -> int:
    """Bytes of all samples; what several look into counts once."""
    parts = [part for client in federation.clients for part in vars(client.data).values()]
    if (public := federation.server.public) is not None:
        parts.append(public.samples)
    storages = [tensor.untyped_storage() for part in parts for tensor in (part.x, part.y)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _simulated(federation: Federation, mine: Sequence[ArchitectureCheck]) -> dict[str, Any]:
    """What rounds would take on the clients' devices; of one network, operations are in proportion to rows."""
    simulation, devices = federation.plugin("devices"), []
    if not simulation.enabled:
        return {}
    slowest = [0.0, 0.0]
    for client, kind in zip(federation.clients, mine, strict=True):
        rows = client.n / federation.clients[kind.client].n
        efforts = [
            Effort(down, round(rows * operations), up)
            for down, operations, up in zip(kind.down, kind.operations, kind.up, strict=True)
        ]
        profile, need = simulation.profile(client.id), simulation.needs[client.id]
        first, later = (spent(profile, effort) for effort in efforts)
        fits = client.id not in simulation.excluded
        device = {"id": client.id, "device": simulation.names[client.id], "memory": profile.memory, "needs": need}
        devices.append({**device, "fits": fits, **later._asdict(), "seconds": later.seconds})
        if fits:
            slowest = [max(slowest[0], first.seconds), max(slowest[1], later.seconds)]
    deadline = simulation.settings.deadline
    limit = math.inf if deadline is None else deadline
    one, others = (min(limit, seconds) for seconds in slowest)
    return {"devices": tuple(devices), "simulated_seconds": one + (federation.training.rounds - 1) * others}


# playing ----------------------------------------------------------------------------------------------------------


@dataclass
class _Cost:
    """What a client costs in a round."""

    down: int = 0  # bytes
    up: int = 0
    kept: int = 0
    peak: int = 0
    batch: float = 0.0  # seconds
    row: float = 0.0
    rest: float = 0.0
    operations: int = 0


class _Trial:
    """Plays rounds with one client of each network, with so many batches at most; unless `scores`, nobody is scored."""

    def __init__(self, federation: Federation, batches: int, scores: bool = True) -> None:
        self._federation = federation
        self._most, self._scores = batches, scores
        self._members: list[Client] = []
        self._batches: dict[int, int] = {}  # by member
        self._variants: dict[int, str] = {}  # by client, in the later round
        self.networks: dict[int, str] = {}  # what clients train in the later round
        self._taken: dict[tuple[str, str | None], float] = {}  # exchange, a phase's rows -> their share of the data
        self.server_seconds = 0.0  # of one round

    def play(self) -> list[ArchitectureCheck]:
        """Both rounds; every network's costs."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as a run does
        try:
            return self._played()
        finally:
            torch.set_num_threads(threads)

    def _played(self) -> list[ArchitectureCheck]:
        method = self._federation.method
        method.start(self._federation.server)
        later = range(2, self._federation.training.rounds + 1)  # the first of them in which somebody trains
        number = next((n for n in later if any(exchange.trains for exchange in method.exchanges(n))), 2)
        self._look_round(number)
        drawn = self._drawn(self._federation.training.drawn(len(self._federation.server.clients)))
        first, second = (self._round(n, method.exchanges(n), drawn) for n in (1, number))
        seconds = self.server_seconds
        last = self._round(number + 1, method.closing(), self._drawn(len(self._federation.server.clients)))
        self.server_seconds = seconds
        return [self._described(m, first[m.id], second[m.id], last[m.id]) for m in self._members]

    def _look_round(self, number: int) -> None:
        """Who trains which network in a round; the first client of each is a member."""
        clients, server = self._federation.clients, self._federation.server
        server.round = number
        variants = self._variants = {
            client.id: self._federation.method.variant(server, client.id) for client in clients
        }
        self.networks = {client.id: f"{client.architecture} {variants[client.id]}".rstrip() for client in clients}
        firsts = {self.networks[client.id]: client for client in reversed(clients)}
        self._members = sorted(firsts.values(), key=lambda client: client.id)
        self._batches = {member.id: 1 for member in self._members}

    def steps(self, client: Client, exchanges: Sequence[Exchange]) -> int:
        """Training steps of a client in these; a phase takes the same share of the data as it last did in the trial."""
        size, total = client.training.batch_size, 0
        for exchange in exchanges:
            for phase in self._phases(client, exchange):
                share = self._taken.get((exchange.name, phase.rows), 1.0)
                total += phase.epochs * math.ceil(share * len(data_of(client, phase)[0]) / size)
        return total

    def _phases(self, client: Client, exchange: Exchange) -> Sequence[Phase]:
        if not exchange.trains:
            return ()
        return self._federation.method.phases(client.training) if exchange.phases is None else exchange.phases

    def _drawn(self, count: int) -> list[int]:
        """The members, and others until there are `count`."""
        members = {member.id for member in self._members}
        others = [client_id for client_id in self._federation.server.clients if client_id not in members]
        return sorted([*members, *others[: max(0, count - len(members))]])

    def _round(self, number: int, exchanges: Sequence[Exchange], drawn: Sequence[int]) -> dict[int, _Cost]:
        method, server = self._federation.method, self._federation.server
        costs = {member.id: _Cost() for member in self._members}
        if not exchanges:
            return costs
        alike = {self.networks[member.id]: member.id for member in self._members}
        server.round, self.server_seconds = number, 0.0
        began = time.perf_counter()
        method.plan(server, drawn)
        for exchange in exchanges:
            server.exchange = exchange.name
            told = list(server.clients) if exchange.who == "all" else drawn
            messages = {client_id: read_only(method.broadcast(server, client_id)) for client_id in told}
            self.server_seconds += time.perf_counter() - began
            # where nobody trains and everybody is asked, everybody answers: it is cheap, and what comes may be needed
            everybody = exchange.who == "all" and not exchange.trains
            own = {}
            for client in [self._federation.clients[i] for i in told if everybody or i in costs]:
                client.round, client.exchange = number, exchange.name
                own[client.id] = self._work(client, messages[client.id], exchange, costs.get(client.id, _Cost()))
            began = time.perf_counter()
            uploads = {i: own[i] if i in own else own[alike[self.networks[i]]] for i in told}
            method.aggregate(server, uploads)
        self.server_seconds += time.perf_counter() - began
        server.exchange = "train"
        return costs

    def _work(self, member: Client, message: Message, exchange: Exchange, cost: _Cost) -> Message:
        """One client's part of an exchange."""
        federation, method = self._federation, self._federation.method
        began = time.perf_counter()
        client = at_work(member, method.variant(federation.server, member.id), federation.architectures)
        try:
            counts = Operations() if federation.plugin("devices").enabled else contextlib.nullcontext()
            with counts:
                context = client.context = method.receive(client, message)
            received = time.perf_counter()
            cost.operations += self._training_operations(client, context, exchange)
            trained = Trained()
            if exchange.trains:
                for phase in self._phases(client, exchange):
                    if phase.rows is not None:
                        taken = len(tensor(context, phase.rows)) / max(1, len(data_of(client, phase)[0]))
                        self._taken[exchange.name, phase.rows] = taken
                if self._scores and member.round > 1:  # the first one's contexts are smaller
                    cost.peak = max(cost.peak, self._peak(client, context, exchange))
                batches, step = self._batches.get(member.id, 1), federation.architectures.training
                ready = time.perf_counter()
                trained = train(client, method, context, batches, exchange.phases, step)
                cost.batch = max(cost.batch, (time.perf_counter() - ready) / max(trained.steps, 1))
            done = time.perf_counter()
            with counts:
                upload = read_only(copied(method.upload(client, trained)))
            cost.operations += counts.count if isinstance(counts, Operations) else 0
            leaves, _ = encoded(upload, client, method, message)
            cost.rest += time.perf_counter() - done + received - began
            if self._scores and exchange.trains and len(client.data.test):
                done = time.perf_counter()
                score_model(client, method, client.data.test)
                cost.row = (time.perf_counter() - done) / len(client.data.test)
        except PolyfedError as error:
            raise type(error)(f"client {member.id}, round {member.round}: {error}") from error
        except Exception as error:
            place = f"client {member.id} ({member.architecture}), round {member.round}"
            raise RunError(f"{place}: {type(error).__name__}: {error}") from error
        member.state = client.state
        if member.id in self._batches:  # the others are only asked
            self._batches[member.id] = max(1, min(self._most, int(_TRIED_SECONDS / max(cost.batch, 1e-6))))
            member.weights = {name: tensor.detach().cpu().clone() for name, tensor in client.model.state_dict().items()}
            cost.kept = nbytes({"weights": member.weights}) + nbytes(member.state)
        cost.down += nbytes(message)
        cost.up += nbytes(leaves)
        return read_only(restored_upload(federation.plugin("compression").settings, leaves, message))

    def _training_operations(self, client: Client, context: Context, exchange: Exchange) -> int:
        """Of the training in an exchange, where devices are simulated."""
        if not self._federation.plugin("devices").enabled:
            return 0
        step = self._federation.architectures.training
        return training_operations(client, self._federation.method, context, self._phases(client, exchange), step)

    def _peak(self, client: Client, context: Context, exchange: Exchange) -> int:
        """The most bytes that a client at work makes: for a batch of each phase, or for scoring a chunk of rows."""
        method, step = self._federation.method, self._federation.architectures.training
        with Allocations() as training:
            train(client, method, context, 1, exchange.phases, step)
        with Allocations() as scoring:
            if len(client.data.test):
                score_model(client, method, client.data.test.select(torch.arange(min(CHUNK, len(client.data.test)))))
        return int(max(training.peak, scoring.peak))

    def _described(self, member: Client, first: _Cost, second: _Cost, last: _Cost) -> ArchitectureCheck:
        closing = last.batch * self.steps(member, self._federation.method.closing()) + last.rest
        architectures, variant = self._federation.architectures, self._variants[member.id]
        module = architectures.template(member.architecture, variant)
        own = architectures.template(member.architecture, variant, alone=True)
        split = own if isinstance(own, SplitModel) else None
        return ArchitectureCheck(
            name=self.networks[member.id],
            client=member.id,
            clients=sum(name == self.networks[member.id] for name in self.networks.values()),
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            nbytes=second.kept,
            cut=None if split is None else tuple(cuts(split, one_input(member, split))[0]),
            feature_dim=None if split is None else split.feature_dim,
            down=(first.down, second.down),
            up=(first.up, second.up),
            seconds_batch=second.batch,
            seconds_rest=second.rest,
            seconds_row=second.row,
            flops=flops(self._federation.method.personal(module), one_input(member, module)),
            peak=sum(tensor.nbytes for tensor in module.state_dict().values()) + second.peak,
            closing=(last.down, last.up, closing),
            operations=(first.operations, second.operations),
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
        f"{kind.flops:,}",
        "-" if kind.cut is None else "x".join(map(str, kind.cut)),
        "-" if kind.feature_dim is None else str(kind.feature_dim),
    ]


def _shown_costs(kind: ArchitectureCheck) -> list[str]:
    sent = [", ".join(map(human_bytes, sizes)) for sizes in (kind.down, kind.up)]
    return [kind.name, *sent, f"{1000 * kind.seconds_batch:.1f} ms", human_bytes(kind.peak)]


def _shown_client(client: Mapping[str, Any]) -> list[str]:
    sizes = [str(client[key]) for key in ("id", "train", "validation", "test")]
    return [*sizes, client["architecture"], _shown_labels(client["labels"])]


def _shown_devices(check: Check) -> list[str]:
    """The table of the clients' simulated devices, and what the run would take on them."""
    if check.simulated_seconds is None:
        return []
    heads = ["client", "device", "memory", "training takes", "down", "train", "up", "a later round"]
    rows = [
        [
            *(str(one["id"]), one["device"], human_bytes(one["memory"]), human_bytes(one["needs"])),
            *(f"{one[part]:.2f} s" for part in ("down", "train", "up")),
            human_seconds(one["seconds"]) if one["fits"] else "does not fit",
        ]
        for one in check.devices[:_SHOWN_CLIENTS]
    ]
    more = len(check.devices) - _SHOWN_CLIENTS
    left_out = [str(one["id"]) for one in check.devices if not one["fits"]]
    told = f"left out, as their network does not fit: {', '.join(left_out)}"
    return [
        *_table(heads, rows, left=2),
        *([f"... and {more} more"] if more > 0 else []),
        *(textwrap.wrap(told, _WIDTH, subsequent_indent="  ") if left_out else []),
        f"whole run on these devices, about: {human_seconds(check.simulated_seconds)}",
        "",
    ]


def _shown_labels(labels: Mapping[int, int]) -> str:
    """All of a client's labels where they fit into a line, else how many there are and those with most rows.

    >>> _shown_labels({3: 44, 7: 19}), _shown_labels({label: 500 - label for label in range(100)})
    ('3:44 7:19', '100 classes, most: 0:500 1:499 2:498 3:497 4:496 5:495 ...')
    """
    whole = " ".join(f"{label}:{n}" for label, n in labels.items())
    if len(whole) <= _LABELS:
        return whole
    most = sorted(labels, key=lambda label: -labels[label])
    said = f"{len(labels)} classes, most: " + " ".join(f"{label}:{labels[label]}" for label in most[:9])
    return textwrap.shorten(said, _LABELS, placeholder=" ...")


def _named(names: Sequence[str]) -> list[str]:
    """What the classes are called, where they have names.

    >>> _named(["cat", "owl"]), _named(["0", "1"])
    (['classes: 0 cat, 1 owl'], [])
    """
    if list(names) == [str(label) for label in range(len(names))]:
        return []
    return textwrap.wrap("classes: " + ", ".join(f"{k} {name}" for k, name in enumerate(names)), _WIDTH)


def _summed(clients: Sequence[Mapping[str, Any]]) -> list[str]:
    """Over all clients: how unequal they are."""
    ranges = [
        f"{what} {min(sizes)} to {max(sizes)}, median {statistics.median_low(sizes)}"
        for what, sizes in (
            ("training rows", [client["train"] for client in clients]),
            ("test rows", [client["test"] for client in clients]),
            ("classes", [len(client["labels"]) for client in clients]),
        )
    ]
    lines = [f"a client has: {'; '.join(ranges)}"]
    alone = [str(client["id"]) for client in clients if len(client["labels"]) == 1]
    untested = [str(client["id"]) for client in clients if not client["test"]]
    for what, who in (
        ("clients with one class only", alone),
        ("clients without test rows, which are not scored", untested),
    ):
        if who:
            lines += _wrapped([f"{what} ({len(who)}): {', '.join(who)}"])
    return lines


def _wrapped(lines: Sequence[str]) -> list[str]:
    """Long lines in several."""
    return [part for line in lines for part in textwrap.wrap(line, _WIDTH, subsequent_indent="  ")]


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
