"""Rounds that the engine plays before a run, so that they can be measured: nobody is missing, and nothing is written.

Two rounds are played, the first and the next in which somebody trains, as some methods' first messages are smaller than
the later ones; and the final round, where there is one. One client of each network takes part, with a few batches.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from polyfed.core.client import Client
from polyfed.core.inference import CHUNK
from polyfed.core.message import get_tensor, nbytes
from polyfed.core.method import Exchange, Phase, TrainingResult
from polyfed.core.randomness import keep_global_rng
from polyfed.engine.compatibility import example_input
from polyfed.engine.executors.client_scores import are_scored_together
from polyfed.engine.executors.client_work import ClientWork, run_job
from polyfed.engine.executors.executor import Done, ExecutorSetup
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.executors.serial import Serial
from polyfed.engine.federation import Federation
from polyfed.engine.local_training import phase_data, train
from polyfed.engine.operation_counter import AllocationTracker, flops
from polyfed.engine.pace import single_threaded
from polyfed.engine.plugin import Plugin
from polyfed.engine.round import play, start
from polyfed.engine.round_state import Round
from polyfed.engine.scoring import Part, evaluate_model, part_of
from polyfed.experiments.cost_estimate import ArchitectureCheck
from polyfed.models.split import SplitModel, cut_shapes

__all__ = ["TrialRounds"]

_BATCHES = 5  # batches of each phase, at most, in round 2, one in round 1; recipes of FedHeNN align in every fifth step
TRIAL_SECONDS = 1.0  # about so long a client trains in a round after the first


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


@dataclass(frozen=True)
class _Played:
    """What a round took: bytes down and up by number of client, and seconds of the server."""

    number: int
    down: Mapping[int, int] = dataclasses.field(default_factory=dict)
    up: Mapping[int, int] = dataclasses.field(default_factory=dict)
    server_seconds: float = 0.0


class TrialRounds:
    """The trial of a federation. The method is started, and the federation cannot be run afterwards.

    Attributes:
        executor: measures the clients.
        networks: number of a client -> what it trains in the later round.
        server_seconds: of the later round.
    """

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        method = federation.method
        server = federation.server
        with single_threaded():
            start(federation, server.all_client_ids)
        later = range(2, federation.training.rounds + 1)  # the first of them in which somebody trains
        self._later = next((n for n in later if any(exchange.trains for exchange in method.exchanges(n))), 2)
        server.round = self._later
        self._variants = {client.id: method.variant(server, client.id) for client in federation.clients}
        self.networks = {c.id: f"{c.architecture} {self._variants[c.id]}".rstrip() for c in federation.clients}
        firsts = {self.networks[client.id]: client for client in reversed(federation.clients)}
        self._measured = sorted(firsts.values(), key=lambda client: client.id)
        self._measured_ids = [client.id for client in self._measured]
        setup = ExecutorSetup(method, federation.model_factory, federation.clients, federation.store)
        self.executor = MeasuringExecutor(setup)
        self._trial = copy.copy(federation)
        self._trial.executor = self.executor
        self._trial.plugins = [*federation.plugins, _NobodyMissing()]
        self._trial.loggers = []
        self.server_seconds = 0.0

    def play(self) -> list[ArchitectureCheck]:
        """Play the rounds; every network's costs.

        Raises:
            RunError: a client or the server failed; says which, when and where.
        """
        method = self._federation.method
        with single_threaded():
            first = self._round(1, method.exchanges(1))
            second = self._round(self._later, method.exchanges(self._later))
            last = self._round(self._later + 1, method.final_exchanges(), final=True)
        self.server_seconds = second.server_seconds
        return [self._described(client, first, second, last) for client in self._measured]

    def _round(self, number: int, exchanges: Sequence[Exchange], final: bool = False) -> _Played:
        if not exchanges:
            return _Played(number)
        federation = self._federation
        round = Round(
            number,
            final=final,
            method=federation.method,
            server=federation.server,
            history=federation.history,
            present=self._measured_ids,
            evaluated=False,
            cohort=self._measured_ids,
        )
        began = time.perf_counter()
        worked = self.executor.seconds
        play(self._trial, round, exchanges)
        cohort = federation.training.cohort_size(len(federation.clients))
        seconds = (time.perf_counter() - began) - (self.executor.seconds - worked)
        scale = max(1.0, cohort / len(self._measured))  # the server hears fewer than in a run
        return _Played(number, round.totals.down, round.totals.up, scale * seconds)

    def _described(self, client: Client, first: _Played, second: _Played, last: _Played) -> ArchitectureCheck:
        federation = self._federation
        variant = self._variants[client.id]
        module = federation.model_factory.module(client.architecture, variant)
        own = federation.model_factory.module(client.architecture, variant, alone=True)
        split = own if isinstance(own, SplitModel) else None
        late, final = (self.executor.costs[played.number, client.id] for played in (second, last))
        final_seconds = final.batch * self.executor.steps(client, federation.method.final_exchanges()) + final.rest
        return ArchitectureCheck(
            name=self.networks[client.id],
            client=client.id,
            clients=list(self.networks.values()).count(self.networks[client.id]),
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
        )


# measuring ----------------------------------------------------------------------------------------------------------


@dataclass
class _Cost:
    """What a client costs in a round.

    Attributes:
        kept: bytes of its weights and its state. peak: bytes that it makes at work, beside its network.
        batch, row: seconds of a training step, and of scoring a row. rest: seconds of all else.
    """

    kept: int = 0
    peak: int = 0
    batch: float = 0.0
    row: float = 0.0
    rest: float = 0.0


class MeasuringExecutor(Serial):
    """Carries out jobs with a few batches of each phase, and measures them.

    Attributes:
        costs: (round, number of a client) -> what it cost.
        seconds: of all work so far.
    """

    def __init__(self, setup: ExecutorSetup) -> None:
        super().__init__(setup)
        self._batches: dict[int, int] = {}  # client -> how many it trains on in its next exchange
        self._shares: dict[tuple[str, str | None], float] = {}  # exchange, a phase's rows -> their share of the data
        self.costs: defaultdict[tuple[int, int], _Cost] = defaultdict(_Cost)
        self.seconds = 0.0
        self._seconds_training = 0.0  # and of scoring, of the present job

    def run(self, jobs: Sequence[TrainJob], done: Done) -> list[JobResult]:
        """See `Executor`."""
        began = time.perf_counter()
        with keep_global_rng():
            outcomes = [self._carry_out(job) for job in jobs]
        self.seconds += time.perf_counter() - began
        done(len(jobs))
        return outcomes

    def steps(self, client: Client, exchanges: Sequence[Exchange]) -> int:
        """Training steps of a client in these; a phase takes the share of the data that it last took when measured."""
        total = 0
        for exchange in exchanges:
            for phase in self._phases(client, exchange):
                rows = self._shares.get((exchange.name, phase.rows), 1.0) * len(phase_data(client, phase)[0])
                total += phase.epochs * math.ceil(rows / client.training.batch_size)
        return total

    def _carry_out(self, job: TrainJob) -> JobResult:
        """Receive, train on a few batches, upload; what it cost is added up."""
        cost = self.costs[job.round, job.client.id]
        self._seconds_training = 0.0
        began = time.perf_counter()
        outcome = run_job(job, self.setup.method, self.setup.model_factory, self.setup.store, self._train)
        cost.rest += time.perf_counter() - began - self._seconds_training
        weights = self.setup.model_factory.state(job.client.architecture, job.variant)
        cost.kept = nbytes({"weights": weights}) + nbytes(outcome.state)
        return outcome

    def _train(self, work: ClientWork) -> TrainingResult:
        client = work.client
        job = work.job
        method = work.method
        began = time.perf_counter()
        cost = self.costs[job.round, client.id]
        for phase in self._phases(client, job.exchange):
            if phase.rows is not None:
                rows = len(get_tensor(client.context, phase.rows))
                self._shares[job.exchange.name, phase.rows] = rows / max(1, len(phase_data(client, phase)[0]))
        if job.round > 1:  # the first round's contexts are smaller
            cost.peak = max(cost.peak, self._peak(client, job.exchange))
        batches = self._batches.get(client.id, 1)
        ready = time.perf_counter()
        trained = train(client, method, client.context, batches, job.exchange.phases)
        cost.batch = max(cost.batch, (time.perf_counter() - ready) / max(trained.steps, 1))
        self._batches[client.id] = max(1, min(_BATCHES, int(TRIAL_SECONDS / max(cost.batch, 1e-6))))
        part = part_of(client, "test")
        own = len(client.data.test)
        if 0 < own < CHUNK and are_scored_together(method):  # rows of many clients fill a batch
            part = part._replace(samples=client.data.test.select(torch.arange(CHUNK) % own))
        rows = len(part.samples) + len(client.missing or ())
        if rows and job.round > 1:
            ready = time.perf_counter()
            evaluate_model(client, method, [part])
            cost.row = (time.perf_counter() - ready) / rows
        self._seconds_training = time.perf_counter() - began
        return trained

    def _peak(self, client: Client, exchange: Exchange) -> int:
        """The most bytes that a client at work makes: for a batch of each phase, or for scoring a chunk of rows."""
        context = self.setup
        with AllocationTracker() as training:
            train(client, context.method, client.context, 1, exchange.phases)
        with AllocationTracker() as scoring:
            if len(client.data.test):
                chunk = client.data.test.select(torch.arange(min(CHUNK, len(client.data.test))))
                evaluate_model(client, context.method, [Part(chunk, client.data.train.scale, is_test=False)])
        return int(max(training.peak, scoring.peak))

    def _phases(self, client: Client, exchange: Exchange) -> Sequence[Phase]:
        if not exchange.trains:
            return ()
        return self.setup.method.phases(client.training) if exchange.phases is None else exchange.phases
