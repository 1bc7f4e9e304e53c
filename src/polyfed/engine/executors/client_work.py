"""The client's side of a job, the same in every process: load, receive, train, upload.

All of it is done on a working copy: a client that is refused, or whose method fails, is as it was.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import (
    Message,
    clone,
    contiguous,
    first_nonfinite,
    flatten,
    freeze,
    largest_entry,
    places_of,
    shallow_copy,
    tensors_of,
)
from polyfed.core.method import Method, TrainingResult
from polyfed.core.model_factory import ModelFactory
from polyfed.core.randomness import derive_seed, seed_global_rng
from polyfed.engine.executors.jobs import JobResult, TrainJob, placed
from polyfed.engine.local_training import contexts_on, train
from polyfed.engine.operation_counter import OperationCounter, training_operations
from polyfed.engine.scoring import Score, evaluate_model, part_of
from polyfed.engine.uploads import Rejected, sent_nbytes
from polyfed.engine.weight_store import WeightRow, WeightStore
from polyfed.errors import RunError
from polyfed.functional.device_copies import copy_once, memory_key, move_group, move_together
from polyfed.functional.modes import train_mode

_CPU = torch.device("cpu")


def run_job(
    job: TrainJob,
    method: Method,
    model_factory: ModelFactory,
    store: WeightStore,
    training: Callable[[ClientWork], TrainingResult] | None = None,
) -> JobResult:
    """Load the client's network, receive, train, upload; within `keep_global_rng`.

    Args:
        store: has the client's new weights, if there are any. training: another way to train.

    Raises:
        RunError: the method failed; says for which client, in which round and at which stage.
    """
    work = ClientWork(job, method, model_factory)
    work.seed_layers()
    work.receive()
    work.train(training)
    return work.finish(store)


class ClientWork:
    """One job under way, step by step.

    Attributes:
        client: the working copy; the template of its network holds its weights. trained: the result of its training.
    """

    def __init__(self, job: TrainJob, method: Method, model_factory: ModelFactory) -> None:
        self.job = job
        self.method = method
        self.model_factory = model_factory
        self._before = client_weights(job.client, job.variant, model_factory)
        self.client = working_copy(job.client, job.variant, model_factory, self._before)
        self.client.round, self.client.exchange = job.round, job.exchange.name
        self.trained = TrainingResult()
        self._operations = 0

    def seed_layers(self) -> None:
        """Make global random generators the client's own from now on, for what its layers draw in this job."""
        seed_global_rng(derive_seed(self.client.seed, "layers", self.job.exchange.name, self.job.round, self.client.id))

    def receive(self) -> None:
        """Take in the message; count operations, also those of the training to come, where they are counted."""
        client, method = self.client, self.method
        with self.stage("receiving"), self._counting() as done:
            client.context = method.receive(client, freeze(self.job.message))
        if done is None:
            return
        self._operations = done.count
        exchange = self.job.exchange
        if exchange.trains:
            with self.stage("training"):
                (client.context,) = contexts_on([client.context], self.model_factory.device)
                phases = method.phases(client.training) if exchange.phases is None else exchange.phases
                self._operations += training_operations(client, method, client.context, phases)

    def train(self, training: Callable[[ClientWork], TrainingResult] | None = None) -> None:
        """Train, where the exchange does. training: see `run_job`."""
        client = self.client
        (client.context,) = contexts_on([client.context], self.model_factory.device)
        if not self.job.exchange.trains:
            return
        with self.stage("training"):
            if training is not None:
                self.trained = training(self)
            else:
                phases = self.job.exchange.phases
                self.trained = train(client, self.method, client.context, phases=phases)

    def finish(self, store: WeightStore) -> JobResult:
        """Judge the training, score the client, make its upload; then all of it leaves the device.

        Its new weights are in the template until then. store: see `run_job`.
        """
        client, job = self.client, self.job
        after = self.model_factory.state(client.architecture, job.variant)
        with self.stage("training"):
            self._check_shapes(after)
        refused = self._fault(after)
        score = self._scored() if refused is None and job.scores and len(client.data.test) else None
        # a model of NaN sends nothing, as its upload could be anything
        made = self._uploaded() if refused is None and job.uploads else None
        largest = self._largest_on_device(made)
        unchanged = [] if job.exchange.trains else [self._is_as_before(after)]
        message = freeze({})
        row = None
        with copy_once():  # what is uploaded of the network's tensors is not copied once more to be kept
            with self.stage("uploading"):
                leaving = [*self._leaving(made), *largest, *unchanged]
                move_together(leaving, [_CPU] * len(leaving))  # in one copy for each type
            is_unchanged = any(map(bool, move_together(unchanged, [_CPU] * len(unchanged))))
            if refused is None and job.uploads and not is_unchanged:
                row = store.allocate(client.architecture, job.variant).write(after)
            size = sum(map(float, move_together(largest, [_CPU] * len(largest))))
            with self.stage("uploading"):
                if made is not None:
                    own = clone(made, self._held(after, row), job.device)  # shares the row with the network
                    message, refused = self._encoded(own, size)
                if row is not None and not row.is_intact:
                    raise RunError("a plugin wrote into the upload that it was given; it must make another one")
            sums = {} if refused else move_group(_scalar_sums(self.trained.sums), "cpu")
            state = contiguous(client.state)
        return JobResult(
            client.id,
            message,
            job.client.weights if row is None or refused is not None else row,
            state,
            self.trained,
            sent_nbytes(self.method, message),
            {name: float(value) for name, value in sums.items()},
            None if refused else score,
            refused,
            largest=size,
            operations=self._operations,
        )

    def _scored(self) -> Score:
        with self.stage("scoring"):
            (score,) = evaluate_model(self.client, self.method, [part_of(self.client, "test")], self.job.figures)
            return score

    def _uploaded(self) -> Message:
        with self.stage("uploading"), self._counting() as done:
            made = self.method.upload(self.client, self.trained)
        self._operations += 0 if done is None else done.count
        return made

    def _largest_on_device(self, made: Message | None) -> list[Tensor]:
        """The largest magnitude of what of an upload stays on a device, if anything does."""
        with self.stage("uploading"):
            tensors = tensors_of(made or {})
            places = places_of(tensors, self.job.device)
            staying = [t for t, place in zip(tensors, places, strict=True) if place.type != "cpu" and t.numel()]
            there = move_together(staying, [self.job.device] * len(staying))  # a method may make some in main memory
            return [largest_entry(there)] if there else []

    def _is_as_before(self, after: Mapping[str, Tensor]) -> Tensor:
        """Whether weights are those from before, on their device, so that nobody waits for it now."""
        before = move_together([self._before[name] for name in after], [t.device for t in after.values()])
        return torch.stack([(one == other).all() for one, other in zip(before, after.values(), strict=True)]).all()

    @contextlib.contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        """Errors within the block name client, round and stage."""
        try:
            yield
        except Exception as error:
            raise placed(error, self.client, stage, self.job.round) from error

    def _leaving(self, made: Message | None) -> list[Tensor]:
        """What goes to main memory beside the weights: upload, state, and what the record needs."""
        sums = _scalar_sums(self.trained.sums).values()
        tensors = tensors_of(made or {})
        places = places_of(tensors, self.job.device)
        message = [tensor for tensor, place in zip(tensors, places, strict=True) if place.type == "cpu"]
        return [*message, *tensors_of(self.client.state), *sums]

    def _check_shapes(self, after: Mapping[str, Tensor]) -> None:
        """Whether the network's tensors have kept their shapes, which a forward may only change late."""
        for name, tensor in after.items():
            before = self._before[name].shape
            if tensor.shape != before:
                raise RunError(
                    f"the network's forward has turned the buffer '{name}' from {tuple(before)} into "
                    f"{tuple(tensor.shape)}; give it its full size in __init__"
                )

    def _fault(self, after: Mapping[str, Tensor]) -> str | None:
        """Why the client's work counts for nothing, if it does."""
        if self.job.exchange.trains and self.trained.steps == 0:
            return "no training step: too few samples for a batch of this model"
        if not math.isfinite(self.trained.loss):
            return f"the training loss is {self.trained.loss}"
        if self.trained.is_finite:
            return None
        name = first_nonfinite({"model": after})
        return None if name is None else f"the model is not finite ('{name}')"

    def _encoded(self, made: Message, largest: float) -> tuple[Message, str | None]:
        """What leaves the client in place of what its method made; and why nothing of it counts, if it does not.

        largest: magnitude of what is not in main memory.
        """
        upload = freeze(made)
        name = first_nonfinite(upload, only_here=math.isfinite(largest))
        if name is not None:
            return freeze({}), f"the upload is not finite ('{name}')"  # no plugin has put noise on it
        try:
            for plugin in self.client.plugins:
                changed = plugin.encode(upload, self.client, self.method, self.job.message)
                if changed is not upload:
                    upload = freeze(changed)
        except Rejected as problem:
            return freeze({}), str(problem)
        return upload, None

    def _held(self, after: Mapping[str, Tensor], row: WeightRow | None) -> dict[Hashable, Tensor]:
        """What a row has of the network's tensors in the plain order, for `clone` of an upload, which shares it."""
        device = self.job.device
        if row is None or row.bytes.device != device:
            return {}
        pairs = [(memory_key(tensor, device), row.views[name]) for name, tensor in after.items()]
        return {key: view for key, view in pairs if view.is_contiguous()}

    def _counting(self) -> AbstractContextManager[OperationCounter | None]:
        return OperationCounter() if self.job.counted else contextlib.nullcontext()


