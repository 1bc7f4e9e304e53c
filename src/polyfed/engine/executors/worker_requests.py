"""What a run asks of a worker process, and what this answers (`engine.wire`).

A worker keeps nothing that a result depends on: data, networks and the method it has already, the client's weights and
state come with each request. So another one can take its place at any time.
"""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import freeze
from polyfed.core.method import TrainingResult
from polyfed.core.randomness import keep_global_rng
from polyfed.core.server import PublicPass
from polyfed.engine.executors.client_work import WorkerContext, run_job, run_public_pass, score_batch
from polyfed.engine.executors.jobs import EvalBatch, EvalJob, Job, JobResult, PassJob, TrainJob, make_job, placed
from polyfed.engine.pace import include_processor_seconds
from polyfed.engine.scoring import ScoreCache, score_from_json, score_to_json
from polyfed.engine.weight_store import WeightRow, WeightStore, client_row
from polyfed.engine.wire import decode, encode
from polyfed.errors import PolyfedError, RunError

_FLAGS = (
    "variant",
    "round",
    "exchange_index",
    "is_final",
    "scores",
    "figures",
    "counted",
    "uploads",
)  # of a `TrainJob`


# the run's side ---------------------------------------------------------------------------------------------------


def make_request(asked: Job, evaluation: int = 0) -> bytes:
    """What a worker is to do. evaluation: number of that which a scoring belongs to."""
    request: dict[str, Any] = {"client": asked.client.id, "round": asked.round}
    if isinstance(asked, PassJob):
        return encode({**request, "what": "pass", "asked": vars(asked.asked)})
    row = client_row(asked.client)
    request |= {
        "state": asked.client.state,
        "own": None if row is None else row.variant,
        "weights": None if row is None else row.bytes,
    }
    if isinstance(asked, TrainJob):
        flags = {name: getattr(asked, name) for name in _FLAGS}
        return encode({**request, "what": "job", "message": asked.message, "flags": flags})
    first = asked.jobs[0]
    members = [[job.client.id, list(job.parts), list(job.shared)] for job in asked.jobs]
    request |= {"message": first.message, "variant": first.variant, "members": members, "evaluation": evaluation}
    return encode({**request, "what": "scoring"})


def read_answer(asked: Job, data: bytes, store: WeightStore) -> Any:
    """The result of a job, the scores of each client, or the outputs of a pass.

    Raises:
        PolyfedError: that of the work, as if it had been done here.
    """
    answer = decode(data)
    check_answer(answer)
    if isinstance(asked, TrainJob):
        return _result(asked, answer, store)
    if isinstance(asked, PassJob):
        return answer["outputs"]
    return [{part: score_from_json(score) for part, score in each.items()} for each in answer["scores"]]


def check_answer(answer: Mapping[str, Any]) -> None:
    """Raise the error that a worker tells of; the processor time that it has used counts here, too."""
    if "error" in answer:
        name, text, where = answer["error"]
        error = next((kind for kind in _kinds(PolyfedError) if _name_of(kind) == name), RunError)(text)
        error.add_note(where)
        raise error
    include_processor_seconds(answer.get("processor_seconds", 0.0))  # a greeting has none


