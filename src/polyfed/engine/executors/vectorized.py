"""Clients of one network trained together, as one stack: for a GPU, where one client's steps are too small to fill it.

The result is that of `Serial`, up to rounding and the masks of dropout, and on a CPU the same bits again whenever the
same clients train in the same stacks. What cannot be stacked is done as `Serial` does it, and one line says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch

from polyfed.core.method import NotVectorizable, Phase
from polyfed.core.randomness import derive_seed, keep_global_rng, seed_global_rng
from polyfed.engine.executors.client_work import ClientWork, run_job
from polyfed.engine.executors.executor import Done, Executor, ExecutorSetup
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.executors.stacked_loss import StackedLoss, Tensors, own_tensors, structure, without_values
from polyfed.engine.executors.stacked_training import StackedClients, loss_context
from polyfed.engine.local_training import contexts_on
from polyfed.errors import ConfigError, RunError, kind_and_line
from polyfed.functional.device_copies import copy_once
from polyfed.functional.modes import dropout_layers, train_mode

SIZE = 32  # clients in a stack by default; their weights, gradients and activations are in memory at the same time
WORTH = 4  # clients in a stack on a GPU, at least: its step takes longer than that of a single client


class VectorizedExecutor(Executor):
    """Stacks of clients of one architecture and variant, as far as the method lets one.

    A stack has `workers` clients, at most; one of fewer than 4 is not worth it on a GPU, unless the size is smaller.
    """

    in_process = True

    def __init__(self, setup: ExecutorSetup) -> None:
        super().__init__(setup)
        self._size = self.stack_size(setup.workers)
        if self._size == 1:
            raise ConfigError("expected workers = 2 or more, as the executor 'vectorized' trains so many as one, got 1")
        self._said: set[str] = set()
        self._prepares: list[object] = []
        self._refused: dict[Hashable, str] = {}  # why clients train one after the other
        self._losses: dict[Hashable, StackedLoss] = {}  # by label, as copying a network takes a while
        self._fills: dict[Hashable, bool] = {}  # see `StackedClients`

    @classmethod
    def stack_size(cls, workers: int | None) -> int:
        return workers or SIZE

    def run(self, jobs: Sequence[TrainJob], done: Done) -> list[JobResult]:
        found: dict[int, JobResult] = {}
        with keep_global_rng():
            for places in self._alike(jobs):
                for place, result in zip(places, self._results([jobs[place] for place in places]), strict=True):
                    found[place] = result
                    done(len(found))
        return [found[place] for place in range(len(jobs))]

    def _alike(self, jobs: Sequence[TrainJob]) -> Iterator[list[int]]:
        """The places of clients who may train together, of similar size, and at most so many as a stack has."""
        kinds: dict[Hashable, list[int]] = {}
        for place, job in enumerate(jobs):
            kinds.setdefault(self._label(job), []).append(place)
        for places in kinds.values():
            places.sort(key=lambda place: -len(jobs[place].client.data.train))
            for first in range(0, len(places), self._size):
                yield sorted(places[first : first + self._size])

    def _label(self, job: TrainJob) -> Hashable:
        """What is the same for those who may train together: the network, the exchange, the form of the data."""
        client, x = job.client, job.client.data.train.x
        if client.prepare not in self._prepares:
            self._prepares.append(client.prepare)
        prepare = self._prepares.index(client.prepare)
        return client.architecture, job.variant, job.exchange.name, prepare, x.shape[1:], x.dtype

    def _results(self, jobs: Sequence[TrainJob]) -> Iterable[JobResult]:
        """Those of clients of one kind."""
        first = jobs[0]
        if not first.exchange.trains:
            return map(self._alone, jobs)
        label = self._label(first)
        reason = self._refused.get(label) or self.setup.method.trains_alone
        if first.client.privacy.max_grad_norm:
            reason = "gradients are bounded row by row"
        if not reason and len(jobs) >= self._least():
            try:
                return self._stacked(jobs)
            except NotVectorizable as error:
                reason = self._refused[label] = str(error)
            except torch.OutOfMemoryError as error:
                raise RunError(
                    f"{first.client.title} ({first.client.architecture}), round {first.round}, training: the device's "
                    f"memory ran out with {len(jobs)} clients as one; set run.workers below {len(jobs)}"
                ) from error
        if reason:
            self._say_once(f"clients train one after the other; {first.client.architecture}: {reason}")
        return map(self._alone, jobs)

    def _least(self) -> int:
        """How many clients are worth a stack, at least."""
        return 2 if self.setup.model_factory.device.type == "cpu" else min(WORTH, self._size)

    def _alone(self, job: TrainJob) -> JobResult:
        return run_job(job, self.setup.method, self.setup.model_factory, self.setup.store)

    def _stacked(self, jobs: Sequence[TrainJob]) -> list[JobResult]:
        """Receive one after the other, train as one, upload one after the other.

        Clients whose contexts differ in more than values are apart from each other.
        """
        first = jobs[0]
        phases = first.exchange.phases
        if phases is None:
            phases = self.setup.method.phases(first.client.training)
        works, weights = self._received(jobs)
        names = list(weights[0])
        groups: dict[Hashable, list[int]] = {}
        for place, work in enumerate(works):
            groups.setdefault(structure(loss_context(work.client, phases)), []).append(place)
        found: dict[int, JobResult] = {}
        for places in groups.values():
            if len(places) >= self._least():
                tensors = {name: torch.stack([weights[place].pop(name) for place in places]) for name in names}
                found |= zip(places, self._trained([works[place] for place in places], tensors, phases), strict=True)
            else:
                self._say_once("clients whose contexts differ in more than values of tensors train one after the other")
                found |= {place: self._alone(jobs[place]) for place in places}
        return [found[place] for place in range(len(jobs))]

    def _received(self, jobs: Sequence[TrainJob]) -> tuple[list[ClientWork], list[Tensors]]:
        """The clients, each with its context, and their networks' tensors by name."""
        model_factory = self.setup.model_factory
        template = model_factory.module(jobs[0].client.architecture, jobs[0].variant)
        names = list(own_tensors(template))
        works: list[ClientWork] = []
        weights: list[Tensors] = []
        with copy_once():  # of what all are sent
            for job in jobs:
                work = ClientWork(job, self.setup.method, model_factory)
                work.receive()
                works.append(work)
                held = model_factory.state(job.client.architecture, job.variant)
                with torch.no_grad():
                    weights.append({name: held[name].clone() for name in names})
            contexts = contexts_on([work.client.context for work in works], model_factory.device)
        for work, context in zip(works, contexts, strict=True):
            work.client.context = context
        return works, weights

    def _trained(self, works: Sequence[ClientWork], tensors: Tensors, phases: Sequence[Phase]) -> Iterator[JobResult]:
        """Train as one, the networks' tensors in place, then upload one after the other."""
        job = works[0].job
        architecture, variant, label = job.client.architecture, job.variant, self._label(job)
        model_factory = self.setup.model_factory
        template = model_factory.module(architecture, variant)
        clients = [work.client for work in works]
        numbers = [client.id for client in clients]
        seed_global_rng(derive_seed(clients[0].seed, "layers", job.exchange.name, job.round, *numbers))
        try:
            if label not in self._losses:
                self._losses[label] = StackedLoss(self.setup.method, without_values(template.train()))
            trained = StackedClients(clients, tensors, self._losses[label], template, label, self._fills).train(phases)
        except (NotVectorizable, torch.OutOfMemoryError):
            raise
        except Exception as error:  # also one of the method's own, which shows when the client trains alone
            raise NotVectorizable(f"its training cannot be vectorized ({kind_and_line(error)})") from error
        if dropout_layers(template):
            self._say_once(f"{architecture}: dropout draws other masks for clients trained as one than for each alone")
        for place, work in enumerate(works):
            own = {name: tensor[place] for name, tensor in tensors.items()}
            work.client.bound = train_mode(model_factory.load(architecture, variant, own))
            work.trained = trained[place]
            work.seed_layers()
            yield work.finish(self.setup.store)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.setup.say(f"{self.setup.method.name}: {text}")
