"""An executor that measures what clients cost: a few of them work, the others answer with what these have uploaded."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from polyfed.core.client import Client
from polyfed.core.message import get_tensor, nbytes
from polyfed.core.method import Exchange, Method, Phase, TrainingResult
from polyfed.core.model_factory import ModelFactory
from polyfed.engine.executors.base import Serial, run_job
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.local_training import phase_data, train
from polyfed.engine.operation_counter import AllocationTracker
from polyfed.engine.scoring import CHUNK, evaluate_model
from polyfed.engine.weight_store import WeightStore

__all__ = ["Cost", "MeasuringExecutor"]

TRIAL_SECONDS = 1.0  # about so long a client trains in a round after the first


@dataclass
class Cost:
    """What a client costs in a round.

    Attributes:
        kept: bytes of its weights and its state. peak: bytes that it makes at work, beside its network.
        batch, row: seconds of a training step, and of scoring a row. rest: seconds of all else.
        operations: of receiving, training and uploading, where the round counts them.
    """

    kept: int = 0
    peak: int = 0
    batch: float = 0.0
    row: float = 0.0
    rest: float = 0.0
    operations: int = 0


class MeasuringExecutor(Serial):
    """Carries out the jobs of one client of each network, with a few batches of each phase, and measures them.

    Any other client answers with the upload of one that had the same network in the exchange, and stays as it is. Where
    nobody trains and everybody is asked, everybody answers: it is cheap, and what comes may be needed.

    Args:
        store: where new weights go.
        measured: numbers of the clients that always work themselves.
        batches: of each phase at most, in rounds after the first; one in the first.

    Attributes:
        costs: (round, number of a client) -> what it cost, of those who worked.
        seconds: of all work so far.
    """

    def __init__(
        self,
        method: Method,
        model_factory: ModelFactory,
        store: WeightStore,
        measured: Collection[int],
        batches: int,
    ) -> None:
        super().__init__(method, model_factory, store)
        self._measured = frozenset(measured)
        self._most = batches
        self._batches: dict[int, int] = {}  # client -> how many it trains on in its next exchange
        self._shares: dict[tuple[str, str | None], float] = {}  # exchange, a phase's rows -> their share of the data
        self.costs: defaultdict[tuple[int, int], Cost] = defaultdict(Cost)
        self.seconds = 0.0
        self._seconds_training = 0.0  # and of scoring, of the present job

    def run(self, jobs: Sequence[TrainJob], done: Callable[[int], None]) -> list[JobResult]:
        """See `Executor`."""
        began = time.perf_counter()
        working = self._working(jobs)
        own = {job.client.id: self._carry_out(job) for job in working}
        of_network = {_network(job): own[job.client.id] for job in reversed(working)}
        others = [job for job in jobs if job.client.id not in own]
        outcomes = own | {job.client.id: _answer(job, of_network[_network(job)]) for job in others}
        self.seconds += time.perf_counter() - began
        done(len(jobs))
        return [outcomes[job.client.id] for job in jobs]

    def steps(self, client: Client, exchanges: Sequence[Exchange]) -> int:
        """Training steps of a client in these; a phase takes the share of the data that it last took when measured."""
        size = client.training.batch_size
        total = 0
        for exchange in exchanges:
            for phase in self._phases(client, exchange):
                share = self._shares.get((exchange.name, phase.rows), 1.0)
                total += phase.epochs * math.ceil(share * len(phase_data(client, phase)[0]) / size)
        return total

    def _working(self, jobs: Sequence[TrainJob]) -> list[TrainJob]:
        """The jobs that are carried out: those of the measured and of who is only asked, one of every other network."""
        working = []
        for job in jobs:
            only_asked = job.exchange.who == "all" and not job.exchange.trains
            if only_asked or job.client.id in self._measured:
                working.append(job)
        networks = {_network(job) for job in working}
        for job in jobs:
            if _network(job) not in networks:
                networks.add(_network(job))
                working.append(job)
        return working

    def _carry_out(self, job: TrainJob) -> JobResult:
        """Receive, train on a few batches, upload; what it cost is added up."""
        model_factory = self._model_factory
        cost = self.costs[job.round, job.client.id]
        fresh = functools.partial(self._store.allocate, job.client.architecture, job.variant)
        self._seconds_training = 0.0
        began = time.perf_counter()
        outcome = run_job(job, self._method, model_factory, fresh, self._train)
        cost.rest += time.perf_counter() - began - self._seconds_training
        cost.operations += outcome.operations
        weights = model_factory.state(job.client.architecture, job.variant)
        cost.kept = nbytes({"weights": weights}) + nbytes(outcome.state)
        return outcome

    def _train(self, client: Client, job: TrainJob, method: Method, model_factory: ModelFactory) -> TrainingResult:
        """Train on a few batches, and measure what training and scoring cost."""
        began = time.perf_counter()
        cost = self.costs[job.round, client.id]
        self._note_shares(client, job.exchange)
        if job.round > 1:  # the first round's contexts are smaller
            cost.peak = max(cost.peak, self._peak(client, job.exchange))
        batches = self._batches.get(client.id, 1)
        ready = time.perf_counter()
        trained = train(client, method, client.context, batches, job.exchange.phases, model_factory.training)
        cost.batch = max(cost.batch, (time.perf_counter() - ready) / max(trained.steps, 1))
        self._batches[client.id] = max(1, min(self._most, int(TRIAL_SECONDS / max(cost.batch, 1e-6))))
        rows = len(client.data.test) + len(client.missing or ())
        if rows:
            ready = time.perf_counter()
            evaluate_model(client, method, client.data.test)
            cost.row = (time.perf_counter() - ready) / rows
        self._seconds_training = time.perf_counter() - began
        return trained

    def _note_shares(self, client: Client, exchange: Exchange) -> None:
        """Which share of the data each phase goes through."""
        for phase in self._phases(client, exchange):
            if phase.rows is not None:
                rows = len(get_tensor(client.context, phase.rows))
                self._shares[exchange.name, phase.rows] = rows / max(1, len(phase_data(client, phase)[0]))

    def _peak(self, client: Client, exchange: Exchange) -> int:
        """The most bytes that a client at work makes: for a batch of each phase, or for scoring a chunk of rows."""
        with AllocationTracker() as training:
            train(client, self._method, client.context, 1, exchange.phases, self._model_factory.training)
        with AllocationTracker() as scoring:
            if len(client.data.test):
                chunk = client.data.test.select(torch.arange(min(CHUNK, len(client.data.test))))
                evaluate_model(client, self._method, chunk, others=False)
        return int(max(training.peak, scoring.peak))

    def _phases(self, client: Client, exchange: Exchange) -> Sequence[Phase]:
        if not exchange.trains:
            return ()
        return self._method.phases(client.training) if exchange.phases is None else exchange.phases


def _network(job: TrainJob) -> tuple[str, str]:
    """The architecture and the variant that a client trains in an exchange."""
    return job.client.architecture, job.variant


def _answer(job: TrainJob, measured: JobResult) -> JobResult:
    """What a client sends that does not work itself: what one with the same network sent. It stays as it is."""
    return dataclasses.replace(measured, client_id=job.client.id, weights=job.client.weights, state=job.client.state)
