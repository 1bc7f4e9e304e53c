"""What a run asks of a worker, and what the worker answers, whatever carries it: facts, and trees of tensors.

A worker keeps nothing that a result depends on: data, networks and the method it has already, the client's weights and
state come with each request. Forked workers (`worker`) find weights in the store that they share with the run, those of
Ray (`ray_executor`) among the tensors.
"""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from polyfed import profiling
from polyfed.core.client import Client
from polyfed.core.message import freeze
from polyfed.core.method import TrainingResult
from polyfed.core.server import PublicPass
from polyfed.engine.executors.base import WorkerContext, run_public_pass
from polyfed.engine.executors.client_work import run_job, score_parts
from polyfed.engine.executors.jobs import EvalJob, Job, JobResult, PassJob, Scores, TrainJob, placed
from polyfed.engine.executors.shared_buffer import TensorBuffer
from polyfed.engine.scoring import FROM_SCORES, ClientScore, RegressionScore, Score, ScoreCache
from polyfed.engine.weight_store import WeightRow, client_row
from polyfed.errors import PolyfedError, RunError


class WorkerUnavailable(Exception):
    """No worker can be had here; says why."""


class WorkerDied(Exception):
    """The worker ended before it answered; says how."""


class Worker(Protocol):
    """A worker, as the run's process sees it: greet it; then ask it, and take the answer when it is there."""

    def wait_ready(self) -> None:
        """Wait until it is there.

        Raises:
            Unable: it cannot compute.
        """
        ...

    def send(self, asked: Job, evaluation: int = 0) -> None:
        """Give it something to do; one thing at a time. evaluation: number of that which a scoring belongs to.

        Raises:
            RunError: a message or a state holds something that is no tensor.
        """
        ...

    def receive(self) -> tuple[Any, float]:
        """What came of it, see `read_answer`, in tensors of its own; and how many seconds it took.

        Raises:
            Died: it is no more. PolyfedError: that of the work, as if it had been done here.
        """
        ...

    def is_alive(self) -> bool:
        """Whether the process is still there."""
        ...

    def terminate(self) -> None:
        """End the process, if it has not ended. It keeps nothing that would be lost."""
        ...


# the run's side ---------------------------------------------------------------------------------------------------


def request_facts(asked: Job, evaluation: int) -> dict[str, Any]:
    """The plain facts of a request; what `request_tensors` gives travels as tensors."""
    facts: dict[str, Any] = {"client": asked.client.id, "round": asked.round, "timed": profiling.is_profiling()}
    if isinstance(asked, PassJob):
        return {"what": "pass", **facts, "outputs": asked.asked.outputs}
    facts["variant"] = asked.variant
    if isinstance(asked, TrainJob):
        names = ("is_final", "exchange_index", "scores", "from_scores", "counted", "uploads")
        return {"what": "job", **facts, **{name: getattr(asked, name) for name in names}}
    parts = {"parts": list(asked.parts), "shared": list(asked.shared)}
    return {"what": "scoring", **facts, **parts, "version": asked.client.version, "evaluation": evaluation}


def request_tensors(asked: Job) -> dict[str, Any]:
    """The tensors of a request, but for the client's weights."""
    if isinstance(asked, PassJob):
        return {"weights": asked.asked.weights, "rows": asked.asked.rows}
    return {"message": asked.message, "state": asked.client.state}


def request_row(asked: Job) -> WeightRow | None:
    """The row with the client's weights, if the request needs it and there is one."""
    return None if isinstance(asked, PassJob) else client_row(asked.client)


def check_reply(reply: Mapping[str, Any]) -> None:
    """Whether it is an answer; the times that the worker has measured count here, too.

    Raises:
        PolyfedError: the worker's; where it came from is in the notes.
    """
    if "error" in reply:
        kind, text, where = reply["error"]
        error = _error_class(kind)(text)
        error.add_note(where)
        raise error
    profiling.include(reply.get("timings"))
    profiling.include_processor_seconds(reply.get("processor_seconds", 0.0))  # a greeting has none


