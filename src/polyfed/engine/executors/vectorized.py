"""Clients of one network trained together, as one stack: for a GPU, where one client's steps are too small to fill it.

The result is that of `Serial`, up to rounding and the masks of dropout, and on a CPU the same bits again whenever the
same clients train in the same stacks. What cannot be stacked is done as `Serial` does it, and one line says so.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from polyfed.core.client import Client
from polyfed.core.message import freeze
from polyfed.core.method import NotVectorizable, Phase
from polyfed.core.randomness import derive_seed, keep_global_rng, seed_global_rng
from polyfed.engine.executors.client_work import (
    ClientWork,
    Serial,
    WorkerContext,
    client_weights,
    fetch,
    part_of,
    run_job,
    score_in_batches,
    working_copy,
)
from polyfed.engine.executors.jobs import EvalBatch, EvalJob, JobResult, Scores, TrainJob, placed
from polyfed.engine.executors.stack_parts import (
    SignatureCache,
    attributes_kept,
    numbers_and_nonfinite,
    own_tensors,
    put_row,
    weights_on,
)
from polyfed.engine.executors.stacked_clients import StackedClients
from polyfed.engine.executors.stacked_loss import Tensors
from polyfed.engine.local_training import contexts_on, phase_data
from polyfed.engine.plugin import Plugin, reads_uploads
from polyfed.engine.scoring import Outputs, evaluate_model, in_main_memory, predictions, states_on
from polyfed.errors import RunError
from polyfed.functional.device_copies import copy_once
from polyfed.functional.modes import dropout_layers, train_mode
from polyfed.profiling import timed

SIZE = 32  # clients in a stack by default; their weights, gradients and activations are in memory at the same time
_OVER = object()
WORTH = 4  # clients in a stack on a GPU, at least, where its step is launched: longer than that of a single client


def clients_per_batch(executor: str, device: str, workers: int | None) -> int:
    """How many clients train as one under these settings of a run, at most; 1: they train one by one."""
    on_gpu = device.partition(":")[0] != "cpu"
    if executor == "ray":  # whose workers are processes
        return SIZE if on_gpu else 1
    return (workers or SIZE) if executor == "vectorized" or (executor == "auto" and on_gpu) else 1


def alike(jobs: Sequence[TrainJob], size: int) -> Iterator[list[int]]:
    """The places of clients who may train together: of one network and one kind of data, of similar size.

    Args:
        size: how many there are together, at most.
    """
    kinds: dict[Hashable, list[int]] = {}
    prepares: list[object] = []
    for place, job in enumerate(jobs):
        client, own = job.client, job.client.data.train
        if client.prepare not in prepares:
            prepares.append(client.prepare)
        key = (_kind(job), prepares.index(client.prepare), own.x.shape[1:], own.x.dtype)
        kinds.setdefault(key, []).append(place)
    for places in kinds.values():
        places.sort(key=lambda place: -len(jobs[place].client.data.train))
        for first in range(0, len(places), size):
            yield sorted(places[first : first + size])


def _kind(job: TrainJob) -> tuple[Hashable, ...]:
    """What is the same for those who may train together, and on which it depends whether they can."""
    return job.client.architecture, job.variant, job.exchange.name


@dataclass
class _Stack:
    """Clients on their way. tensors: their networks', (K, ...) by name. nonfinite: the first of each that is not."""

    works: Sequence[ClientWork]
    tensors: Tensors
    nonfinite: Sequence[str | None] = ()


