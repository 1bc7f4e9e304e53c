"""What a run asks of a worker process, and what this answers: one piece of memory each, however it travels.

It is the length of the facts, the facts as JSON, and the tensors as they lie in memory: nothing is unpickled.
A worker keeps nothing that a result depends on: data, networks and the method it has already, the client's weights and
state come with each request. So another one can take its place at any time.
"""

from __future__ import annotations

import abc
import copy
import json
import math
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed import profiling
from polyfed.core.client import Client
from polyfed.core.message import freeze
from polyfed.core.method import TrainingResult
from polyfed.core.randomness import keep_global_rng
from polyfed.core.server import PublicPass
from polyfed.engine.executors.client_work import WorkerContext, run_job, run_public_pass, score_batch
from polyfed.engine.executors.jobs import (
    EvalBatch,
    EvalJob,
    Job,
    JobResult,
    PassJob,
    Scores,
    TrainBatch,
    TrainJob,
    placed,
)
from polyfed.engine.executors.vectorized import SIZE, VectorizedExecutor
from polyfed.engine.scoring import ScoreCache, score_from_json, score_to_json
from polyfed.engine.weight_store import WeightRow, WeightStore, client_row
from polyfed.errors import PolyfedError, RunError

_ALIGNED = 64  # bytes; as PyTorch aligns its own tensors, on which the last bits of a product may depend
_LENGTH = 8  # bytes of the number that says how long the facts are
_FLAGS = ("is_final", "exchange_index", "scores", "figures", "counted", "uploads")  # of a `TrainJob`

Buffer = bytearray | memoryview
Tree = Mapping[str, Any]  # names -> tensors, None, or such mappings; a message, a state, or several of them


# bytes ------------------------------------------------------------------------------------------------------------


def pack(facts: Mapping[str, Any], tree: Tree, room: Callable[[int], Buffer] = bytearray) -> Buffer:
    """Facts and tensors in one piece of memory, one that is there twice once. Strides are those of ``tensor.clone()``.

    Args:
        tree: may hold names in the place of tensors.
        room: gives memory of so many bytes.
    """
    placed_tensors: dict[Hashable, tuple[Tensor, list[Any]]] = {}
    size = 0

    def place(tensor: Any) -> list[Any] | str:
        nonlocal size
        if isinstance(tensor, str):
            return tensor
        if not isinstance(tensor, Tensor):
            raise RunError(f"expected tensors in messages and states, got {type(tensor).__name__}")
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in placed_tensors:
            like = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
            where = [str(tensor.dtype).removeprefix("torch."), tensor.shape, like.stride(), size]
            placed_tensors[key] = (tensor.detach(), where)
            size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        return placed_tensors[key][1]

    described = json.dumps({**facts, "tensors": _mapped(tree, place)}).encode()
    described += b" " * (-(_LENGTH + len(described)) % _ALIGNED)
    begin = _LENGTH + len(described)
    data = room(begin + size)
    data[:begin] = len(described).to_bytes(_LENGTH, "little") + described
    for tensor, where in placed_tensors.values():
        _tensor_at(data, begin, where).copy_(tensor)
    return data


