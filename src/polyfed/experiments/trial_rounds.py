"""Rounds played on one client of each network, before anything is written, and what they cost there.

Two rounds are played, the first and the next in which somebody trains, as some methods' first messages are smaller than
the later ones; and the closing round, where there is one. Training takes a few batches only; all else (receiving, what
is computed for the upload, scoring) is done as in a run, so that bytes are those of the messages. The server has as
much to do as in a run, too: as many as would be drawn are heard, who was not measured with the upload of one who was
and has the same network.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polyfed.core.client import Client
from polyfed.core.message import Message, copied, nbytes, read_only, tensor
from polyfed.core.method import Context, Exchange, Phase, Trained
from polyfed.engine.compatibility import one_input
from polyfed.engine.evaluation import CHUNK, score_model
from polyfed.engine.executors.base import at_work, encoded
from polyfed.engine.federation import Federation
from polyfed.engine.local_training import data_of, train
from polyfed.engine.operation_counter import Operations, training_operations
from polyfed.engine.round_costs import Allocations, flops
from polyfed.engine.uploads import sent_nbytes
from polyfed.errors import PolyfedError, RunError
from polyfed.experiments.cost_estimate import ArchitectureCheck
from polyfed.models.split import SplitModel, cuts
from polyfed.plugins.compression import restored_upload

__all__ = ["TRIED_BATCHES", "TrialRounds"]

TRIED_BATCHES = 10  # so many at most in round 2; one in round 1
_TRIED_SECONDS = 1.0  # about so long in round 2


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


class TrialRounds:
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
                batches = self._batches.get(member.id, 1)
                step = federation.architectures.training
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
        cost.down += sent_nbytes(method, message)
        cost.up += sent_nbytes(method, leaves)
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
        architectures = self._federation.architectures
        variant = self._variants[member.id]
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
