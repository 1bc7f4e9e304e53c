"""Nodes in place of workers: the executor of a deployed federation."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from polyfed.core.client import Client
from polyfed.core.message import (
    Group,
    Message,
    State,
    first_nonfinite,
    flatten,
    freeze,
    get_tensor,
    nbytes,
    shallow_copy,
)
from polyfed.core.method import TrainingResult
from polyfed.core.upload_forms import Entry, UploadContext
from polyfed.deploy.node_disk import checkpoint_id
from polyfed.deploy.node_registry import Answer, EventLog, NodeRegistry, RequestBroker
from polyfed.deploy.protocol import (
    Envelope,
    Kind,
    NodeError,
    TaskRequest,
    TaskResult,
    deserialize,
    parse,
    score_from_json,
    serialize,
    split_client_state,
)
from polyfed.engine.evaluation import from_scores_of
from polyfed.engine.executors.jobs import EvalJob, JobResult, Scores, TrainJob
from polyfed.engine.federation import Federation
from polyfed.engine.scoring import ClientScore
from polyfed.engine.uploads import find_mismatch
from polyfed.errors import PolyfedError, RunError
from polyfed.plugins.robust_aggregation import DefenseLog, apply_rule

_PARTS = ("test", "validation")
_LONGEST = 300  # characters that are told of an error
_NOT_TAKEN = "the upload cannot be taken in"
_HELD = "held"  # the entry of a client's state at the server: round and exchange after which it last counted


class DeployedParts(Federation):
    """What `NodeExecutor` needs of `polyfed.deploy.server.DeployedFederation`, where each of these is explained."""

    def personal_tensors(self, client: Client) -> Mapping[str, torch.Tensor] | None:
        """What a client's personal model is made of."""
        raise NotImplementedError

    def model_request(self, client: Client) -> tuple[str, Message | None, dict[str, Any]]:
        """A client's variant, what it receives, and what its model is."""
        raise NotImplementedError

    def arrived(self, job: TrainJob, outcome: JobResult) -> JobResult:
        """An outcome as the method gets it."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Tell whoever watches."""
        raise NotImplementedError