def _kinds(kind: type[PolyfedError]) -> Iterator[type[PolyfedError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _result(asked: TrainJob, answer: Mapping[str, Any], store: WeightStore) -> JobResult:
    """The result of a job; weights that did not change are the client's own again."""
    own = asked.client
    fresh: WeightRow | None = None
    if answer["weights"] is not None:
        fresh = store.allocate(own.architecture, asked.variant)
        _check_length(own.architecture, answer["weights"], fresh.bytes.numel())
        fresh.take(answer["weights"])
    held = {} if fresh is None else fresh.views
    return JobResult(
        own.id,
        freeze(_mapped(answer["message"], lambda leaf: held[leaf] if isinstance(leaf, str) else leaf)),
        own.weights if fresh is None else fresh,
        own.state if answer["state"] is None else answer["state"],
        TrainingResult(*answer["trained"]),
        answer["bytes_up"],
        answer["sums"],
        None if answer["score"] is None else score_from_json(answer["score"]),
        answer["refused"],
        operations=answer["operations"],
    )


def _check_length(architecture: str, content: Tensor, expected: int) -> None:
    """Whether a row is as long as the network's rows are here."""
    if content.numel() != expected:
        raise RunError(f"expected {expected} bytes of weights of '{architecture}', got {content.numel()}")


def _mapped(message: Mapping[str, Any], function: Callable[[Any], Any]) -> dict[str, Any]:
    """A message with `function` of its tensors."""
    return {
        name: _mapped(entry, function) if isinstance(entry, Mapping) else function(entry)
        for name, entry in message.items()
    }


# the worker's side ------------------------------------------------------------------------------------------------


def describe_error(error: Exception) -> dict[str, Any]:
    """The answer that says what went wrong, for `check_answer`."""
    is_ours = isinstance(error, PolyfedError)
    kind = type(error) if is_ours else RunError
    text = str(error) if is_ours else f"{type(error).__name__}: {error}"
    return {"error": [_name_of(kind), text, "".join(traceback.format_exception(error))]}


class WorkerLoop:
    """Carries out requests.

    Args:
        context: what is worked on; its store holds no weights here.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._memory = ScoreCache(context.figures)
        self._evaluation = 0
        context.store.keep_in_main_memory()
        for client in context.clients:
            client.weights = None
            client.state = {}  # they come with each job

    def reply(self, data: bytes) -> bytes:
        """Do what is asked; an error of the work is an answer, too."""
        used = time.process_time()
        try:
            request = decode(data)
            work = {"job": self._job, "scoring": self._scoring, "pass": self._pass}
            answer = work[request["what"]](request)
            answer["processor_seconds"] = time.process_time() - used
            try:
                return encode(answer)
            except RunError as error:
                raise placed(error, self._context.clients[request["client"]], "uploading", request["round"]) from error
        except Exception as error:
            return encode(describe_error(error))

    def _row(self, client: Client, variant: str, content: Tensor | None = None) -> WeightRow:
        """A row outside the store, holding `content`, or nothing yet."""
        layout = self._context.store.layout(client.architecture, variant)
        if content is None:
            content = torch.zeros(layout.nbytes, dtype=torch.uint8)
        _check_length(client.architecture, content, layout.nbytes)
        return WeightRow(client.architecture, variant, layout, content)

    def _client(self, request: Mapping[str, Any]) -> Client:
        client: Client = copy.copy(self._context.clients[request["client"]])
        client.weights = None if request["own"] is None else self._row(client, request["own"], request["weights"])
        client.state = request["state"]
        return client

    def _job(self, request: Mapping[str, Any]) -> dict[str, Any]:
        method = self._context.method
        job = make_job(method, self._client(request), request["message"], **request["flags"])
        with keep_global_rng():
            done = run_job(job, method, self._context.model_factory, lambda: self._row(job.client, job.variant))
        fresh = done.weights if isinstance(done.weights, WeightRow) and done.weights is not job.client.weights else None
        shared = {} if fresh is None else {id(view): name for name, view in fresh.views.items()}  # found by `_result`
        return {
            "message": _mapped(done.message, lambda tensor: shared.get(id(tensor), tensor)),
            "state": done.state if done.counts else None,
            "weights": None if fresh is None else fresh.bytes,
            "trained": [done.trained.steps, done.trained.samples, done.trained.loss],
            "bytes_up": done.bytes_up,
            "sums": done.sums,
            "refused": done.refused,
            "operations": done.operations,
            "score": None if done.score is None else score_to_json(done.score, True),
        }

    def _scoring(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["evaluation"] != self._evaluation:
            self._memory = ScoreCache(self._context.figures)
            self._evaluation = request["evaluation"]
        others = [self._context.clients[number] for number, *_ in request["members"][1:]]
        jobs = [
            EvalJob(client, request["variant"], request["message"], request["round"], parts, shared)
            for client, (_, parts, shared) in zip([self._client(request), *others], request["members"], strict=True)
        ]
        scores = score_batch(EvalBatch(jobs), self._context.method, self._context.model_factory, self._memory)
        return {"scores": [{part: score_to_json(score, True) for part, score in each.items()} for each in scores]}

    def _pass(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"outputs": run_public_pass(PublicPass(**request["asked"]), self._context)}