def unpack(data: Buffer, copies: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts and the tensors of `pack`, these in memory of their own, or where they lie."""
    begin = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    facts: dict[str, Any] = json.loads(bytes(data[_LENGTH:begin]))
    there = _mapped(
        facts.pop("tensors"), lambda where: where if isinstance(where, str) else _tensor_at(data, begin, where)
    )
    return facts, _mapped(there, Tensor.clone) if copies else there


def _tensor_at(data: Buffer, begin: int, where: Any) -> Tensor:
    name, shape, strides, offset = where
    dtype = getattr(torch, name)
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=begin + offset).as_strided(shape, strides)


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """`function` of all leaves but None, which stay."""
    if tree is None or isinstance(tree, Tensor | list):  # asked first, as there are many of them
        return None if tree is None else function(tree)
    if isinstance(tree, Mapping):
        return {name: _mapped(entry, function) for name, entry in tree.items()}
    return function(tree)


# the run's side ---------------------------------------------------------------------------------------------------


class WorkerUnavailable(Exception):
    """No worker can be had here; says why."""


class WorkerDied(Exception):
    """The worker ended before it answered; says how."""


class Worker(abc.ABC):
    """A worker, as the run's process sees it: greet it; then ask it, and take the answer when it is there.

    Args:
        store: of the run. say: is given what it says of clients that it cannot train as one.
    """

    def __init__(self, store: WeightStore, say: Callable[[str], None] = print) -> None:
        self._store = store
        self._say = say
        self._asked: Job | None = None

    @profiling.timed("messages")
    def send(self, asked: Job, evaluation: int = 0) -> None:
        """Give it something to do; one thing at a time. evaluation: number of that which a scoring belongs to."""
        self._asked = asked
        self.transmit(*_request(asked, evaluation))

    @profiling.timed("messages")
    def receive(self) -> tuple[Any, float]:
        """The result, see `_read_answer`; and how many seconds it took.

        Raises:
            WorkerDied: it is no more. PolyfedError: that of the work, as if it had been done here.
        """
        reply, tensors = unpack(self.await_reply(), copies=False)
        check_reply(reply)
        for line in reply.get("said", ()):
            self._say(line)
        assert self._asked is not None
        asked, self._asked = self._asked, None
        return _read_answer(asked, reply, tensors, self._store), reply["seconds"]

    @abc.abstractmethod
    def wait_ready(self) -> None:
        """Wait until it is there."""

    @abc.abstractmethod
    def transmit(self, facts: Mapping[str, Any], tree: Tree) -> None:
        """Hand it a request."""

    @abc.abstractmethod
    def await_reply(self) -> Buffer:
        """Its answer, when it is there."""

    @abc.abstractmethod
    def is_alive(self) -> bool:
        """Whether the process is still there."""

    @abc.abstractmethod
    def terminate(self) -> None:
        """End the process, if it has not ended. It keeps nothing that would be lost."""


def _request(asked: Job, evaluation: int) -> tuple[dict[str, Any], Tree]:
    facts: dict[str, Any] = {"client": asked.client.id, "round": asked.round, "timed": profiling.is_profiling()}
    if isinstance(asked, PassJob):
        facts |= {"what": "pass", "outputs": asked.asked.outputs}
        return facts, {"weights": asked.asked.weights, "rows": asked.asked.rows}
    if isinstance(asked, TrainBatch):
        each = [_request(job, evaluation) for job in asked.jobs]
        trees = {str(place): tree for place, (_, tree) in enumerate(each)}
        return {**facts, "what": "stack", "jobs": [own for own, _ in each]}, trees
    row = client_row(asked.client)
    if isinstance(asked, TrainJob):
        job: TrainJob | EvalJob = asked
        facts |= {"what": "job", **{name: getattr(asked, name) for name in _FLAGS}}
    else:
        job = asked.jobs[0]
        members = [[each.client.id, list(each.parts), list(each.shared)] for each in asked.jobs]
        facts |= {"what": "scoring", "members": members, "evaluation": evaluation}
    facts |= {"variant": job.variant, "own": None if row is None else row.variant}
    own = None if row is None else row.bytes
    return facts, {"message": job.message, "state": asked.client.state, "own": own}


def check_reply(reply: Mapping[str, Any]) -> None:
    """Whether it is an answer; the times that the worker has measured count here, too."""
    if "error" in reply:
        kind, text, where = reply["error"]
        error = _error_class(kind)(text)
        error.add_note(where)
        raise error
    profiling.include(reply.get("timings"))
    profiling.include_processor_seconds(reply.get("processor_seconds", 0.0))  # a greeting has none


def _read_answer(
    asked: Job, reply: Mapping[str, Any], tensors: Mapping[str, Any], store: WeightStore
) -> JobResult | list[JobResult] | list[Scores] | Tensor:
    """The result of a request."""
    if isinstance(asked, TrainBatch):
        facts = reply["jobs"]
        return [_read_result(job, facts[n], tensors[str(n)], store) for n, job in enumerate(asked.jobs)]
    if isinstance(asked, EvalBatch):
        scores: list[Scores] = [{k: score_from_json(score) for k, score in each.items()} for each in reply["scores"]]
        return scores
    if isinstance(asked, PassJob):
        outputs: Tensor = tensors["outputs"]
        return outputs.clone()
    return _read_result(asked, reply, tensors, store)


def _read_result(
    asked: TrainJob, reply: Mapping[str, Any], tensors: Mapping[str, Any], store: WeightStore
) -> JobResult:
    """That of a client; weights that did not change are its own again."""
    own = asked.client
    fresh: WeightRow | None = None
    if tensors["weights"] is not None:
        fresh = store.allocate(own.architecture, asked.variant)
        _check_length(own.architecture, tensors["weights"], fresh.bytes.numel())
        fresh.take(tensors["weights"])
    held = {} if fresh is None else fresh.views
    return JobResult(
        own.id,
        freeze(_mapped(tensors["message"], lambda leaf: held[leaf] if isinstance(leaf, str) else leaf.clone())),
        own.weights if fresh is None else fresh,
        own.state if tensors["state"] is None else _mapped(tensors["state"], Tensor.clone),
        TrainingResult(*reply["trained"]),
        reply["bytes_up"],
        reply["sums"],
        None if reply["score"] is None else score_from_json(reply["score"]),
        reply["refused"],
        operations=reply["operations"],
    )


def _check_length(architecture: str, content: Tensor, expected: int) -> None:
    """Whether a row is as long as the network's rows are here."""
    if content.numel() != expected:
        raise RunError(f"expected {expected} bytes of weights of '{architecture}', got {content.numel()}")


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
    """Carries out requests.

    Args:
        context: what is worked on; its store holds no weights here. room: gives memory for answers, see `pack`.
    """

    def __init__(self, context: WorkerContext, room: Callable[[int], Buffer] = bytearray) -> None:
        self._context = context
        self._room = room
        self._memory = ScoreCache(context.figures)
        self._evaluation = 0
        self._said: list[str] = []
        self._stacks = VectorizedExecutor(context, SIZE, self._said.append)
        context.store.keep_in_main_memory()
        for client in context.clients:
            client.weights = None
            client.state = {}  # they come with each job

    def reply(self, data: Buffer) -> Buffer:
        """Do what is asked; an error of the work is an answer, too. `data` stays as it is until the next request."""
        began = time.perf_counter()
        used = time.process_time()
        try:
            request, tensors = unpack(data, copies=False)
            with profiling.profile(request["timed"], "messages") as watch:
                work = {"job": self._job, "stack": self._stack, "scoring": self._scoring, "pass": self._pass}
                facts, found = work[request["what"]](request, tensors)
            facts["seconds"] = time.perf_counter() - began
            facts["processor_seconds"] = time.process_time() - used
            if watch is not None:
                facts["timings"] = watch.seconds
            try:
                return pack(facts, found, self._room)
            except RunError as error:
                raise placed(error, self._context.clients[request["client"]], "uploading", request["round"]) from error
        except Exception as error:
            return pack(described_error(error), {}, self._room)

    def _row(self, client: Client, variant: str, content: Tensor | None = None) -> WeightRow:
        """A row outside the store, holding `content`, or nothing yet."""
        layout = self._context.store.layout(client.architecture, variant)
        if content is None:
            content = torch.zeros(layout.nbytes, dtype=torch.uint8)
        _check_length(client.architecture, content, layout.nbytes)
        return WeightRow(client.architecture, variant, layout, content)

    def _client(self, request: Mapping[str, Any], tensors: Mapping[str, Any]) -> Client:
        client: Client = copy.copy(self._context.clients[request["client"]])
        client.weights = None if request["own"] is None else self._row(client, request["own"], tensors["own"])
        client.state = tensors["state"]
        return client

    def _job(self, request: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[dict[str, Any], Tree]:
        job = self._asked(request, tensors)
        with keep_global_rng():
            done = run_job(
                job, self._context.method, self._context.model_factory, lambda: self._row(job.client, job.variant)
            )
        return _described_result(job, done)

    def _stack(self, request: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[dict[str, Any], Tree]:
        jobs = [self._asked(each, tensors[str(place)]) for place, each in enumerate(request["jobs"])]
        self._said.clear()
        each = [_described_result(*pair) for pair in zip(jobs, self._trained(jobs), strict=True)]
        trees = {str(place): tree for place, (_, tree) in enumerate(each)}
        return {"jobs": [facts for facts, _ in each], "said": self._said}, trees

    def _trained(self, jobs: Sequence[TrainJob]) -> list[JobResult]:
        """What comes of clients who train as one, or in halves where the device has no room for all."""
        try:
            return self._stacks.run(jobs, lambda count: None)
        except RunError as error:
            if len(jobs) == 1 or not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
        half = len(jobs) // 2
        return self._trained(jobs[:half]) + self._trained(jobs[half:])

    def _asked(self, request: Mapping[str, Any], tensors: Mapping[str, Any]) -> TrainJob:
        method = self._context.method
        client = self._client(request, tensors)
        exchanges = method.final_exchanges() if request["is_final"] else method.exchanges(request["round"])
        exchange = exchanges[request["exchange_index"]]
        flags = {name: request[name] for name in _FLAGS}
        return TrainJob(client, tensors["message"], request["variant"], exchange, request["round"], **flags)

    def _scoring(self, request: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[dict[str, Any], Tree]:
        if request["evaluation"] != self._evaluation:
            self._memory = ScoreCache(self._context.figures)
            self._evaluation = request["evaluation"]
        first = self._client(request, tensors)
        others = [self._context.clients[number] for number, *_ in request["members"][1:]]
        jobs = [
            EvalJob(client, request["variant"], tensors["message"], request["round"], parts, shared)
            for client, (_, parts, shared) in zip([first, *others], request["members"], strict=True)
        ]
        scores = score_batch(EvalBatch(jobs), self._context.method, self._context.model_factory, self._memory)
        return {"scores": [{part: score_to_json(score, True) for part, score in each.items()} for each in scores]}, {}

    def _pass(self, request: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[dict[str, Any], Tree]:
        facts = (request["client"], tensors["weights"], request["outputs"], tensors["rows"], request["round"])
        return {}, {"outputs": run_public_pass(PublicPass(*facts), self._context)}


def _described_result(job: TrainJob, done: JobResult) -> tuple[dict[str, Any], Tree]:
    """What `_read_result` reads; of an upload, tensors of the new weights are their names."""
    fresh = done.weights if isinstance(done.weights, WeightRow) and done.weights is not job.client.weights else None
    shared = {} if fresh is None else {id(view): name for name, view in fresh.views.items()}
    facts = {
        "trained": [done.trained.steps, done.trained.samples, done.trained.loss],
        "bytes_up": done.bytes_up,
        "sums": done.sums,
        "refused": done.refused,
        "operations": done.operations,
        "score": None if done.score is None else score_to_json(done.score, True),
    }
    return facts, {
        "message": _mapped(done.message, lambda tensor: shared.get(id(tensor), tensor)),
        "state": done.state if done.counts else None,
        "weights": None if fresh is None else fresh.bytes,
    }