class VectorizedExecutor:
    """Stacks of clients of one architecture and variant, as far as the method lets one.

    Args:
        context: what is worked on. size: of a stack, at most; one of fewer than 4 is not worth it on a GPU where its
            steps cannot be recorded, unless the size is smaller. say: is given what is not stacked, and why.
    """

    workers = 1

    def __init__(self, context: WorkerContext, size: int, say: Callable[[str], None]) -> None:
        self.context = context
        self._size = size
        self._on_gpu = context.model_factory.device.type != "cpu"
        self._say = say
        self._serial = Serial(context)
        self._said: set[str] = set()
        self._known = SignatureCache()
        self._by_themselves: set[Hashable] = set()  # kinds that have failed beside others

    def run(self, jobs: Sequence[TrainJob], done: Callable[[int], None]) -> list[JobResult]:
        found: dict[int, JobResult] = {}
        with keep_global_rng():
            for wave in self._waves(jobs):
                groups = [[jobs[place] for place in places] for places in wave]
                for places, group, ready in zip(wave, groups, self._side_by_side(groups), strict=True):
                    for place, outcome in zip(places, ready or self._outcomes(group), strict=True):
                        found[place] = outcome
                        done(len(found))
        return [found[place] for place in range(len(jobs))]

    def score(self, asked: Sequence[EvalJob]) -> list[Scores]:
        """See `Executor`; what clients predict for rows of their own reaches main memory together."""
        return score_in_batches(asked, self.context, self._score_batches)

    def _score_batches(self, batches: Sequence[EvalBatch]) -> list[list[Scores]]:
        alone = [place for place, batch in enumerate(batches) if len(batch.jobs) == 1 and not batch.jobs[0].shared]
        found: dict[int, list[Scores]] = {}
        for first in range(0, len(alone), self._size):
            places = alone[first : first + self._size]
            scores = self._scored([batches[place].jobs[0] for place in places])
            found |= {place: [one] for place, one in zip(places, scores, strict=True)}
        others = [place for place in range(len(batches)) if place not in found]
        found |= zip(others, self._serial.score_batches([batches[place] for place in others]), strict=True)
        return [found[place] for place in range(len(batches))]

    def close(self) -> None:
        """See `Executor`."""

    @timed("score")
    def _scored(self, asked: Sequence[EvalJob]) -> list[Scores]:
        """The scores of clients who receive and predict one after the other."""
        method = self.context.method
        model_factory = self.context.model_factory
        figures = self.context.figures
        before = [client_weights(each.client, each.variant, model_factory) for each in asked]
        clients: list[Client] = []
        parts = [[part_of(each.client, part) for part in each.parts] for each in asked]
        found: list[Outputs] = []
        with copy_once():  # of what all are sent
            loaded = weights_on(before, model_factory.device)
            kept = [each.client.state for each in asked if each.message is not None]
            contexts_on(kept, model_factory.device)  # where `receive` then finds what it moves there
            predictors = [method, *method.alternative_predictors.values()]
            states_on([each.client.state for each in asked], predictors, model_factory.device)
            for place, each in enumerate(asked):
                client = working_copy(each.client, each.variant, model_factory, loaded[place])
                client.round = each.round
                clients.append(client)
                try:
                    if each.message is not None:
                        method.receive(client, freeze(each.message))
                    found.append(predictions(client, method, parts[place], figures))
                except Exception as error:
                    raise placed(error, client, "scoring", each.round) from error
        return [
            dict(zip(each.parts, evaluate_model(client, method, own, figures, outputs=of_client), strict=True))
            for each, client, own, of_client in zip(asked, clients, parts, in_main_memory(found), strict=True)
        ]

    def _say_once(self, text: str) -> None:
        """Say what was not said before in this run."""
        if text not in self._said:
            self._said.add(text)
            self._say(f"{self.context.method.name}: {text}")

    def _network(self, job: TrainJob) -> nn.Module:
        return self.context.model_factory.module(job.client.architecture, job.variant)

    def _waves(self, jobs: Sequence[TrainJob]) -> Iterator[list[list[int]]]:
        """Stacks, as places; several at once where the steps of different networks may be replayed side by side."""
        wave: list[list[int]] = []
        known: set[Hashable] = set()  # kinds and networks of the wave
        for places in alike(jobs, self._size):
            group = [jobs[place] for place in places]
            own = {_kind(group[0]), self._network(group[0])}
            is_beside = self._may_be_beside(group[0])
            is_full = own & known or len(places) + sum(map(len, wave)) > self._size
            if wave and (is_full or not is_beside):
                yield wave
                wave = []
                known = set()
            if is_beside:
                wave.append(places)
                known |= own
            else:
                yield [places]
        if wave:
            yield wave

    def _may_be_beside(self, job: TrainJob) -> bool:
        """Whether a stack of such jobs may train while another one does."""
        kind = _kind(job)
        is_plain = not job.client.privacy.max_grad_norm
        is_recorded = self._known.recordings.worthwhile(kind, self._network(job))
        return is_plain and is_recorded and job.exchange.trains and kind not in self._by_themselves

    def _side_by_side(self, groups: Sequence[Sequence[TrainJob]]) -> list[list[JobResult] | None]:
        """The results of a wave, step by step in turn; None for those that are to be done alone, where errors show."""
        found: list[list[JobResult] | None] = [None] * len(groups)
        if len(groups) == 1:
            return found
        stacks: dict[int, _Stack] = {}
        for place, jobs in enumerate(groups):
            with contextlib.suppress(Exception):
                stacks[place] = self._received(jobs)
        turns = {place: self._training(stack) for place, stack in stacks.items()}
        while turns:
            for place, steps in list(turns.items()):
                try:
                    goes_on = _step(steps)
                except Exception:
                    del stacks[place]
                    goes_on = False
                if not goes_on:
                    del turns[place]
        for place, stack in stacks.items():
            with contextlib.suppress(Exception):
                found[place] = self._finished(stack)
        kinds = [_kind(jobs[0]) for jobs in groups]
        self._by_themselves |= {kind for kind, results in zip(kinds, found, strict=True) if results is None}
        return found

    def _least(self, job: TrainJob) -> int:
        """How many clients of this kind are worth a stack, at least."""
        if not self._on_gpu:
            return 2
        is_recorded = self._known.recordings.worthwhile(_kind(job), self._network(job))
        return 1 if is_recorded else min(WORTH, self._size)

    def _outcomes(self, jobs: Sequence[TrainJob]) -> Iterator[JobResult]:
        """The results of jobs that are alike."""
        first = jobs[0]
        if len(jobs) >= self._least(first):
            try:
                yield from self._stacked(jobs)
                return
            except NotVectorizable as reason:
                self._say_once(f"clients train one after the other; {first.client.architecture}: {reason}")
            except torch.OutOfMemoryError as error:
                raise RunError(
                    f"{first.client.title} ({first.client.architecture}), round {first.round}, training: the "
                    f"device's memory ran out with {len(jobs)} clients as one; set run.workers below {len(jobs)}"
                ) from error
        for job in jobs:
            fresh = functools.partial(self.context.store.allocate, job.client.architecture, job.variant)
            yield run_job(job, self.context.method, self.context.model_factory, fresh)

    def _stacked(self, jobs: Sequence[TrainJob]) -> list[JobResult]:
        """Receive one after the other, train as one, upload one after the other; all uploads leave the device as one.

        In an exchange without training the networks are only looked through for NaN as one.
        """
        recordings = self._known.recordings
        try:
            return self._carried_through(jobs)
        except torch.OutOfMemoryError:
            if not recordings.forget():
                raise
        torch.cuda.empty_cache()
        try:
            return self._carried_through(jobs)
        except torch.OutOfMemoryError:
            recordings.forget()  # as smaller stacks are to have the room
            raise

    def _carried_through(self, jobs: Sequence[TrainJob]) -> list[JobResult]:
        stack = self._received(jobs)
        steps = self._training(stack)
        while _step(steps):
            pass
        return self._finished(stack)

    def _received(self, jobs: Sequence[TrainJob]) -> _Stack:
        first = jobs[0]
        network, variant = first.client.architecture, first.variant
        if first.exchange.trains and first.client.privacy.max_grad_norm:
            raise NotVectorizable("gradients are bounded row by row")
        model_factory = self.context.model_factory
        before = [client_weights(job.client, variant, model_factory) for job in jobs]
        works: list[ClientWork] = []
        stacked: Tensors = {}
        names = list(own_tensors(model_factory.module(network, variant)))
        with copy_once():  # of what all are sent
            loaded = weights_on(before, model_factory.device)
            kept = [job.client.state for job in jobs if job.device.type != "cpu"]
            contexts_on(kept, model_factory.device)  # where `receive` then finds what it moves there
            for place, job in enumerate(jobs):
                work = ClientWork(job, self.context.method, model_factory, loaded[place])
                work.seed_layers()
                work.receive()
                works.append(work)
                held = model_factory.state(network, variant)
                put_row(stacked, place, len(jobs), {name: held[name] for name in names})
            contexts = contexts_on([work.client.context for work in works], model_factory.device)
        for work, context in zip(works, contexts, strict=True):
            work.client.context = context
        return _Stack(works, stacked)

    def _training(self, stack: _Stack) -> Iterator[None]:
        job = stack.works[0].job
        network = job.client.architecture
        if job.exchange.trains:
            yield from self._train(stack)
            if reason := self._known.recordings.refused.get(_kind(job)):
                self._say_once(f"{network}: steps are launched one by one, not recorded ({reason})")
            if dropout_layers(self._network(job)):
                self._say_once(f"{network}: dropout draws other masks for clients trained as one than for each alone")
        else:
            _, stack.nonfinite = numbers_and_nonfinite([], stack.tensors)

    def _finished(self, stack: _Stack) -> list[JobResult]:
        works = stack.works
        network, variant = works[0].job.client.architecture, works[0].job.variant
        store = self.context.store
        model_factory = self.context.model_factory
        fresh = functools.partial(store.allocate, network, variant)
        for place, work in enumerate(works):
            own = {name: tensor[place] for name, tensor in stack.tensors.items()}
            work.client.bound = train_mode(model_factory.load(network, variant, own))
            work.seed_layers()
            work.make_upload(functools.partial(stack.nonfinite.__getitem__, place))
            with work.stage("uploading"):
                work.keep_copies(fresh if store.on_device else None)
        outcomes = []
        plugins = works[0].client.plugins
        watched = any(not isinstance(one, Plugin) or reads_uploads(one) for one in plugins)
        with copy_once():
            leaving = [work.leaving() for work in works]
            if not store.on_device:
                leaving += [list(work.after.values()) for work in works]
            fetch(tensor for tensors in leaving for tensor in tensors)
            for work in works:
                if watched:  # by plugins, which see the client at work
                    model_factory.load(network, variant, work.after)
                    work.seed_layers()
                outcomes.append(work.finish(fresh))
        return outcomes

    def _train(self, stack: _Stack) -> Iterator[None]:
        """Train as one, the networks' tensors in place."""
        works = stack.works
        job = works[0].job
        method = self.context.method
        clients = [work.client for work in works]
        phases = method.phases(clients[0].training) if job.exchange.phases is None else job.exchange.phases
        template = self._network(job)
        numbers = [client.id for client in clients]
        seed = derive_seed(clients[0].seed, "layers", job.exchange.name, job.round, *numbers)  # layers draw as one
        try:
            _check_data(clients, phases)
            step = self.context.model_factory.training
            loop = StackedClients(clients, stack.tensors, method, template, self._known, _kind(job), step)
            seed_global_rng(seed)
            with attributes_kept(template):
                yield from loop.train(phases)
                trained, stack.nonfinite = loop.outcome()
        except (NotVectorizable, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise placed(error, clients[0], f"training (with {len(clients) - 1} others)", job.round) from error
        for work, one in zip(works, trained, strict=True):
            work.trained = one


@timed("train")
def _step(steps: Iterator[None]) -> bool:
    """Take the next one; whether there was one."""
    return next(steps, _OVER) is not _OVER


def _check_data(clients: Sequence[Client], phases: Sequence[Phase]) -> None:
    """Whether what each phase trains on can lie in one tensor, and is prepared alike."""
    for phase in phases:
        pairs = [pair for pair in (phase_data(client, phase) for client in clients) if len(pair[0])]
        kinds = {(samples.x.shape[1:], samples.x.dtype) for samples, _ in pairs}
        if len(kinds) > 1 or any(prepare != pairs[0][1] for _, prepare in pairs):
            raise NotVectorizable(f"inputs of phase '{phase.name or 'training'}' differ in shape or preparation")