def _scalar_sums(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the sums over the steps that are single numbers, by their names in records."""
    return {name: value for name, value in flatten(dict(sums)).items() if value.dim() == 0}


# working copies ---------------------------------------------------------------------------------------------------


def working_copy(
    client: Client, variant: str, model_factory: ModelFactory, weights: Mapping[str, Tensor] | None = None
) -> Client:
    """A working copy of the client with its weights in the template; the client itself stays as it is.

    weights: `client_weights`, where they are known.
    """
    worker = copy.copy(client)
    worker.state = shallow_copy(client.state)
    weights = client_weights(client, variant, model_factory) if weights is None else weights
    worker.bound = train_mode(model_factory.load(client.architecture, variant, weights))
    return worker


def has_weights(client: Client, variant: str, model_factory: ModelFactory) -> bool:
    """Whether the client has weights of its own, and of its present network."""
    weights = client.weights
    if weights is None:
        return False
    if isinstance(weights, WeightRow) and (weights.architecture, weights.variant) == (client.architecture, variant):
        return True
    template = model_factory.state(client.architecture, variant)
    return all(name in weights and weights[name].shape == tensor.shape for name, tensor in template.items())


def client_weights(client: Client, variant: str, model_factory: ModelFactory) -> Mapping[str, Tensor]:
    """The client's weights, or those it starts from (again, if its network is now another one)."""
    if client.weights is None or not has_weights(client, variant, model_factory):
        return model_factory.starting_state(client.architecture, variant, client.id, client.given)
    held = client.weights.views if isinstance(client.weights, WeightRow) else client.weights
    return {name: held[name] for name in model_factory.state(client.architecture, variant)}
