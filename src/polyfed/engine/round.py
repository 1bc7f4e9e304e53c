"""One round: plugins select, the method plans, clients work, uploads are read and aggregated, the round is recorded."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polyfed.core.client import Client
from polyfed.core.message import Message, in_plain_order, read_only
from polyfed.core.method import Exchange, Method
from polyfed.core.randomness import generator
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.engine.evaluation import NOT_EVALUATED, Score
from polyfed.engine.evaluator import Evaluator
from polyfed.engine.executors.base import Executor, Job, Outcome
from polyfed.engine.plugin import Plugin, Records
from polyfed.engine.transaction import Transaction
from polyfed.engine.uploads import sent_nbytes
from polyfed.errors import PolyfedError, RunError
from polyfed.profiling import Section, section
from polyfed.registry import PLUGINS
from polyfed.results.schema import RoundRecord, in_order


@dataclass
class Round:
    """A round under way.

    Attributes:
        number: from 1. final: whether it is the method's round after the last one (`Method.closing`).
        method, server: of the federation. history: the records of the rounds before.
        present: who is in the federation, in order of number. cohort: who is asked to take part, drawn of these.
        unreachable: drop out before anything reaches them. silenced: nothing that they send leaves them.
        late: what they send arrives in a later round. busy: still at work for an earlier exchange of this round.
        failed: whose work came to nothing, not by their own fault. asked: by any exchange so far.
        evaluated: whether clients are scored at its end. counts_operations: whether jobs tell how many they take.
        exchange: the present one. totals: what the round adds up to. notes: of plugins, by name.
    """

    number: int
    final: bool
    method: Method
    server: Server
    history: Records
    present: list[int]
    evaluated: bool
    cohort: list[int] = field(default_factory=list)
    unreachable: set[int] = field(default_factory=set)
    silenced: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    busy: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    counts_operations: bool = False
    exchange: Exchange = field(default_factory=lambda: Exchange("train"))
    totals: RoundTotals = field(default_factory=lambda: RoundTotals())
    notes: dict[str, Any] = field(default_factory=dict)

    def reached(self, ids: Iterable[int]) -> list[int]:
        """Those of `ids` whom a message reaches."""
        return [i for i in ids if i not in self.unreachable]

    def working(self, ids: Iterable[int]) -> list[int]:
        """Those of `ids` who take part in the present exchange."""
        away = self.unreachable | self.failed | self.busy
        return [i for i in ids if i not in away]

    def dropped(self) -> list[int]:
        """Who of those asked has dropped out so far."""
        gone = self.unreachable | self.silenced
        return sorted((self.asked & gone) | self.failed)


class RoundTotals:
    """What a round adds up to, over its exchanges."""

    def __init__(self) -> None:
        self.down: dict[int, int] = {}
        self.up: dict[int, int] = {}
        self.in_paper = [0, 0]
        self.rejected: list[dict[str, Any]] = []
        self.loss = self.samples = self.steps = 0.0
        self.sums: dict[str, float] = {}
        self.scores: dict[int, Score] = {}

    def add(self, job: Job, outcome: Outcome, method: Method, heard: bool) -> None:
        """Count one outcome. Bytes count when sent, also those of a rejected upload, unless nothing left the client."""
        number = outcome.client_id
        self.down[number] = self.down.get(number, 0) + sent_nbytes(method, job.message)
        self.up[number] = self.up.get(number, 0) + (outcome.bytes_up if heard else 0)
        self.in_paper[0] += method.paper_nbytes(job.message)
        self.in_paper[1] += method.paper_nbytes(outcome.message) if heard else 0
        if outcome.refused is not None:
            self.rejected.append({"client": number, "reason": outcome.refused})
        if not outcome.counts:
            return
        self.loss += outcome.trained.loss * outcome.trained.samples
        self.samples += outcome.trained.samples
        self.steps += outcome.trained.steps
        for name, value in outcome.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        if outcome.score is not None:
            self.scores[number] = outcome.score

    def record(self) -> dict[str, Any]:
        """The round's part of `rounds.jsonl`; `sums` are the method's own, per training step."""
        return {
            "bytes_up": sum(self.up.values()),
            "bytes_down": sum(self.down.values()),
            "bytes_up_as_in_paper": self.in_paper[1],
            "bytes_down_as_in_paper": self.in_paper[0],
            "bytes_by_client": {str(n): {"down": self.down[n], "up": self.up[n]} for n in sorted(self.down)},
            "train_loss": self.loss / self.samples if self.samples else None,
            "samples": int(self.samples),
            "refused": self.rejected,
            "sums": {name: value / max(self.steps, 1) for name, value in self.sums.items()},
        }


def draw_cohort(training: Training, seed: int, number: int, present: Sequence[int]) -> list[int]:
    """The clients of a round, drawn from those present without replacement, in order of number."""
    order = torch.randperm(len(present), generator=generator(seed, "selection", number))
    return sorted(present[place] for place in order[: training.drawn(len(present))].tolist())


class RoundRunner:
    """Runs rounds on the parts of a federation.

    Args:
        clients: by number. training: learning rates, and how many clients take part. seed: of the draws.
        plugins: in order. executor: carries out the jobs. transaction: takes over what clients then are.
        evaluator: scores them. aggregate: has the server take in what an exchange brought.
        progress: told (jobs of the exchange, those done).
    """

    def __init__(
        self,
        method: Method,
        server: Server,
        clients: Sequence[Client],
        training: Training,
        seed: int,
        plugins: Sequence[Plugin],
        executor: Executor,
        transaction: Transaction,
        evaluator: Evaluator,
        aggregate: Callable[[Round, Mapping[int, Message]], None],
        progress: Callable[[int, int], None],
    ) -> None:
        self.method = method
        self.server = server
        self.clients = clients
        self.training, self.seed = training, seed
        self.plugins, self.executor = plugins, executor
        self.transaction, self.evaluator = transaction, evaluator
        self._aggregate, self._progress = aggregate, progress

    def run(self, round: Round, exchanges: Sequence[Exchange]) -> dict[str, Any]:
        """Run a round; its record, but for the seconds.

        Raises:
            RunError: a client or the server failed; says which, when and where. RoundRefused: it must not count.
        """
        selected = self._select(round)
        with self._at_server(round, "planning", "aggregate"):
            self.method.plan(self.server, selected)
        for place, exchange in enumerate(exchanges):
            jobs = self._jobs(round, exchange, place)
            sent = self.executor.run(jobs, functools.partial(self._progress, len(jobs)))
            read = self._receive(round, jobs, sent)
            uploads = self._take_over(round, jobs, sent, read)
            with self._at_server(round, "aggregation", "aggregate"):
                for plugin in self.plugins:
                    uploads = plugin.deliver(round, uploads)
                self._aggregate(round, uploads)
                self.server.state = in_plain_order(self.server.state)
            del sent, read, uploads  # which nobody needs while the clients are scored
        self.server.exchange = "train"
        return self._record(round, selected)

    def _select(self, round: Round) -> list[int]:
        """Let everybody be asked in a final round, else the cohort; who of them is reached."""
        self.server.round = round.number
        for plugin in self.plugins:
            plugin.select(round)
        self.server.admit(round.present)
        if round.final:
            round.cohort = list(round.present)
        else:
            round.cohort = draw_cohort(self.training, self.seed, round.number, round.present)
        round.asked = set(round.cohort)
        return round.reached(round.cohort)

    def _jobs(self, round: Round, exchange: Exchange, place: int) -> list[Job]:
        """The jobs of an exchange: who works, and what each is sent."""
        round.exchange = exchange
        self.server.exchange = exchange.name
        ids = round.cohort if exchange.who == "selected" else round.present
        round.asked.update(ids)
        scores = round.evaluated and exchange.trains and self.evaluator.scores_after_training
        with self._at_server(round, "broadcast", "messages"):
            return [
                Job(
                    self.clients[client_id],
                    read_only(self.method.broadcast(self.server, client_id)),
                    self.method.variant(self.server, client_id),
                    exchange,
                    round.number,
                    scores,
                    self.evaluator.auc,
                    round.final,
                    place,
                    round.counts_operations,
                )
                for client_id in round.working(ids)
            ]

    def _receive(self, round: Round, jobs: Sequence[Job], sent: Sequence[Outcome]) -> list[Outcome]:
        """The uploads as the server reads them: what was done last to them is undone first."""
        read = list(sent)
        with section("messages"):
            for plugin in reversed(self.plugins):
                read = plugin.receive(round, jobs, read)
        return read

    def _take_over(
        self, round: Round, jobs: Sequence[Job], sent: Sequence[Outcome], read: Sequence[Outcome]
    ) -> Mapping[int, Message]:
        """Count what came of the jobs, and let clients be what they have become; what was heard of those that count."""
        for plugin in self.plugins:
            plugin.after_jobs(round, jobs, sent, read)
        for job, outcome in zip(jobs, read, strict=True):
            if outcome.dropped:
                round.failed.add(outcome.client_id)
            with server_stage("paper_nbytes", round.number):
                round.totals.add(job, outcome, self.method, outcome.client_id not in round.silenced)
        counted = [outcome for outcome in read if outcome.counts]
        self.transaction.commit(counted)
        return {o.client_id: o.message for o in counted if o.client_id not in round.silenced}

    def _record(self, round: Round, selected: list[int]) -> dict[str, Any]:
        """What the round leaves behind."""
        record: dict[str, Any] = {"round": round.number, "seconds": 0.0, "closing": round.final, "clients": selected}
        record |= {"lr": self.training.lr_at(round.number), **round.totals.record()}
        for plugin in self.plugins:
            said = plugin.record(round)
            if plugin.name in PLUGINS:
                record |= said
            elif said:
                record.setdefault("plugins", {})[plugin.name] = said
        record["server"] = dict(self.server.log)
        self.server.log.clear()
        record["evaluated"] = round.evaluated
        with section("score"):
            record |= self.evaluator.record(round.totals.scores) if round.evaluated else NOT_EVALUATED
        return in_order(record, RoundRecord)

    @contextlib.contextmanager
    def _at_server(self, round: Round, stage: str, profiled_as: Section) -> Iterator[None]:
        """The server works: errors name the stage and the round, and plugins may take its time."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(server_stage(stage, round.number))
            stack.enter_context(section(profiled_as))
            for plugin in self.plugins:
                stack.enter_context(plugin.serving(round))
            yield


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