def read_answer(
    asked: Job, reply: Mapping[str, Any], tensors: Mapping[str, Any], fresh: WeightRow | None
) -> JobResult | Scores | torch.Tensor:
    """What came of a request; of a `TrainJob`, what did not change is the client's own again.

    Args:
        fresh: the row that holds the weights that came of a job.
    """
    if isinstance(asked, EvalJob):
        return {part: _read_score(figures) for part, figures in tensors.items()}
    if isinstance(asked, PassJob):
        outputs: torch.Tensor = tensors["outputs"]
        return outputs
    own = asked.client
    return JobResult(
        own.id,
        freeze(tensors["message"]),
        fresh if reply["new"] else own.weights,
        own.state if tensors["state"] is None else _filled(tensors["state"], own.state),
        TrainingResult(*reply["trained"]),
        reply["bytes_up"],
        reply["sums"],
        None if tensors["score"] is None else _read_score(tensors["score"]),
        reply["refused"],
        operations=reply["operations"],
    )


def _figures(score: Score) -> dict[str, Any]:
    """A score in tensors, for `_read_score`."""
    others = {name: _figures(other) for name, other in score.others.items()}
    if isinstance(score, RegressionScore):
        numbers = torch.tensor([score.total, score.rmse, score.r2], dtype=torch.float64)
        return {"regression": numbers, "others": others}
    shares = {name: torch.tensor(getattr(score, name), dtype=torch.float64) for name in FROM_SCORES}
    missing = None if score.missing is None else _figures(score.missing)
    return {"confusion": score.confusion, **shares, "others": others, "missing": missing}


def _read_score(figures: Mapping[str, Any]) -> Score:
    others = {name: _read_score(other) for name, other in figures["others"].items()}
    if "regression" in figures:
        total, rmse, r2 = figures["regression"].tolist()
        return RegressionScore(int(total), rmse, r2, others)
    missing = None if figures["missing"] is None else _read_score(figures["missing"])
    assert missing is None or isinstance(missing, ClientScore)
    auc, calibration_error = (float(figures[name]) for name in ("auc", "calibration_error"))
    return ClientScore(figures["confusion"], auc, others, calibration_error, missing)


def _filled(state: Mapping[str, Any], own: Any) -> dict[str, Any]:
    """The state with the client's own tensors where there is None."""
    filled = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            filled[name] = _filled(value, own.get(name))
        else:
            filled[name] = own[name] if value is None else value
    return filled


def _changed(state: Mapping[str, Any], before: Any) -> dict[str, Any]:
    """The state with None for the tensors that are the very same as before, under the same name."""
    known = before if isinstance(before, Mapping) else {}
    changed: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            changed[name] = _changed(value, known.get(name))
        else:
            changed[name] = None if value is known.get(name) else value
    return changed


def _error_class(name: str) -> type[PolyfedError]:
    """The kind of error that is called so; `RunError` where there is none."""
    kinds = [PolyfedError]
    found: type[PolyfedError] = RunError
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if _name_of(kind) == name:
            found = kind
    return found


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# the worker's side ------------------------------------------------------------------------------------------------


def described_error(error: Exception) -> dict[str, Any]:
    """The answer that says what went wrong, for `check_reply`."""
    is_ours = isinstance(error, PolyfedError)
    kind = type(error) if is_ours else RunError
    text = str(error) if is_ours else f"{type(error).__name__}: {error}"
    return {"error": [_name_of(kind), text, "".join(traceback.format_exception(error))]}


