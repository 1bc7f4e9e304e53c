"""Rounds that the engine plays before a run, so that they can be measured: nobody is missing, and nothing is written.

Two rounds are played, the first and the next in which somebody trains, as some methods' first messages are smaller than
the later ones; and the final round, where there is one. One client of each network takes part, with a few batches.
"""

from __future__ import annotations

import copy
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polyfed.core.client import Client
from polyfed.core.inference import CHUNK
from polyfed.core.message import get_tensor, nbytes
from polyfed.core.method import Exchange, Phase, TrainingResult
from polyfed.core.randomness import keep_global_rng
from polyfed.engine.compatibility import example_input
from polyfed.engine.device import single_threaded
from polyfed.engine.executors.client_scores import are_scored_together
from polyfed.engine.executors.client_work import ClientWork, run_job
from polyfed.engine.executors.executor import Done, Executor, ExecutorSetup
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.federation import Federation
from polyfed.engine.local_training import phase_data, train
from polyfed.engine.operation_counter import AllocationTracker, flops
from polyfed.engine.plugin import Plugin
from polyfed.engine.round import play, start
from polyfed.engine.round_state import Round, RoundTotals
from polyfed.engine.scoring import Part, evaluate_model

__all__ = ["NetworkCost", "TrialRounds"]

_BATCHES = 5  # batches of each phase, at most, in rounds after the first; recipes of FedHeNN align in every fifth step


@dataclass(frozen=True)
class NetworkCost:
    """What one network is and costs, measured on one of its clients.

    Attributes:
        name: of the architecture, with the variant of it that the clients train, where the method has several; where
            these change from round to round, as in round 2.
        client: number of the client that was measured. clients: how many have this network.
        parameters: how many numbers are trained.
        flops: floating-point operations of one sample's way forward (`polyfed.engine.operation_counter.flops`).
        down, up: bytes that go to and come from this client in rounds 1 and 2 and the final round; 0 without one.
        nbytes: what such a client keeps: weights, buffers, state.
        peak: bytes of such a client at work: the network, and what training a batch or scoring 128 rows makes.
        seconds_batch: one training step. seconds_row: scoring one row. seconds_rest: all else that one client costs in
            a round.
    """

    name: str
    client: int
    clients: int
    parameters: int
    flops: int
    down: tuple[int, ...]
    up: tuple[int, ...]
    nbytes: int
    peak: int
    seconds_batch: float
    seconds_row: float
    seconds_rest: float


class TrialRounds:
    """The trial of a federation. The method is started, and the federation cannot be run afterwards.

    Args:
        wanted: number of a client that takes part, in the round of its largest network where it trains another one each
            time; None: the first client of each network.

    Attributes:
        networks: number of a client -> what it trains in the later round.
        server_seconds: of the later round.
    """

    def __init__(self, federation: Federation, wanted: int | None = None) -> None:
        self._federation = federation
        method, server = federation.method, federation.server
        sums = federation.plugin("secure_sums")
        sums.settings = sums.settings.model_copy(update={"min_clients": 1})  # of the few that take part
        server.run_passes = None  # all is done in this process: nobody would end the run's own workers
        with single_threaded():
            start(federation, server.all_client_ids)
        later = range(2, federation.training.rounds + 1)
        training = [n for n in later if any(exchange.trains for exchange in method.exchanges(n))] or [2]
        self._later = training[0] if wanted is None else max(training, key=lambda n: self._parameters(wanted, n))
        server.round = self._later
        self._variants = {client.id: method.variant(server, client.id) for client in federation.clients}
        self.networks = {c.id: f"{c.architecture} {self._variants[c.id]}".rstrip() for c in federation.clients}
        firsts = {self.networks[client.id]: client for client in reversed(federation.clients)}
        if wanted is not None:
            firsts[self.networks[wanted]] = federation.clients[wanted]
        self._measured = sorted(firsts.values(), key=lambda client: client.id)
        setup = ExecutorSetup(method, federation.model_factory, federation.clients, federation.store)
        self._executor = MeasuringExecutor(setup)
        self.server_seconds = 0.0

    def _parameters(self, client_id: int, number: int) -> int:
        """Of the network that a client trains in a round."""
        federation = self._federation
        federation.server.round = number
        variant = federation.method.variant(federation.server, client_id)
        module = federation.model_factory.module(federation.clients[client_id].architecture, variant)
        return sum(parameter.numel() for parameter in module.parameters())

    def play(self) -> list[NetworkCost]:
        """Play the rounds; every network's costs.

        Raises:
            RunError: a client or the server failed; says which, when and where.
        """
        method = self._federation.method
        with single_threaded():
            first = self._round(1, method.exchanges(1))
            began = time.perf_counter()
            later = self._round(self._later, method.exchanges(self._later))
            seconds = time.perf_counter() - began
            final = RoundTotals()
            if method.final_exchanges():
                final = self._round(self._later + 1, method.final_exchanges(), final=True)
        costs = self._executor.costs
        seconds -= sum(costs[self._later, client.id].seconds for client in self._measured)
        cohort = self._federation.training.cohort_size(len(self._federation.clients))
        self.server_seconds = seconds * max(1.0, cohort / len(self._measured))  # the server hears fewer than in a run
        return [self._cost(client, costs[self._later, client.id], (first, later, final)) for client in self._measured]

    def steps(self, client: Client, exchanges: Sequence[Exchange]) -> int:
        """Training steps of a client; a phase on some of its rows takes the share that it took when it was measured."""
        total = 0
        for exchange in exchanges:
            for phase in self._executor.phases(client, exchange):
                share = self._executor.shares.get((exchange.name, phase.rows), 1.0)
                rows = share * len(phase_data(client, phase)[0])
                total += phase.epochs * math.ceil(rows / client.training.batch_size)
        return total

    def _round(self, number: int, exchanges: Sequence[Exchange], final: bool = False) -> RoundTotals:
        federation = self._federation
        trial = copy.copy(federation)
        trial.executor = self._executor
        trial.plugins = [*federation.plugins, _NobodyMissing()]
        trial.loggers = []
        ids = [client.id for client in self._measured]
        round = Round(
            number,
            final=final,
            method=federation.method,
            server=federation.server,
            history=federation.history,
            present=ids,
            evaluated=False,
            cohort=ids,
        )
        play(trial, round, exchanges)
        return round.totals

    def _cost(self, client: Client, measured: _ClientCost, rounds: Sequence[RoundTotals]) -> NetworkCost:
        federation = self._federation
        module = federation.model_factory.module(client.architecture, self._variants[client.id])
        return NetworkCost(
            name=self.networks[client.id],
            client=client.id,
            clients=list(self.networks.values()).count(self.networks[client.id]),
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            flops=flops(federation.method.personal_model(module), example_input(client, module)),
            down=tuple(totals.down.get(client.id, 0) for totals in rounds),
            up=tuple(totals.up.get(client.id, 0) for totals in rounds),
            nbytes=measured.nbytes,
            peak=sum(tensor.nbytes for tensor in module.state_dict().values()) + measured.peak,
            seconds_batch=measured.seconds_training / max(1, measured.steps),
            seconds_row=measured.seconds_row,
            seconds_rest=measured.seconds - measured.seconds_measuring,
        )


