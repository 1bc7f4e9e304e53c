"""Rounds that the engine plays before a run, so that they can be measured: nobody is missing, and nothing is written.

Two rounds are played, the first and the next in which somebody trains, as some methods' first messages are smaller than
the later ones; and the final round, where there is one. `MeasuringExecutor` does the work of one client of each network
and answers for the others, so that the server has as much to do as in a run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyfed.core.client import Client
from polyfed.core.method import Exchange
from polyfed.engine.compatibility import example_input
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.federation import Federation
from polyfed.engine.operation_counter import flops
from polyfed.engine.plugin import Plugin
from polyfed.engine.round_state import Round
from polyfed.engine.run_loop import single_threaded
from polyfed.experiments.cost_estimate import ArchitectureCheck
from polyfed.experiments.measuring_executor import MeasuringExecutor
from polyfed.models.split import SplitModel, cut_shapes

__all__ = ["TRIED_BATCHES", "TrialRounds"]

TRIED_BATCHES = 10  # so many at most in round 2; one in round 1


class _NobodyMissing(Plugin):
    """Whom the plugins before it would let drop out, or be late, takes part all the same."""

    name = "nobody missing"

    def select(self, round: Round) -> None:
        """Nobody drops out."""
        round.unreachable.clear()
        round.silenced.clear()
        round.late.clear()

    def after_jobs(
        self, round: Round, jobs: Sequence[TrainJob], sent: Sequence[JobResult], read: Sequence[JobResult]
    ) -> None:
        """Nobody misses a deadline."""
        round.late.clear()
        round.busy.clear()


@dataclass(frozen=True)
class _Played:
    """What a round took: bytes down and up by number of client, and seconds of the server."""

    number: int
    down: Mapping[int, int]
    up: Mapping[int, int]
    server_seconds: float


class TrialRounds:
    """The trial of a federation. The method is started, and the federation cannot be run afterwards.

    Args:
        batches: so many of each phase at most.

    Attributes:
        executor: measures the clients.
        networks: number of a client -> what it trains in the later round.
        server_seconds: of the later round.
    """

    def __init__(self, federation: Federation, batches: int) -> None:
        self._federation = federation
        method = federation.method
        server = federation.server
        with single_threaded():
            federation.runner.start(server.all_client_ids)
        later = range(2, federation.training.rounds + 1)  # the first of them in which somebody trains
        self._later = next((n for n in later if any(exchange.trains for exchange in method.exchanges(n))), 2)
        server.round = self._later
        self._variants = {client.id: method.variant(server, client.id) for client in federation.clients}
        self.networks = {c.id: f"{c.architecture} {self._variants[c.id]}".rstrip() for c in federation.clients}
        firsts = {self.networks[client.id]: client for client in reversed(federation.clients)}
        self._measured = sorted(firsts.values(), key=lambda client: client.id)
        measured = [client.id for client in self._measured]
        self.executor = MeasuringExecutor(method, federation.model_factory, federation.store, measured, batches)
        self._runner = dataclasses.replace(
            federation.runner,
            executor=self.executor,
            plugins=[*federation.plugins, _NobodyMissing()],
            progress=lambda jobs, done: None,
        )
        self.server_seconds = 0.0

    def play(self) -> list[ArchitectureCheck]:
        """Play the rounds; every network's costs.

        Raises:
            RunError: a client or the server failed; says which, when and where.
        """
        federation = self._federation
        method = federation.method
        with single_threaded():
            first = self._round(1, method.exchanges(1))
            second = self._round(self._later, method.exchanges(self._later))
            last = self._round(self._later + 1, method.final_exchanges(), final=True)
        self.server_seconds = second.server_seconds
        return [self._described(client, first, second, last) for client in self._measured]

    def _round(self, number: int, exchanges: Sequence[Exchange], final: bool = False) -> _Played:
        """Play a round of these exchanges, if there are any."""
        if not exchanges:
            return _Played(number, {}, {}, 0.0)
        federation = self._federation
        round = Round(
            number,
            final=final,
            method=federation.method,
            server=federation.server,
            history=federation.history,
            present=federation.server.all_client_ids,
            evaluated=False,
            cohort=self._cohort(),
        )
        began = time.perf_counter()
        worked = self.executor.seconds
        self._runner.play(round, exchanges)
        server_seconds = (time.perf_counter() - began) - (self.executor.seconds - worked)
        return _Played(number, round.totals.down, round.totals.up, server_seconds)

    def _cohort(self) -> list[int]:
        """As many as take part in a round, all measured clients among them."""
        everybody = self._federation.server.all_client_ids
        measured = [client.id for client in self._measured]
        others = [number for number in everybody if number not in measured]
        count = self._federation.training.cohort_size(len(everybody))
        return sorted([*measured, *others[: max(0, count - len(measured))]])

    def _described(self, client: Client, first: _Played, second: _Played, last: _Played) -> ArchitectureCheck:
        federation = self._federation
        model_factory = federation.model_factory
        variant = self._variants[client.id]
        module = model_factory.module(client.architecture, variant)
        own = model_factory.module(client.architecture, variant, alone=True)
        split = own if isinstance(own, SplitModel) else None
        early, late, final = (self.executor.costs[played.number, client.id] for played in (first, second, last))
        final_seconds = final.batch * self.executor.steps(client, federation.method.final_exchanges()) + final.rest
        return ArchitectureCheck(
            name=self.networks[client.id],
            client=client.id,
            clients=sum(name == self.networks[client.id] for name in self.networks.values()),
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            nbytes=late.kept,
            cut=None if split is None else tuple(cut_shapes(split, example_input(client, split))[0]),
            feature_dim=None if split is None else split.feature_dim,
            down=(first.down[client.id], second.down[client.id]),
            up=(first.up[client.id], second.up[client.id]),
            seconds_batch=late.batch,
            seconds_rest=late.rest,
            seconds_row=late.row,
            flops=flops(federation.method.personal_model(module), example_input(client, module)),
            peak=sum(tensor.nbytes for tensor in module.state_dict().values()) + late.peak,
            final_round=(last.down.get(client.id, 0), last.up.get(client.id, 0), final_seconds),
            operations=(early.operations, late.operations),
        )