class NodeExecutor:
    """The executor of a deployed federation: every job is an envelope to a node.

    A round is one exchange, with the scores of personal models in the same answer. What is scored after receiving
    something needs another exchange, in rounds that are evaluated.

    Args:
        federation: whose jobs they are. told: facts of every task. broker, registry: reach the nodes. event_log: where
            troubles are told. limit: bytes that an answer may have.
    """

    workers = 1

    def __init__(
        self,
        federation: DeployedParts,
        told: Mapping[str, Any],
        broker: RequestBroker,
        registry: NodeRegistry,
        event_log: EventLog,
        limit: int,
    ) -> None:
        self.federation = federation
        self._told = told
        self._limit = limit
        self._broker = broker
        self._registry = registry
        self._event_log = event_log
        self._from_scores = list(from_scores_of(federation.evaluation))
        self._kept: dict[int, tuple[str, Scores]] = {}  # client -> mark and scores of its last answer to a job
        self._forms: dict[tuple[str, str, str], object] = {}  # what uploads looked like that were taken
        self._unread: dict[int, int] = {}  # client -> last round in which its answer was none

    def run(self, jobs: Sequence[TrainJob], done: Callable[[int], None]) -> list[JobResult]:
        """See `Executor`."""
        self._event_log.round = jobs[0].round if jobs else self._event_log.round
        asked = [(self._registry.node_of.get(job.client.id), self._envelope(job)) for job in jobs]
        answers = self._broker.request(asked, done)
        outcomes = [self.read_outcome(job, answer) for job, answer in zip(jobs, answers, strict=True)]
        return self.validate(jobs, outcomes)

    def taken_in(self, uploads: Mapping[int, Message], take: Callable[[Mapping[int, Message]], None]) -> None:
        """Have the server take in what came; where that fails, without those of whom it fails.

        Args:
            take: changes the server, or raises.
        """
        server = self.federation.server
        before = shallow_copy(server.state)
        log = dict(server.log)
        try:
            take(uploads)
        except Exception:
            server.state, server.log = before, log
            fit, unfit = self._sifted(uploads)
            if not fit or not unfit:  # it is the method that fails
                raise
            for number, problem in unfit.items():
                self._trouble(self.federation.clients[number], NodeError(f"{_NOT_TAKEN}: {problem}"))
            take(fit)

    def score(self, asked: Sequence[EvalJob]) -> list[Scores]:
        """See `Executor`."""
        known = [None if each.message is not None else self._recall(each) for each in asked]
        places = [place for place, scores in enumerate(known) if scores is None]
        envelopes = [(self._registry.node_of.get(asked[p].client.id), self._scoring(asked[p])) for p in places]
        answers = dict(zip(places, self._broker.request(envelopes), strict=True)) if envelopes else {}
        return [scores if scores is not None else self._scores(asked[p], answers[p]) for p, scores in enumerate(known)]

    def silent(self) -> set[int]:
        """Clients whose nodes are not there, or gave no answer in this round that can be read."""
        online = self._broker.wire.nodes()
        now = self.federation.server.round
        numbers = [client.id for client in self.federation.clients]
        return {i for i in numbers if self._registry.node_of.get(i) not in online or self._unread.get(i) == now}

    def save_models(self, clients: Sequence[Client]) -> list[tuple[Client, tuple[Group, State]]]:
        """Have clients' nodes write their models; the weights and states of those that are shared."""
        envelopes = []
        for client in clients:
            variant, message, about = self.federation.model_request(client)
            facts = {"round": self.federation.server.round, "variant": variant, "base": _held(client), "about": about}
            envelopes.append((self._registry.node_of.get(client.id), self._written("finish", facts, message)))
        answers = self._broker.request(envelopes)
        shared = []
        for client, answer in zip(clients, answers, strict=True):
            with self._guarded(client):
                if message := self._opened(answer)[1]:
                    weights = split_client_state(message)
                    self._check_model(client, weights)
                    shared.append((client, weights))
        return shared

    def _check_model(self, client: Client, model: tuple[Group, State]) -> None:
        """Whether a personal model is finite, and of the client's network where that is known here.

        Raises:
            RunError: it is not.
        """
        weights, state = model
        if name := first_nonfinite({"weights": weights, **state}):
            raise RunError(f"expected a personal model of finite numbers, got others ('{name}')")
        if (expected := self.federation.personal_tensors(client)) is None:
            return
        for name in sorted({*expected, *weights}):
            shapes = [tuple(of[name].shape) if name in of else None for of in (expected, weights)]
            if shapes[0] != shapes[1]:
                raise RunError(f"expected {shapes[0]} as the model's {name[:60]!r}, got {shapes[1]}")

    def close(self) -> None:
        """See `Executor`."""

    # envelopes and what comes back --------------------------------------------------------------------------------

    def _written(self, kind: Kind, facts: Mapping[str, Any], message: Message | None) -> Envelope:
        task = TaskRequest(**self._told, **facts, has_message=message is not None)
        return Envelope(kind, task.model_dump(), b"" if message is None else serialize(message))

    def _envelope(self, job: TrainJob) -> Envelope:
        facts = {name: getattr(job, name) for name in ("round", "exchange_index", "is_final", "variant", "scores")}
        facts["from_scores"] = list(job.from_scores)
        facts |= {
            "base": _held(job.client),
            "mark": checkpoint_id(job.round, job.exchange_index),
            "parts": self._parts(job),
        }
        return self._written("train", facts, job.message)

    def _parts(self, job: TrainJob) -> list[str]:
        """What is scored right after the job, as the personal model will be asked for in this round."""
        evaluation, stages = self.federation.evaluation, self.federation.stages
        due = job.is_final or job.round % evaluation.every_n_rounds == 0 or job.round == self.federation.training.rounds
        parts = []
        if due and "personal" in stages:
            parts.append("test")
        if due and stages[0] != "received":
            parts.append("validation")
        return parts

    def _scoring(self, asked: EvalJob) -> Envelope:
        facts = {
            "round": asked.round,
            "variant": asked.variant,
            "base": _held(asked.client),
            "from_scores": self._from_scores,
        }
        return self._written("score", {**facts, "parts": list(asked.parts)}, asked.message)

    def _recall(self, asked: EvalJob) -> Scores | None:
        """The scores that came with the client's last job, if they are all there."""
        at, kept = self._kept.get(asked.client.id, ("", {}))
        known = at == _held(asked.client) and all(part in kept for part in asked.parts)
        return {part: kept[part] for part in asked.parts} if known else None

    def _scores(self, asked: EvalJob, answer: Answer) -> Scores:
        found: dict[str, ClientScore] = {}
        with self._guarded(asked.client):
            facts, _ = self._opened(answer)
            found = {part: self._score(facts[part], asked.client, part) for part in asked.parts if part in facts}
        return found

    def _score(self, told: Mapping[str, Any], client: Client, part: str) -> ClientScore:
        """Counts of all the rows that a client said it has, and of no others."""
        others = self.federation.method.alternative_predictors if part == "test" else ()
        return score_from_json(told, self.federation.classes, len(getattr(client.data, part)), others)

    def _opened(self, answer: Answer) -> tuple[Mapping[str, Any], Message]:
        """An answer's facts and message.

        Raises:
            RunError: there is no answer, it is too large, or its message is none.
        """
        if isinstance(answer, NodeError):
            raise RunError(answer)
        if len(answer.body) > self._limit:
            raise RunError(f"expected an answer of at most {self._limit} bytes, got {len(answer.body)}")
        return answer.facts, freeze(deserialize(answer.body)[0] if answer.body else {})

    @contextlib.contextmanager
    def _guarded(self, client: Client) -> Iterator[None]:
        """Whatever an answer breaks within the block is a trouble of its client, told in a line, and of nobody else."""
        try:
            yield
        except Exception as error:
            reason = error if isinstance(error, PolyfedError) else f"its answer cannot be read: {_in_a_line(error)}"
            self._unread[client.id] = self.federation.server.round
            self._trouble(client, NodeError(reason))

    def read_outcome(self, job: TrainJob, answer: Answer) -> JobResult:
        """What came of a job; whoever says nothing, or nothing that can be read, has dropped out."""
        client = job.client
        outcome = JobResult(client.id, freeze({}), client.weights, client.state, TrainingResult(), dropped=True)
        with self._guarded(client):
            outcome = self._read(job, answer)
        return outcome

    def _read(self, job: TrainJob, answer: Answer) -> JobResult:
        """What came of a job, held against all that is known of it before anything of it counts.

        Raises:
            RunError: it is no answer to this job.
        """
        client = job.client
        largest = self.federation.plugin("robust_aggregation").settings.max_magnitude or math.inf
        facts, message = self._opened(answer)
        report = parse(TaskResult, facts)
        trained = TrainingResult(report.steps, report.samples, report.loss)
        refused = report.refused
        if refused is None and report.mark != checkpoint_id(job.round, job.exchange_index):
            raise RunError(f"expected the mark {checkpoint_id(job.round, job.exchange_index)}, got '{report.mark}'")
        if refused is None and not abs(report.loss) <= largest:
            refused = f"the training loss is {report.loss:g}"
        if refused is None and (odd := _too_large(report.sums, largest * max(report.steps, 1))):
            refused = f"the sum '{odd}' is {report.sums[odd]:g}"
        refused = refused or self._objection(job, message)
        size = nbytes(message)
        if refused is not None:
            message = self._emptied(message)
        score = None if report.score is None else self._score(report.score, client, "test")
        kept = {part: self._score(told, client, part) for part, told in report.kept.items() if part in _PARTS}
        if refused is None:
            self._kept[client.id] = (report.mark, kept)
        store = self.federation.store
        weights = store.allocate(client.architecture, job.variant) if report.new and refused is None else client.weights
        state: State = {_HELD: torch.tensor([job.round, job.exchange_index])}
        counted = {} if refused is not None else report.sums
        return JobResult(client.id, message, weights, state, trained, size, counted, score, refused)

    def _objection(self, job: TrainJob, message: Message) -> str | None:
        """Why an upload is refused, if it is: its numbers, or a form that is not the method's."""
        federation = self.federation
        if name := first_nonfinite(message):
            return f"the upload is not finite ({name[:60]!r})"
        outcome = JobResult(job.client.id, message, None, {}, TrainingResult())
        came = federation.arrived(job, outcome)
        form = federation.method.card.form
        if came.refused is not None or form is None:
            return came.refused or _odd_labels(message, federation.classes)
        return find_mismatch(
            form, came.message, UploadContext(federation.method, federation.server, job.client.id, job.message)
        )

    def _emptied(self, message: Message) -> Message:
        """What a refused upload was about, for the count of releases, and none of its numbers."""
        method = self.federation.method
        kinds = {name: isinstance(value, torch.Tensor) for name, value in message.items()}
        if method.card.form is not None:
            kinds = {name: isinstance(entry, Entry) for name, entry in method.card.form.items() if name in message}
        empty = freeze({name: torch.empty(0) if alone else {} for name, alone in kinds.items()})
        try:
            method.nbytes_in_paper(empty)
        except Exception:  # of a method that says no form, whose own count it breaks
            return freeze({})
        return empty

    def validate(self, jobs: Sequence[TrainJob], outcomes: Sequence[JobResult]) -> list[JobResult]:
        """The same, with uploads refused that the method cannot take in, alone or beside those that it can.

        It is tried on a copy of the server where uploads look otherwise than those that were taken before: other
        names, types or shapes. Those of the most common look are tried first.
        """
        arrived = [self.federation.arrived(job, o) for job, o in zip(jobs, outcomes, strict=True)]
        messages = {o.client_id: o.message for o in arrived if o.counts}
        look = {i: _look(message) for i, message in messages.items()}
        keys = {job.client.id: (job.exchange.name, job.client.architecture, job.variant) for job in jobs}
        if all(self._forms.get(keys[i]) == form for i, form in look.items()):
            return list(outcomes)
        refused: dict[int, str] = {}
        if self._problem(messages):
            taken, unfit = self._sifted(messages)
            refused = {i: f"{_NOT_TAKEN}: {problem}" for i, problem in unfit.items()}
            if not taken:  # it is the method that fails, as it will say
                return list(outcomes)
        self._forms |= {keys[i]: form for i, form in look.items() if i not in refused}
        return [
            replace(o, weights=job.client.weights, state=job.client.state, score=None, refused=refused[o.client_id])
            if o.client_id in refused
            else o
            for job, o in zip(jobs, outcomes, strict=True)
        ]

    def _sifted(self, uploads: Mapping[int, Message]) -> tuple[dict[int, Message], dict[int, str]]:
        """Those that the method can take in together, of the others why not; the most common look is tried first."""
        look = {i: _look(message) for i, message in uploads.items()}
        common = Counter(look.values())
        taken = dict[int, Message]()
        unfit = dict[int, str]()
        for i in sorted(uploads, key=lambda i: (-common[look[i]], i)):
            problem = self._problem(dict(sorted({**taken, i: uploads[i]}.items())))
            if problem is None:
                taken[i] = uploads[i]
            else:
                unfit[i] = problem
        return dict(sorted(taken.items())), unfit

    def _problem(self, uploads: Mapping[int, Message]) -> str | None:
        """Why the method cannot take these in, if it cannot; the server stays as it is."""
        method, server = self.federation.method, self.federation.server
        trial = copy.copy(server)
        trial.state = shallow_copy(server.state)
        trial.log = {}
        trial.cache = {}
        try:
            settings = self.federation.plugin("robust_aggregation").settings
            method.aggregate(trial, apply_rule(settings, method, trial, uploads, DefenseLog()))
        except Exception as error:
            return _in_a_line(error)
        return None

    def _trouble(self, client: Client, reason: NodeError) -> None:
        node = self._registry.node_of.get(client.id)
        self._event_log.note("trouble", client=client.id, node=node, reason=str(reason))
        self.federation.say(f"round {self._event_log.round}: client {client.id}: {reason}")


def _in_a_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:_LONGEST]


def _too_large(sums: Mapping[str, float], largest: float) -> str | None:
    return next((name for name, value in sums.items() if not abs(value) <= largest), None)


def _odd_labels(message: Message, classes: int) -> str | None:
    """Of a method that declares no form: "labels", where there are any, are classes of the task."""
    labels = message.get("labels")
    if not isinstance(labels, torch.Tensor) or not labels.numel():
        return None
    odd = labels.is_complex() or bool(((labels < 0) | (labels >= classes)).any())
    return f"expected 'labels' that are classes below {classes}, got others" if odd else None


def _held(client: Client) -> str:
    """The mark of what the client's node had when it last counted."""
    if _HELD not in client.state:
        return ""
    number, place = get_tensor(client.state, _HELD).tolist()
    return checkpoint_id(number, place)


def _look(message: Message) -> tuple[object, ...]:
    """Names, types and shapes of what was sent."""
    return tuple((name, value.dtype, tuple(value.shape)) for name, value in flatten(message).items())
