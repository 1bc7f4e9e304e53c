"""Scores the clients of a federation at the stages that are asked for, anew only where a score may have changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.core.client import Client
from polyfed.core.message import Message, flatten
from polyfed.core.method import Method
from polyfed.core.model_factory import ModelFactory
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation, Stage
from polyfed.data.samples import LabeledSamples
from polyfed.engine.evaluation_record import Measure, evaluation_record, from_scores_of, not_evaluated, summarize
from polyfed.engine.executors.base import Executor
from polyfed.engine.executors.jobs import EvalJob
from polyfed.engine.executors.working_copy import has_weights
from polyfed.engine.held_out import Newcomers
from polyfed.engine.score_cache import ScoreCache
from polyfed.engine.scoring import Score
from polyfed.results.main_score import MainScore


class _ScoreKey:
    """What a score depends on. Equal only if the message is made of the very same tensors, which nobody writes into."""

    def __init__(self, version: int, variant: str, message: Message) -> None:
        self._facts = (version, variant)
        self._tensors = flatten(message)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _ScoreKey)
            and self._facts == other._facts
            and self._tensors.keys() == other._tensors.keys()
            and all(tensor is other._tensors[name] for name, tensor in self._tensors.items())
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class _ScoredClient:
    """A client as it is scored. message: what it receives before; None: nothing. key: what the score depends on."""

    client: Client
    variant: str
    message: Message | None
    key: _ScoreKey


class Evaluator:
    """Scores clients; see `polyfed.core.settings.Evaluation` for the stages.

    Args:
        main_score: the task's. clients: by number. executor: does the work.
        stages: the main one first. metrics: figures of the user's own. shared_test: the samples all are tested on.
        excluded: clients that take no part -> the variant of their network. unscored: who is not scored.
        held_out: who never trains, and is scored as a newcomer.

    Attributes:
        silent: tells who does not answer at the moment: nobody, where all clients are in one process.
    """

    def __init__(  # noqa: PLR0913 - what scoring needs of a federation
        self,
        method: Method,
        main_score: MainScore,
        clients: Sequence[Client],
        server: Server,
        model_factory: ModelFactory,
        executor: Executor,
        evaluation: Evaluation,
        stages: Sequence[Stage],
        metrics: Mapping[str, Measure],
        shared_test: LabeledSamples | None,
        excluded: Mapping[int, str],
        unscored: Collection[int],
        held_out: Collection[int] = (),
    ) -> None:
        self._method = method
        self._main_score = main_score
        self._clients = clients
        self._server = server
        self._architectures, self._executor = model_factory, executor
        self._evaluation = evaluation
        self._stages = stages
        self._metrics = metrics
        self._shared_test = shared_test
        self._excluded = excluded
        self._unscored = unscored
        self.silent: Callable[[], Collection[int]] = tuple
        self.from_scores = from_scores_of(evaluation)
        self._memory = ScoreCache(self.from_scores)
        self._newcomers = Newcomers(
            method, clients, server, executor, evaluation, held_out, self.from_scores, shared_test
        )

    @property
    def scores_after_training(self) -> bool:
        """Whether those who train are scored right afterwards."""
        return "after_training" in self._stages

    def forget(self) -> None:
        """Take every score anew from now on."""
        self._memory = ScoreCache(self.from_scores)

    def record(self, after_training: Mapping[int, Score]) -> dict[str, Any]:
        """The figures of all stages, and the validation score of the main one, for the round's record."""
        main = self._stages[0]
        validated = "personal" if main == "after_training" else main
        wanted = [(stage, "test") for stage in self._stages if stage != "after_training"]
        wanted.append((validated, "validation"))
        found = self._scores(wanted)
        scores: dict[Stage, Mapping[int, Score]] = {}
        for stage in self._stages:
            if stage == "after_training":
                scores[stage] = {n: score for n, score in after_training.items() if n not in self._unscored}
            else:
                scores[stage] = found[stage, "test"]
        names = [client.architecture for client in self._clients]
        record = evaluation_record(scores, names, self._evaluation, self._metrics, self._main_score)
        validation = found[validated, "validation"].values()
        mean = summarize(validation, self._evaluation.weighting).get("mean")
        return {**record, "validation": mean, **self._newcomers.record()}

    def no_record(self) -> dict[str, Any]:
        """The same part of the record of a round that is not evaluated."""
        return not_evaluated(self._main_score)

    def _scores(self, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], dict[int, Score]]:
        """The scores of those present by (stage, part of the data).

        Of whom nothing changed the last score is taken again, but not of those who do not answer: nobody knows what has
        become of them.
        """
        silent = set(self.silent())
        for number in silent:
            self._memory.forget(number)
        there = (self._server.clients.keys() | self._excluded.keys()) - silent
        judged = [client for client in self._clients if client.id in there and client.id not in self._unscored]
        views = {client.id: self._views(client, [stage for stage, _ in wanted]) for client in judged}
        missing = self._missing(wanted, views)
        taken = self._executor.score([self._scoring(view, parts) for view, parts in missing.items()])
        for view, scores in zip(missing, taken, strict=True):
            for part, score in scores.items():
                self._memory.keep(view.client.id, view.message is not None, part, view.key, score)
        found: dict[tuple[str, str], dict[int, Score]] = {}
        for stage, part in wanted:
            known = {number: self._recall(of_stage[stage], part) for number, of_stage in views.items()}
            found[stage, part] = {number: score for number, score in known.items() if score is not None}
        return found

    def _missing(
        self, wanted: Sequence[tuple[str, str]], views: Mapping[int, Mapping[str, _ScoredClient]]
    ) -> dict[_ScoredClient, list[str]]:
        """The parts of the data on which a client has to be scored anew."""
        missing: dict[_ScoredClient, list[str]] = {}
        for stage, part in wanted:
            for of_stage in views.values():
                view = of_stage[stage]
                asked = missing.setdefault(view, [])
                if len(getattr(view.client.data, part)) and part not in asked and self._recall(view, part) is None:
                    asked.append(part)
        return {view: parts for view, parts in missing.items() if parts}

    def _views(self, client: Client, stages: Sequence[str]) -> dict[str, _ScoredClient]:
        """What of the client is scored at each stage; what needs the same message is the same."""
        if client.id in self._excluded:
            variant = self._excluded[client.id]
            view = _ScoredClient(client, variant, None, _ScoreKey(client.version, variant, {}))
            return dict.fromkeys(stages, view)
        variant = self._method.variant(self._server, client.id)
        own = has_weights(client, variant, self._architectures)
        receives = {stage: stage == "received" or not own for stage in stages}  # who never took part, say
        as_it_stands = _ScoredClient(client, variant, None, _ScoreKey(client.version, variant, {}))
        received = as_it_stands
        if any(receives.values()):
            message = self._method.broadcast(self._server, client.id)
            if message:
                received = _ScoredClient(client, variant, message, _ScoreKey(client.version, variant, message))
        return {stage: received if asked else as_it_stands for stage, asked in receives.items()}

    def _recall(self, view: _ScoredClient, part: str) -> Score | None:
        return self._memory.recall(view.client.id, view.message is not None, part, view.key)

    def _scoring(self, view: _ScoredClient, parts: Sequence[str]) -> EvalJob:
        shared = [part for part in parts if getattr(view.client.data, part) is self._shared_test]
        return EvalJob(view.client, view.variant, view.message, self._server.round, parts, shared)
