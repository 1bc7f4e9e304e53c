"""The client's side of a job, the same in every process: load, receive, train, upload.

All of it is done on a working copy: a client that is refused, or whose method fails, is as it was.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import (
    Message,
    clone,
    contiguous,
    first_nonfinite,
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
from polyfed.engine.scoring import evaluate_model, part_of
from polyfed.engine.uploads import Rejected, sent_nbytes
from polyfed.engine.weight_store import ClientWeights, WeightStore
from polyfed.errors import RunError
from polyfed.functional.device_copies import copy_once, memory_key, move_group, move_together
from polyfed.functional.modes import train_mode


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
    work.receive()
    work.train(training)
    return work.finish(store)


class ClientWork:
    """One job under way, step by step.

    Attributes:
        client: the working copy; the template of its network holds its weights. trained: the result of its training.
        stage: what it is at, for errors.
    """

    def __init__(self, job: TrainJob, method: Method, model_factory: ModelFactory) -> None:
        self.job = job
        self.method = method
        self.model_factory = model_factory
        self._before = client_weights(job.client, job.variant, model_factory)
        self.client = working_copy(job.client, job.variant, model_factory, self._before)
        self.client.round, self.client.exchange = job.round, job.exchange.name
        self.trained = TrainingResult()
        self.stage = ""
        self._counter = OperationCounter() if job.counted else None
        self._in_training = 0  # operations

    def seed_layers(self) -> None:
        """Make global random generators the client's own from now on, for what its layers draw in this job."""
        seed_global_rng(derive_seed(self.client.seed, "layers", self.job.exchange.name, self.job.round, self.client.id))

    def receive(self) -> None:
        """Take in the message; count operations, also those of the training to come, where they are counted."""
        client, method, exchange = self.client, self.method, self.job.exchange
        with self._at("receiving"):
            self.seed_layers()
            with self._counter or contextlib.nullcontext():
                client.context = method.receive(client, self.job.message)
            if self._counter is not None and exchange.trains:
                self.stage = "training"
                (client.context,) = contexts_on([client.context], self.model_factory.device)
                phases = method.phases(client.training) if exchange.phases is None else exchange.phases
                self._in_training = training_operations(client, method, client.context, phases)

    def train(self, training: Callable[[ClientWork], TrainingResult] | None = None) -> None:
        """Train, where the exchange does. training: see `run_job`."""
        client, exchange = self.client, self.job.exchange
        with self._at("training"):
            (client.context,) = contexts_on([client.context], self.model_factory.device)
            if training is not None and exchange.trains:
                self.trained = training(self)
            elif exchange.trains:
                self.trained = train(client, self.method, client.context, phases=exchange.phases)

    def finish(self, store: WeightStore) -> JobResult:
        """Judge the training, score the client, make its upload; then all of it leaves the device.

        Its new weights are in the template until then. store: see `run_job`.
        """
        client, job = self.client, self.job
        weights = self.model_factory.state(client.architecture, job.variant)
        made: Message | None = None
        message = freeze({})
        score = new = None
        with self._at("training"):
            refused = self._fault(weights)
            if refused is None and job.scores and len(client.data.test):
                self.stage = "scoring"
                (score,) = evaluate_model(client, self.method, [part_of(client, "test")], job.figures)
            self.stage = "uploading"
            if refused is None and job.uploads:  # a model of NaN sends nothing, as its upload could be anything
                with self._counter or contextlib.nullcontext():
                    made = self.method.upload(client, self.trained)
            with copy_once():  # what is uploaded of the network's tensors is not copied once more to be kept
                sums = {name: value for name, value in self.trained.sums.items() if value.dim() == 0}
                largest = self._leave_device(made or {}, list(sums.values()))
                if made is not None:
                    if job.exchange.trains or not self._is_as_before(weights):
                        new = store.keep(client.architecture, job.variant, weights)
                    message, refused = self._encoded(clone(made, self._kept(weights, new), job.device), largest)
                    if new is not None and not new.is_intact:
                        raise RunError("a plugin wrote into the upload that it was given; it must make another one")
                state = contiguous(client.state)
                sums = move_group(sums, "cpu")
        return JobResult(
            client.id,
            message=message,
            weights=job.client.weights if new is None or refused is not None else new,
            state=state,
            trained=self.trained,
            bytes_up=sent_nbytes(self.method, message),
            sums={} if refused else {name: float(value) for name, value in sums.items()},
            score=None if refused else score,
            refused=refused,
            largest=largest,
            operations=self._in_training + (0 if self._counter is None else self._counter.count),
        )

    @contextlib.contextmanager
    def _at(self, stage: str) -> Iterator[None]:
        """Errors within the block name client, round and stage, which it may change."""
        self.stage = stage
        try:
            yield
        except Exception as error:
            raise placed(error, self.client, self.stage, self.job.round) from error

    def _fault(self, weights: Mapping[str, Tensor]) -> str | None:
        """Why the client's work counts for nothing, if it does."""
        if self.job.exchange.trains and self.trained.steps == 0:
            frozen = not any(p.requires_grad for p in self.client.model.parameters())
            return "no training step: " + (
                "no parameter of its network takes a gradient"
                if frozen
                else "too few samples for a batch of this model"
            )
        if not math.isfinite(self.trained.loss):
            return f"the training loss is {self.trained.loss}"
        wrong = None if self.trained.is_finite else first_nonfinite({"model": weights})
        return None if wrong is None else f"the model is not finite ('{wrong}')"

    def _is_as_before(self, weights: Mapping[str, Tensor]) -> bool:
        return all(torch.equal(tensor, self._before[name].to(tensor)) for name, tensor in weights.items())

    def _leave_device(self, made: Message, sums: Sequence[Tensor]) -> float:
        """Have all that goes to main memory beside the weights cross in one copy for each type, within `copy_once`.

        Returns:
            The largest magnitude of what of the upload stays on a device; 0 if nothing does.
        """
        device = self.job.device
        tensors = tensors_of(made)
        places = places_of(tensors, device)
        leaving = [tensor for tensor, place in zip(tensors, places, strict=True) if place.type == "cpu"]
        staying = [t for t, place in zip(tensors, places, strict=True) if place.type != "cpu" and t.numel()]
        largest = [largest_entry(move_together(staying, [device] * len(staying)))] if staying else []
        leaving = [*largest, *leaving, *tensors_of(self.client.state), *sums]
        moved = move_together(leaving, [torch.device("cpu")] * len(leaving))
        return float(moved[0]) if largest else 0.0

    def _kept(self, weights: Mapping[str, Tensor], new: ClientWeights | None) -> dict[Hashable, Tensor]:
        """The copies that are kept of the network's tensors, for `clone` of an upload, which shares them."""
        device = self.job.device
        kept = {} if new is None else new.there
        return {memory_key(weights[name], device): copy for name, copy in kept.items() if copy.device == device}

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
    if isinstance(weights, ClientWeights) and (weights.architecture, weights.variant) == (client.architecture, variant):
        return True
    template = model_factory.state(client.architecture, variant)
    return all(name in weights and weights[name].shape == tensor.shape for name, tensor in template.items())


def client_weights(client: Client, variant: str, model_factory: ModelFactory) -> Mapping[str, Tensor]:
    """The client's weights, or those it starts from (again, if its network is now another one)."""
    if client.weights is None or not has_weights(client, variant, model_factory):
        return model_factory.starting_state(client.architecture, variant, client.id, client.given)
    held = client.weights.there if isinstance(client.weights, ClientWeights) else client.weights
    return {name: held[name] for name in model_factory.state(client.architecture, variant)}
