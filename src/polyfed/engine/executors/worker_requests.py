"""What a run asks of a worker, and what this answers, as bytes (`engine.wire`).

A worker keeps nothing that a result depends on: data, networks and the method it has already, the client's weights and
state come with each request. So another one can take its place at any time.
"""

from __future__ import annotations

import copy
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from polyfed.core.client import Client
from polyfed.core.message import freeze
from polyfed.core.method import TrainingResult
from polyfed.core.randomness import keep_global_rng
from polyfed.core.server import PublicPass
from polyfed.engine.device import include_processor_seconds
from polyfed.engine.executors.client_scores import score_batch
from polyfed.engine.executors.client_work import run_job
from polyfed.engine.executors.executor import ExecutorSetup, run_public_pass
from polyfed.engine.executors.jobs import EvalBatch, EvalJob, Job, JobResult, TrainJob, make_job, placed
from polyfed.engine.scoring import ScoreCache, score_from_json, score_to_json
from polyfed.engine.weight_store import ClientWeights, WeightStore, kept_weights
from polyfed.engine.wire import decode, encode
from polyfed.errors import PolyfedError, RunError

_AT_WORKER = {"client", "exchange", "device"}  # fields of a `TrainJob` that a worker has already


# the run's side ---------------------------------------------------------------------------------------------------


def make_request(asked: Job) -> bytes:
    """What a worker is to do."""
    what = type(asked).__name__
    if isinstance(asked, PublicPass):
        return encode({"what": what, "client": asked.client_id, "round": asked.round, "pass": vars(asked)})
    own = kept_weights(asked.client)
    request: dict[str, Any] = {"what": what, "client": asked.client.id, "round": asked.round}
    request["state"] = asked.client.state
    request["weights"] = None if own is None else [own.variant, own.there]
    if isinstance(asked, TrainJob):
        request["job"] = {name: value for name, value in vars(asked).items() if name not in _AT_WORKER}
        return encode(request)
    first = asked.jobs[0]
    parts = [[job.client.id, list(job.parts), list(job.shared)] for job in asked.jobs]
    return encode({**request, "variant": first.variant, "message": first.message, "parts": parts})


def read_answer(asked: Job, data: bytes) -> Any:
    """The result of a job, the scores of each client, or the outputs of a pass.

    Raises:
        PolyfedError: that of the work, as if it had been done here.
    """
    answer = decode(data)
    check_answer(answer)
    if isinstance(asked, PublicPass):
        return answer["outputs"]
    if isinstance(asked, EvalBatch):
        return [{part: score_from_json(score) for part, score in each.items()} for each in answer["scores"]]
    result = answer["result"]
    client = asked.client
    score, new = result["score"], result["weights"]
    result |= {
        "message": freeze(result["message"]),
        "weights": client.weights if new is None else ClientWeights(client.architecture, asked.variant, new),
        "trained": TrainingResult(*result["trained"]),
        "score": None if score is None else score_from_json(score),
    }
    return JobResult(**result)


def check_answer(answer: Mapping[str, Any]) -> None:
    """Raise the error that a worker tells of; the processor time that it has used counts here, too."""
    if "error" in answer:
        name, text, where = answer["error"]
        error = next((kind for kind in _kinds(PolyfedError) if str(kind) == name), RunError)(text)
        error.add_note(where)
        raise error
    process, seconds = answer.get("processor_seconds", [0, 0.0])  # a greeting has none
    if process != os.getpid():  # whose own time counts by itself
        include_processor_seconds(seconds)


def _kinds(kind: type[PolyfedError]) -> Iterator[type[PolyfedError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


# the worker's side ------------------------------------------------------------------------------------------------


def describe_error(error: Exception) -> dict[str, Any]:
    """The answer that says what went wrong, for `check_answer`."""
    is_ours = isinstance(error, PolyfedError)
    kind = type(error) if is_ours else RunError
    text = str(error) if is_ours else f"{type(error).__name__}: {error}"
    return {"error": [str(kind), text, "".join(traceback.format_exception(error))]}


class RequestHandler:
    """Does what a run asks, in another process or thread.

    Args:
        setup: the federation there. Networks are its own: no two handlers may work at the same time on one.
    """

    def __init__(self, setup: ExecutorSetup) -> None:
        self._setup = replace(setup, store=WeightStore(setup.model_factory, []))
        self._scored = (0, ScoreCache())  # round, and scores in it

    def reply(self, data: bytes) -> bytes:
        """Do what is asked; an error of the work is an answer, too."""
        used = time.process_time()
        try:
            request = decode(data)
            work = {"TrainJob": self._train, "EvalBatch": self._score, "PublicPass": self._pass}
            answer = work[request["what"]](request)
            answer["processor_seconds"] = [os.getpid(), time.process_time() - used]
            try:
                return encode(answer)
            except RunError as error:
                raise placed(error, self._setup.clients[request["client"]], "uploading", request["round"]) from error
        except Exception as error:
            return encode(describe_error(error))

    def _client(self, request: Mapping[str, Any]) -> Client:
        """The client as it stands in the run."""
        client: Client = copy.copy(self._setup.clients[request["client"]])
        client.state = request["state"]
        client.weights = None
        if request["weights"] is not None:
            client.weights = ClientWeights(client.architecture, *request["weights"])
        return client

    def _train(self, request: Mapping[str, Any]) -> dict[str, Any]:
        setup = self._setup
        job = make_job(setup.method, self._client(request), **request["job"])
        with keep_global_rng():
            done = run_job(job, setup.method, setup.model_factory, setup.store)
        result = {field.name: getattr(done, field.name) for field in fields(JobResult)}
        result |= {
            "weights": None if done.weights is job.client.weights else done.weights,
            "trained": [done.trained.steps, done.trained.samples, done.trained.loss],
            "score": None if done.score is None else score_to_json(done.score, True),
        }
        return {"result": result}

    def _score(self, request: Mapping[str, Any]) -> dict[str, Any]:
        setup = self._setup
        if self._scored[0] != request["round"]:
            self._scored = (request["round"], ScoreCache(setup.figures))
        clients = [self._client(request), *(setup.clients[number] for number, *_ in request["parts"][1:])]
        jobs = [
            EvalJob(client, request["variant"], request["message"], request["round"], parts, shared)
            for client, (_, parts, shared) in zip(clients, request["parts"], strict=True)
        ]
        scores = score_batch(EvalBatch(jobs), setup.method, setup.model_factory, self._scored[1])
        return {"scores": [{part: score_to_json(score, True) for part, score in each.items()} for each in scores]}

    def _pass(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"outputs": run_public_pass(PublicPass(**request["pass"]), self._setup)}
