"""Rounds that the engine plays before a run, so that they can be measured: nobody is missing, and nothing is written.

Rounds 1 and 2 are played, as some methods' first messages are smaller than the later ones; and the final round, where
there is one. One client of each network takes part, with a few batches.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polyfed.core.client import Client
from polyfed.core.inference import CHUNK
from polyfed.core.message import nbytes
from polyfed.core.method import Exchange, TrainingResult
from polyfed.core.randomness import keep_global_rng
from polyfed.engine.compatibility import example_input
from polyfed.engine.device import single_threaded
from polyfed.engine.executors.client_work import ClientWork, run_job
from polyfed.engine.executors.executor import Done, Executor, ExecutorSetup
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.federation import Federation
from polyfed.engine.local_training import train
from polyfed.engine.operation_counter import AllocationTracker, batch_sizes, flops
from polyfed.engine.round import play, start
from polyfed.engine.round_state import Round, RoundTotals
from polyfed.engine.scoring import Part, evaluate_model

__all__ = ["NetworkCost", "TrialRounds", "WorkCost"]

_BATCHES = 5  # batches of each phase, at most, in rounds after the first; recipes of FedHeNN align in every fifth step
_ABSENCE = ("availability", "devices")  # plugins that let clients drop out, or be late


@dataclass
class WorkCost:
    """What the work of one client takes in a round, over its exchanges.

    Attributes:
        nbytes: what it keeps: weights, buffers, state.
        peak: bytes at work: the network, and what training a batch and scoring up to 128 rows makes.
        steps: of training in a whole round. seconds_training: of all these, by those that were measured.
        seconds_row: scoring one row. seconds_rest: all else.
    """

    nbytes: int = 0
    peak: int = 0
    steps: int = 0
    seconds_training: float = 0.0
    seconds_row: float = 0.0
    seconds_rest: float = 0.0

    @property
    def seconds_batch(self) -> float:
        """One training step."""
        return self.seconds_training / max(1, self.steps)


@dataclass(frozen=True)
class NetworkCost:
    """What one network is and costs, measured on one of its clients.

    Attributes:
        name: of the architecture, with the variant of it that the clients train, where the method has several; where
            these change from round to round, as in round 2.
        clients: how many have this network. rows: training rows of the client that was measured.
        parameters: how many numbers are trained.
        flops: floating-point operations of one sample's way forward (`polyfed.engine.operation_counter.flops`).
        down, up: bytes that go to and come from this client in rounds 1 and 2 and the final round; 0 without one.
        work: of this client in round 2.
    """

    name: str
    clients: int
    rows: int
    parameters: int
    flops: int
    down: tuple[int, ...]
    up: tuple[int, ...]
    work: WorkCost


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
        self._later = 2
        if wanted is not None:
            rounds = range(2, max(2, federation.training.rounds) + 1)
            self._later = max(rounds, key=lambda number: self._parameters(wanted, number))
        server.round = self._later
        self._variants = {client.id: method.variant(server, client.id) for client in federation.clients}
        self.networks = {c.id: f"{c.architecture} {self._variants[c.id]}".rstrip() for c in federation.clients}
        firsts = {self.networks[client.id]: client for client in reversed(federation.clients)}
        if wanted is not None:
            firsts[self.networks[wanted]] = federation.clients[wanted]
        self._measured = sorted(firsts.values(), key=lambda client: client.id)
        setup = ExecutorSetup(method, federation.model_factory, federation.clients, federation.store)
        self._executor = _MeasuringExecutor(setup)
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
            began, of_clients = time.perf_counter(), self._executor.seconds
            later = self._round(self._later, method.exchanges(self._later))
            seconds = time.perf_counter() - began - (self._executor.seconds - of_clients)
            final = RoundTotals()
            if method.final_exchanges():
                final = self._round(self._later + 1, method.final_exchanges(), final=True)
        cohort = self._federation.training.cohort_size(len(self._federation.clients))
        self.server_seconds = seconds * max(1.0, cohort / len(self._measured))  # the server hears fewer than in a run
        return [self._cost(client, (first, later, final)) for client in self._measured]

    def _round(self, number: int, exchanges: Sequence[Exchange], final: bool = False) -> RoundTotals:
        federation = self._federation
        trial = copy.copy(federation)
        trial.executor = self._executor
        trial.plugins = [plugin for plugin in federation.plugins if plugin.name not in _ABSENCE]
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

    def _cost(self, client: Client, rounds: Sequence[RoundTotals]) -> NetworkCost:
        federation = self._federation
        name = self.networks[client.id]
        module = federation.model_factory.module(client.architecture, self._variants[client.id])
        return NetworkCost(
            name=name,
            clients=list(self.networks.values()).count(name),
            rows=client.n,
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            flops=flops(federation.method.personal_model(module), example_input(client, module)),
            down=tuple(totals.down.get(client.id, 0) for totals in rounds),
            up=tuple(totals.up.get(client.id, 0) for totals in rounds),
            work=self._executor.costs[self._later, client.id],
        )


class _MeasuringExecutor(Executor):
    """Carries out jobs with a few batches of each phase, and measures them.

    Attributes:
        costs: (round, number of a client) -> what its work takes. seconds: of all jobs so far, and of measuring.
    """

    in_process = True

    def __init__(self, setup: ExecutorSetup) -> None:
        super().__init__(setup)
        self.costs: defaultdict[tuple[int, int], WorkCost] = defaultdict(WorkCost)
        self.seconds = 0.0

    def run(self, jobs: Sequence[TrainJob], done: Done) -> list[JobResult]:
        with keep_global_rng():
            results = [self._run_job(job) for job in jobs]
        done(len(jobs))
        return results

    def _run_job(self, job: TrainJob) -> JobResult:
        cost = self.costs[job.round, job.client.id]
        weights = nbytes({"weights": self.setup.model_factory.state(job.client.architecture, job.variant)})
        cost.nbytes = weights
        cost.peak = max(cost.peak, weights)
        began = time.perf_counter()
        result = run_job(job, self.setup.method, self.setup.model_factory, self.setup.store, self._train)
        seconds = time.perf_counter() - began
        self.seconds += seconds
        cost.seconds_rest += seconds
        cost.nbytes = weights + nbytes(result.state)
        return result

    def _train(self, work: ClientWork) -> TrainingResult:
        """Train and score: on one batch of each phase for the memory, then on a few for the time."""
        client, method, exchange = work.client, self.setup.method, work.job.exchange
        cost = self.costs[work.job.round, client.id]
        began = time.perf_counter()
        samples = client.data.test if len(client.data.test) else client.data.train
        rows = min(CHUNK, len(samples))
        part = Part(samples.select(torch.arange(rows)), client.data.train.scale)
        with AllocationTracker() as made:
            train(client, method, client.context, 1, exchange.phases)
            evaluate_model(client, method, [part])
        cost.peak = max(cost.peak, cost.nbytes + made.peak)
        ready = time.perf_counter()
        most = _BATCHES if work.job.round > 1 else 1
        trained = train(client, method, client.context, most, exchange.phases)
        seconds = time.perf_counter() - ready
        phases = method.phases(client.training) if exchange.phases is None else exchange.phases
        steps = sum(len(batch_sizes(client, phase, client.context)) for phase in phases)
        cost.steps += steps
        cost.seconds_training += steps * seconds / max(1, trained.steps)
        ready = time.perf_counter()
        evaluate_model(client, method, [part])
        cost.seconds_row = (time.perf_counter() - ready) / rows
        cost.seconds_rest -= time.perf_counter() - began
        return trained
