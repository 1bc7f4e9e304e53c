"""Nodes in place of workers: the executor of a deployed federation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, State, first_nonfinite, freeze, get_group, get_tensor, nbytes
from polyfed.core.method import TrainingResult
from polyfed.core.modules import export_state
from polyfed.deploy.node_disk import checkpoint_id
from polyfed.deploy.node_registry import Answer, NodeRegistry
from polyfed.deploy.protocol import (
    JOB_FACTS,
    SHARED,
    Envelope,
    Kind,
    NodeError,
    SumAnswer,
    TaskRequest,
    TaskResult,
    checked_message,
    decode_body,
    parse,
    read_score,
)
from polyfed.deploy.sums import ServerSum
from polyfed.engine.evaluation import figures_of, kept_stages, scored_views
from polyfed.engine.executors.executor import Executor, ExecutorSetup
from polyfed.engine.executors.jobs import EvalJob, JobResult, Scores, TrainJob
from polyfed.engine.federation import Federation
from polyfed.engine.scoring import Score
from polyfed.engine.wire import encode
from polyfed.errors import PolyfedError, RunError, first_line
from polyfed.records.fields import validated
from polyfed.records.stored_files import ModelEntry

_LONGEST = 300  # characters of an error
# entries of a client's state at the server: round and exchange after which it last counted; the same at the end of the
# best round, where that is wanted
_HELD = "held"
_BEST = "best"


class NodeExecutor(Executor):
    """The executor of a deployed federation: every job is an envelope to a node.

    Scores need an envelope of their own, in rounds that are evaluated, but for those right after local training.
    unseen: networks that only nodes have.
    """

    def __init__(self, federation: Federation, unseen: Collection[str], registry: NodeRegistry) -> None:
        self._figures = list(figures_of(federation.evaluation, federation.metrics))
        super().__init__(
            ExecutorSetup(
                federation.method, federation.model_factory, federation.clients, federation.store, self._figures
            )
        )
        self.federation = federation
        self._unseen = unseen
        self._registry = registry
        chosen = federation.model_factory.chosen
        self._facts = {**registry.task_facts, "auxiliary_model": "" if chosen is None else chosen.network}
        self._sum: ServerSum | None = None  # of the present exchange
        self._sent: Message = {}  # to one of its clients
        self._unread: dict[int, int] = {}  # client -> last round without a readable answer

    def run(self, jobs: Sequence[TrainJob], done: Callable[[int], None]) -> list[JobResult]:
        """See `Executor`."""
        self._registry.event_log.round = self.federation.server.round
        self._registry.poll()  # nodes may have been started again
        lost = self._begin_sum(jobs)
        answers = self._ask({job.client.id: self._envelope(job) for job in jobs if job.client.id not in lost}, done)
        return [
            JobResult(job.client.id, dropped=True)
            if job.client.id in lost
            else self.read_outcome(job, answers[job.client.id])
            for job in jobs
        ]

    # sums with masks ----------------------------------------------------------------------------------------------

    def _begin_sum(self, jobs: Sequence[TrainJob]) -> set[int]:
        """Begin the sum of the addends that come with these jobs, if there are enough; who has been lost on the way."""
        plugin = self.federation.plugin("secure_sums")
        self._sum = None
        asked = plugin.asked(self.federation.method, jobs) if plugin.is_on else []
        if not asked:
            return set()
        self._sent = next(job.message for job in jobs if job.client.id in asked)
        clients = {job.client.id: job.client for job in jobs}
        place = {key: getattr(jobs[0], key) for key in ("round", "exchange_index", "is_final")}

        def ask(kind: Kind, requests: Mapping[int, Mapping[str, Any]]) -> dict[int, SumAnswer]:
            found = {}
            envelopes = {i: self._request(kind, {**place, **facts}, None) for i, facts in requests.items()}
            for number, answer in self._ask(envelopes).items():
                with self._guarded(clients[number]):
                    found[number] = parse(SumAnswer, self._opened(answer)[0])
            return found

        begun = ServerSum(plugin.settings, asked, plugin.rows, ask)
        if not begun.sharers:
            return set()
        self._sum = begun
        return {*asked} - {*begun.sharers}

    def add_up(self, uploads: Mapping[int, Group]) -> Group | None:
        """See `Executor`; nodes open the total."""
        try:
            return None if self._sum is None else self._sum.open(uploads, self.federation.method, self._sent)
        except RunError as problem:
            self.federation.tell("message", f"round {self.federation.server.round}: {problem}")
            return None

    def score(self, jobs: Sequence[EvalJob]) -> list[Scores]:
        """See `Executor`."""
        sent = []
        for job in jobs:
            facts = {"round": job.round, "variant": job.variant, "base": _held(job.client), "parts": list(job.parts)}
            sent.append((self._registry.node_of.get(job.client.id), self._request("score", facts, job.message)))
        answers = self._registry.request(sent) if sent else []
        return [self._scores(job, answer) for job, answer in zip(jobs, answers, strict=True)]

    def silent(self) -> set[int]:
        """Clients whose nodes are offline, or gave no readable answer in this round."""
        online = self._registry.wire.nodes()
        now = self.federation.server.round
        numbers = [client.id for client in self.federation.clients]
        return {i for i in numbers if self._registry.node_of.get(i) not in online or self._unread.get(i) == now}

    def save_models(
        self, clients: Sequence[Client]
    ) -> list[tuple[Client, dict[str, tuple[Group, State]], dict[str, Any]]]:
        """Have clients' nodes write their models; of those that are shared weights and states, by stage, and what each
        reads.
        """
        federation = self.federation
        stages = kept_stages(federation.stages)
        envelopes = {}
        for client in clients:
            views = scored_views(federation, client, stages).values()
            message = next((view.message for view in views if view.message is not None), None)
            facts = {"round": federation.server.round, "variant": next(iter(views)).variant, "base": _held(client)}
            envelopes[client.id] = self._request("finish", facts, message)
        answers = self._ask(envelopes)
        shared = []
        for client in clients:
            with self._guarded(client):
                told, models = self._opened(answers[client.id])
                if models:
                    kept = {stage: self._read_model(client, *models[stage]) for stage in stages}
                    about = {key: told[key] for key in SHARED if key in told}
                    validated(ModelEntry, {"label_column": None, "stage": stages[0], "stages": {}, **about})
                    shared.append((client, kept, about))
        return shared

    def _read_model(self, client: Client, weights: Any, state: Any) -> tuple[Group, State]:
        """A model that a node shares, which is finite, and of the client's network where the server has it."""
        weights = get_group(checked_message({"weights": weights}), "weights")
        state = checked_message(state)
        if name := first_nonfinite(weights) or first_nonfinite(state):
            raise RunError(f"expected a model of finite numbers, got others ('{name}')")
        if client.architecture in self._unseen:
            return weights, state
        method = self.federation.method
        variant = method.variant(self.federation.server, client.id)
        module = self.federation.model_factory.module(client.architecture, variant)
        expected = export_state(method.personal_model(module))
        for name in sorted({*expected, *weights}):
            shapes = [tuple(of[name].shape) if name in of else None for of in (expected, weights)]
            if shapes[0] != shapes[1]:
                raise RunError(f"expected {shapes[0]} as the model's {name[:60]!r}, got {shapes[1]}")
        return weights, state

    # requests -----------------------------------------------------------------------------------------------------

    def _ask(
        self, envelopes: Mapping[int, Envelope], done: Callable[[int], None] = lambda _: None
    ) -> dict[int, Answer]:
        """The answers of clients' nodes, by number of client."""
        sent = [(self._registry.node_of.get(number), envelope) for number, envelope in envelopes.items()]
        return dict(zip(envelopes, self._registry.request(sent, done), strict=True)) if sent else {}

    def _request(self, kind: Kind, facts: Mapping[str, Any], message: Message | None) -> Envelope:
        task = TaskRequest(**self._facts, **facts)
        return Envelope(kind, task.model_dump(), b"" if message is None else encode(message))

    def _envelope(self, job: TrainJob) -> Envelope:
        facts = {name: getattr(job, name) for name in JOB_FACTS}
        facts["base"] = _held(job.client)
        facts["best"] = _mark(self._best(job.client), _BEST)
        if self._sum is not None and job.client.id in self._sum.sharers:
            facts |= self._sum.request
        return self._request("train", facts, job.message)

    def _best(self, client: Client) -> State:
        """Which of the client's states is that of the best round so far, as an entry of its state; {} for none."""
        best = self.federation.checkpointer.best_round(len(self.federation.history))
        if best is None or _HELD not in client.state:
            return {}
        held = get_tensor(client.state, _HELD)
        if held[0] <= best:
            return {_BEST: held}
        return {_BEST: client.state[_BEST]} if _BEST in client.state else {}

    # answers --------------------------------------------------------------------------------------------------------

    def _scores(self, job: EvalJob, answer: Answer) -> Scores:
        found: dict[str, Score] = {}
        with self._guarded(job.client):
            facts, _ = self._opened(answer)
            found = {part: self._score(facts[part], job.client, part) for part in job.parts if part in facts}
        return found

    def _score(self, facts: Mapping[str, Any], client: Client, part: str) -> Score:
        """The score of as many rows as a client has claimed to have."""
        rows = len(getattr(client.data, part))
        if part == "validation":
            return read_score(facts, rows, self.federation.classes)
        others = self.federation.method.alternative_predictors
        return read_score(facts, rows, self.federation.classes, self._figures, others)

    def _opened(self, answer: Answer) -> tuple[Mapping[str, Any], Any]:
        """An answer's facts, and what is in its body; {} without one."""
        if isinstance(answer, NodeError):
            raise RunError(answer)
        return answer.facts, decode_body(answer.body) if answer.body else {}

    @contextlib.contextmanager
    def _guarded(self, client: Client) -> Iterator[None]:
        """Any error within the block is a trouble of one client, in one line, and of no other."""
        try:
            yield
        except Exception as error:
            reason = str(error)
            if not isinstance(error, PolyfedError):
                reason = f"its answer cannot be read: {first_line(error)[:_LONGEST]}"
            self._unread[client.id] = self.federation.server.round
            node = self._registry.node_of.get(client.id)
            log = self._registry.event_log
            log.note("trouble", client=client.id, node=node, reason=reason)
            self.federation.tell("message", f"round {log.round}: client {client.id}: {reason}")

    def read_outcome(self, job: TrainJob, answer: Answer) -> JobResult:
        """The outcome of a job; a client without a readable answer has dropped out."""
        client = job.client
        outcome = JobResult(client.id, dropped=True)
        with self._guarded(client):
            outcome = self._read(job, answer)
        return outcome

    def _read(self, job: TrainJob, answer: Answer) -> JobResult:
        """The outcome of a job, with its facts checked; the message is checked as the round reads it."""
        client = job.client
        facts, content = self._opened(answer)
        message = freeze(checked_message(content))
        report = parse(TaskResult, facts)
        refused = report.refused or self._excess(report)
        score = None if report.score is None else self._score(report.score, client, "test")
        weights = client.weights
        if refused is None and report.new:
            weights = self.federation.store.keep(client.architecture, job.variant, {})
        return JobResult(
            client.id,
            message,
            weights,
            {_HELD: torch.tensor([job.round, job.exchange_index]), **self._best(client)},
            TrainingResult(report.steps, report.samples, report.loss),
            nbytes(message),
            report.sums,
            score,
            refused,
            is_remote=True,
        )

    def _excess(self, report: TaskResult) -> str | None:
        """Which of the numbers beside an upload is larger than any of an upload may be."""
        largest = self.federation.plugin("robust_aggregation").settings.max_magnitude or math.inf
        if not abs(report.loss) <= largest:
            return f"the training loss is {report.loss:g}"
        for name, value in report.sums.items():
            if not abs(value) <= largest * max(report.steps, 1):
                return f"the sum '{name}' is {value:g}"
        return None


def _held(client: Client) -> str:
    """The mark of the node's state when the client last counted."""
    return _mark(client.state, _HELD)


def _mark(state: State, name: str) -> str:
    """That of an entry of a client's state; "" without it."""
    return checkpoint_id(*get_tensor(state, name).tolist()) if name in state else ""