class WorkerLoop:
    """Carries out requests. Where weights are not found in a shared store, the three functions about rows are others.

    Args:
        context: what is worked on. inbox: tensors of a request. outbox: where those of the answer are put.
    """

    def __init__(self, context: WorkerContext, inbox: TensorBuffer, outbox: TensorBuffer) -> None:
        self.context = context
        self._inbox = inbox
        self._outbox = outbox
        self._memory = ScoreCache(context.from_scores)
        self._evaluation = 0
        for client in context.clients:
            client.weights = None
            client.state = {}  # they come with each job

    def reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what is asked; an error of the work is an answer, too."""
        began = time.perf_counter()
        used = time.process_time()
        try:
            with profiling.profile(request["timed"], "messages") as watch:
                work = {"job": self._job, "scoring": self._scoring, "pass": self._pass}
                reply = work[request["what"]](request)
            reply["seconds"] = time.perf_counter() - began
            reply["processor_seconds"] = time.process_time() - used
            if watch is not None:
                reply["timings"] = watch.seconds
            return reply
        except Exception as error:
            return described_error(error)

    def own_row(self, request: Mapping[str, Any], tensors: Mapping[str, Any]) -> WeightRow | None:
        """The client's weights, if it has any of its own."""
        return self._row_at(request, request["own"])

    def fresh_row(self, request: Mapping[str, Any]) -> WeightRow:
        """Where the weights that come of a job are written."""
        row = self._row_at(request, request["fresh"])
        assert row is not None
        return row

    def weights_sent(self, fresh: WeightRow) -> torch.Tensor | None:
        """What of the new weights travels with the answer; None where the run finds them by itself."""
        return None

    def _row_at(self, request: Mapping[str, Any], place: Any) -> WeightRow | None:
        if place is None:
            return None
        variant, begin = place
        return self.context.store.view(self.context.clients[request["client"]].architecture, variant, begin)

    def _client(self, request: Mapping[str, Any], tensors: Mapping[str, Any]) -> Client:
        client: Client = copy.copy(self.context.clients[request["client"]])
        client.weights = self.own_row(request, tensors)
        client.state = tensors["state"]
        client.version = request.get("version", -1)  # by which representations are remembered, for scores
        return client

    def _job(self, request: Mapping[str, Any]) -> dict[str, Any]:
        tensors = self._inbox.view(request["tensors"])
        method = self.context.method
        client = self._client(request, tensors)
        exchanges = method.final_exchanges() if request["is_final"] else method.exchanges(request["round"])
        exchange = exchanges[request["exchange_index"]]
        flags = {name: request[name] for name in ("scores", "from_scores", "counted", "uploads")}
        job = TrainJob(client, tensors["message"], request["variant"], exchange, request["round"], **flags)
        fresh = self.fresh_row(request)
        done = run_job(job, method, self.context.model_factory, lambda: fresh)
        has_new = done.weights is fresh
        sent = {
            "message": done.message,
            "state": _changed(done.state, client.state) if done.counts else None,
            "score": None if done.score is None else _figures(done.score),
            "weights": self.weights_sent(fresh) if has_new else None,
        }
        try:
            described = self._outbox.write(sent)
        except RunError as error:
            raise placed(error, client, "uploading", job.round) from error
        return {
            "trained": [done.trained.steps, done.trained.samples, done.trained.loss],
            "bytes_up": done.bytes_up,
            "sums": done.sums,
            "refused": done.refused,
            "operations": done.operations,
            "new": has_new,
            "tensors": described,
        }

    def _scoring(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["evaluation"] != self._evaluation:
            self._memory.forget_content()
            self._evaluation = request["evaluation"]
        tensors = self._inbox.view(request["tensors"])
        scoring = EvalJob(
            self._client(request, tensors),
            request["variant"],
            tensors["message"],
            request["round"],
            request["parts"],
            request["shared"],
        )
        scores = score_parts(scoring, self.context.method, self.context.model_factory, self._memory)
        return {"tensors": self._outbox.write({part: _figures(score) for part, score in scores.items()})}

    def _pass(self, request: Mapping[str, Any]) -> dict[str, Any]:
        tensors = self._inbox.view(request["tensors"])
        facts = (request["client"], tensors["weights"], request["outputs"], tensors["rows"], request["round"])
        outputs = run_public_pass(PublicPass(*facts), self.context)
        return {"tensors": self._outbox.write({"outputs": outputs})}
