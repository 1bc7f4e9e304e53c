"""One round: plugins select, the method plans, clients work, uploads are read and aggregated, the round is recorded."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polyfed.core.client import Client
from polyfed.core.message import Message, contiguous, freeze, writes
from polyfed.core.method import Exchange, Method
from polyfed.core.randomness import generator
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.engine.evaluation import Evaluator, not_evaluated
from polyfed.engine.executors.client_work import Executor
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.plugin import Plugin, read_uploads
from polyfed.engine.round_state import Round
from polyfed.engine.transaction import Transaction
from polyfed.errors import PolyfedError, RunError
from polyfed.registry import PLUGINS
from polyfed.results.schema import RoundRecord, in_order
from polyfed.signals import raise_if_lost


def draw_cohort(training: Training, seed: int, number: int, present: Sequence[int]) -> list[int]:
    """The clients of a round, drawn from those present without replacement, in order of number."""
    order = torch.randperm(len(present), generator=generator(seed, "selection", number))
    return sorted(present[place] for place in order[: training.cohort_size(len(present))].tolist())


@dataclass
class RoundRunner:
    """Runs rounds on the parts of a federation.

    Attributes:
        clients: by number. training: learning rates, and how many clients take part. seed: of the draws.
        plugins: in order. executor: carries out the jobs. transaction: takes over what clients then are.
        evaluator: scores them. aggregate: has the server take in what an exchange brought.
        progress: called with (jobs of the exchange, those done).
    """

    method: Method
    server: Server
    clients: Sequence[Client]
    training: Training
    seed: int
    plugins: Sequence[Plugin]
    executor: Executor
    transaction: Transaction
    evaluator: Evaluator
    aggregate: Callable[[Round, Mapping[int, Message]], None]
    progress: Callable[[int, int], None]

    def start(self, present: Iterable[int]) -> None:
        """Before round 1: the server knows who is there, and the method begins."""
        self.server.set_available(present)
        with server_stage("start", 0):
            self.method.init_server(self.server)

    def run(self, round: Round, exchanges: Sequence[Exchange]) -> dict[str, Any]:
        """Run a round; its record, but for the seconds.

        Raises:
            RunError: a client or the server failed; says which, when and where.
        """
        selected = self.play(round, exchanges)
        return self._record(round, selected)

    def play(self, round: Round, exchanges: Sequence[Exchange]) -> list[int]:
        """A round without its record; who of the cohort was reached.

        Raises:
            RunError: as for `run`.
        """
        selected = self._select(round)
        self.server.state = contiguous(self.server.state, self.server.device)
        with server_stage("planning", round.number):
            self.method.start_round(self.server, selected)
        for place, exchange in enumerate(exchanges):
            jobs = self._jobs(round, exchange, place)
            sent = self.executor.run(jobs, functools.partial(self._job_done, len(jobs)))
            read = read_uploads(self.plugins, round, jobs, sent)
            uploads = self._take_over(round, jobs, sent, read)
            with server_stage("aggregation", round.number):
                written = {number: writes(message) for number, message in uploads.items()}
                self.aggregate(round, uploads)
                self.transaction.check_untouched(n for n, before in written.items() if writes(uploads[n]) != before)
                self.server.state = contiguous(self.server.state, self.server.device)
            del sent, read, uploads  # messages that nobody needs while the clients are scored
        self.server.exchange = "train"
        return selected

    def _job_done(self, jobs: int, done: int) -> None:
        raise_if_lost()
        self.progress(jobs, done)

    def _select(self, round: Round) -> list[int]:
        """Let everybody be asked in a final round, else the cohort, drawn where none is given; who is reached."""
        self.server.round = round.number
        for plugin in self.plugins:
            plugin.select(round)
        self.server.set_available(round.present)
        if round.final:
            round.cohort = list(round.present)
        elif not round.cohort:
            round.cohort = draw_cohort(self.training, self.seed, round.number, round.present)
        round.asked = set(round.cohort)
        return round.reached(round.cohort)

    def _jobs(self, round: Round, exchange: Exchange, place: int) -> list[TrainJob]:
        round.exchange = exchange
        self.server.exchange = exchange.name
        ids = round.cohort if exchange.who == "selected" else round.present
        round.asked.update(ids)
        scores = round.evaluated and exchange.trains and "after_training" in self.evaluator.stages
        with server_stage("broadcast", round.number):
            return [
                TrainJob(
                    self.clients[client_id],
                    freeze(self.method.broadcast(self.server, client_id)),
                    self.method.variant(self.server, client_id),
                    exchange,
                    round.number,
                    scores,
                    self.evaluator.figures,
                    round.final,
                    place,
                    round.counts_operations,
                    self.server.device,
                )
                for client_id in round.working(ids)
            ]

    def _take_over(
        self, round: Round, jobs: Sequence[TrainJob], sent: Sequence[JobResult], read: Sequence[JobResult]
    ) -> Mapping[int, Message]:
        """Count the results of jobs, have clients take over those that count, and give the uploads of these.

        Plugins may hold back what is still under way.
        """
        for plugin in self.plugins:
            plugin.after_jobs(round, jobs, sent, read)
        for job, outcome in zip(jobs, read, strict=True):
            if outcome.dropped:
                round.failed.add(outcome.client_id)
            with server_stage("nbytes_in_paper", round.number):
                round.totals.add(job, outcome, self.method, outcome.client_id not in round.silenced)
        done = list(read)
        for plugin in self.plugins:
            done = plugin.complete(round, jobs, done)
        counted = [outcome for outcome in done if outcome.counts]
        self.transaction.commit(counted)
        lost = round.silenced | round.late
        return {o.client_id: o.message for o in counted if o.client_id not in lost}

    def _record(self, round: Round, selected: list[int]) -> dict[str, Any]:
        record: dict[str, Any] = {"round": round.number, "seconds": 0.0, "processor_seconds": 0.0}
        record |= {
            "final_round": round.final,
            "clients": selected,
            "lr": self.training.lr_at(round.number),
            **round.totals.record(),
        }
        for plugin in self.plugins:
            entry = plugin.record(round)
            if plugin.name in PLUGINS:
                record |= entry
            elif entry:
                record.setdefault("plugins", {})[plugin.name] = entry
        record["server"] = dict(self.server.log)
        self.server.log.clear()
        record["evaluated"] = round.evaluated
        scores = round.totals.scores
        main = self.evaluator.main_score
        record |= self.evaluator.record(scores) if round.evaluated else not_evaluated(main)
        return in_order(record, RoundRecord)


@contextlib.contextmanager
def server_stage(stage: str, number: int) -> Iterator[None]:
    """Errors of the server half name the stage and the round."""
    try:
        yield
    except RunError as error:
        raise RunError(f"server, round {number}, {stage}: {error}") from error
    except PolyfedError:
        raise
    except Exception as error:
        raise RunError(f"server, round {number}, {stage}: {type(error).__name__}: {error}") from error