class _NobodyMissing(Plugin):
    """Whom the plugins before it would let drop out, or be late, takes part all the same."""

    name = "nobody missing"

    def select(self, round: Round) -> None:
        round.unreachable.clear()
        round.silenced.clear()
        round.late.clear()

    def after_jobs(
        self, round: Round, jobs: Sequence[TrainJob], sent: Sequence[JobResult], read: Sequence[JobResult]
    ) -> None:
        round.late.clear()
        round.busy.clear()


# measuring ----------------------------------------------------------------------------------------------------------


@dataclass
class _ClientCost:
    """What a client costs in a round, over its exchanges.

    Attributes:
        nbytes: of its weights and its state. peak: bytes that it makes at work, beside its network.
        steps, seconds_training: of training. seconds_row: scoring one row.
        seconds: of all its work. seconds_measuring: what of it is training, scoring and counting.
    """

    nbytes: int = 0
    peak: int = 0
    steps: int = 0
    seconds_training: float = 0.0
    seconds_row: float = 0.0
    seconds: float = 0.0
    seconds_measuring: float = 0.0


class MeasuringExecutor(Executor):
    """Carries out jobs with a few batches of each phase, and measures them.

    Attributes:
        costs: (round, number of a client) -> what it cost.
        shares: (exchange, rows of a phase) -> the share that they are of the phase's data, where last measured.
    """

    in_process = True

    def __init__(self, setup: ExecutorSetup) -> None:
        super().__init__(setup)
        self.costs: defaultdict[tuple[int, int], _ClientCost] = defaultdict(_ClientCost)
        self.shares: dict[tuple[str, str | None], float] = {}

    def run(self, jobs: Sequence[TrainJob], done: Done) -> list[JobResult]:
        with keep_global_rng():
            results = [self._run_job(job) for job in jobs]
        done(len(jobs))
        return results

    def phases(self, client: Client, exchange: Exchange) -> Sequence[Phase]:
        """What a client trains in an exchange."""
        if not exchange.trains:
            return ()
        return self.setup.method.phases(client.training) if exchange.phases is None else exchange.phases

    def _run_job(self, job: TrainJob) -> JobResult:
        cost = self.costs[job.round, job.client.id]
        began = time.perf_counter()
        result = run_job(job, self.setup.method, self.setup.model_factory, self.setup.store, self._train)
        cost.seconds += time.perf_counter() - began
        weights = self.setup.model_factory.state(job.client.architecture, job.variant)
        cost.nbytes = nbytes({"weights": weights}) + nbytes(result.state)
        return result

    def _train(self, work: ClientWork) -> TrainingResult:
        """Train on one batch of each phase for its memory, and on a few for their time; score up to 128 rows."""
        client, method, exchange = work.client, work.method, work.job.exchange
        cost = self.costs[work.job.round, client.id]
        began = time.perf_counter()
        for phase in self.phases(client, exchange):
            if phase.rows is not None:
                rows = len(get_tensor(client.context, phase.rows))
                self.shares[exchange.name, phase.rows] = rows / max(1, len(phase_data(client, phase)[0]))
        with AllocationTracker() as made:
            train(client, method, client.context, 1, exchange.phases)
        ready = time.perf_counter()
        trained = train(client, method, client.context, _BATCHES if work.job.round > 1 else 1, exchange.phases)
        cost.seconds_training += time.perf_counter() - ready
        cost.steps += trained.steps
        cost.peak = max(cost.peak, made.peak)
        held = len(client.data.test)
        if held:
            # rows of clients that are scored together fill a chunk
            count = CHUNK if are_scored_together(method) else min(CHUNK, held)
            part = Part(client.data.test.select(torch.arange(count) % held), client.data.train.scale)
            with AllocationTracker() as made:
                evaluate_model(client, method, [part])
            ready = time.perf_counter()
            evaluate_model(client, method, [part])
            cost.seconds_row = (time.perf_counter() - ready) / count
            cost.peak = max(cost.peak, made.peak)
        cost.seconds_measuring += time.perf_counter() - began
        return trained
