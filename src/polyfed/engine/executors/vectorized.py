"""Clients of one network trained together, as one stack: for a GPU, where one client's steps are too small to fill it.

What comes of it is what `Serial` gives, up to rounding and the masks of dropout, and the same bits again whenever the
same clients train in the same stacks. What cannot be stacked is done as `Serial` does it, and one line says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch

from polyfed.core.client import Client
from polyfed.core.method import NotVectorizable, Phase
from polyfed.core.randomness import derive_seed, seeded_global_rng
from polyfed.data.samples import LabeledSamples
from polyfed.engine.executors.base import Serial, WorkerContext
from polyfed.engine.executors.client_work import ClientWork, client_weights, fetch, run_job
from polyfed.engine.executors.jobs import EvalJob, JobResult, Scores, TrainJob, placed
from polyfed.engine.executors.stack_parts import (
    SignatureCache,
    Tensors,
    attributes_kept,
    numbers_and_nonfinite,
    own_tensors,
    put_row,
    weights_on,
)
from polyfed.engine.executors.stacked_clients import StackedClients
from polyfed.engine.executors.stacked_scoring import can_score_together, score_together
from polyfed.engine.local_training import phase_data
from polyfed.errors import RunError
from polyfed.functional.device_copies import copy_once
from polyfed.functional.modes import dropout_layers

SIZE = 32  # clients in a stack, unless told; their weights, gradients and activations are in memory at the same time
_WORTH = 4  # clients in a stack on a GPU, at least: launching its step takes longer than that of a single client


def clients_per_batch(executor: str, device: str, workers: int | None) -> int:
    """How many clients train as one under these settings of a run, at most; 1: they train one by one."""
    stacks = executor == "vectorized" or (executor == "auto" and device.partition(":")[0] != "cpu")
    return (workers or SIZE) if stacks else 1


class VectorizedExecutor:
    """Stacks of clients of one architecture and variant, as far as the method lets one.

    Args:
        context: what is worked on. size: of a stack, at most; one of fewer than 4 is not worth it on a GPU, unless
            the size is smaller. say: told what is not stacked, and why.
    """

    workers = 1

    def __init__(self, context: WorkerContext, size: int, say: Callable[[str], None]) -> None:
        self._context = context
        self._size = size
        self._least = 2 if context.model_factory.device.type == "cpu" else min(_WORTH, size)
        self._say = say
        self._serial = Serial(context.method, context.model_factory, context.store, context.from_scores)
        self._known = SignatureCache()
        self._said: set[str] = set()
        self._scored_alone: set[str] = set()  # networks whose outputs cannot be vectorized

    def run(self, jobs: Sequence[TrainJob], done: Callable[[int], None]) -> list[JobResult]:
        """See `Executor`."""
        found: dict[int, JobResult] = {}
        for places in self._stacks(jobs):
            members = [jobs[place] for place in places]
            for place, outcome in zip(places, self._together(members), strict=True):
                found[place] = outcome
                done(len(found))
        return [found[place] for place in range(len(jobs))]

    def score(self, asked: Sequence[EvalJob]) -> list[Scores]:
        """See `Executor`; clients of one network together."""
        found: dict[int, Scores] = {}
        for places in self._scored_together(asked):
            some = [asked[place] for place in places]
            try:
                found |= dict(zip(places, score_together(some, self._context), strict=True))
            except NotVectorizable:  # as its training, of which a line says so
                self._scored_alone.add(some[0].client.architecture)
        alone = [place for place in range(len(asked)) if place not in found]
        found |= dict(zip(alone, self._serial.score([asked[place] for place in alone]), strict=True))
        return [found[place] for place in range(len(asked))]

    def close(self) -> None:
        """See `Executor`."""

    def _stacks(self, jobs: Sequence[TrainJob]) -> Iterator[list[int]]:
        """The places of those who may train together: of one network and one kind of data, of similar size."""
        kinds: dict[Hashable, list[int]] = {}
        prepares: list[object] = []
        for place, job in enumerate(jobs):
            key = _kind(job.client, job.variant, [job.client.data.train], prepares)
            kinds.setdefault(key, []).append(place)
        for places in kinds.values():
            places.sort(key=lambda place: -len(jobs[place].client.data.train))
            for first in range(0, len(places), self._size):
                yield sorted(places[first : first + self._size])

    def _scored_together(self, asked: Sequence[EvalJob]) -> Iterator[list[int]]:
        """The places of those who may be scored together; who is in none is scored alone."""
        kinds: dict[Hashable, list[int]] = {}
        prepares: list[object] = []
        for place, each in enumerate(asked):
            client = each.client
            if client.architecture in self._scored_alone or not can_score_together(each):
                continue
            samples = [getattr(client.data, part) for part in each.parts]
            key = (*each.parts, _kind(client, each.variant, samples, prepares))
            kinds.setdefault(key, []).append(place)
        for places in kinds.values():
            for first in range(0, len(places), self._size):
                if len(places[first : first + self._size]) >= self._least:
                    yield places[first : first + self._size]

    def _together(self, jobs: Sequence[TrainJob]) -> Iterator[JobResult]:
        """What came of jobs of one kind."""
        first = jobs[0]
        kind = (first.client.architecture, first.variant, first.exchange.name)
        if first.client.training.keep_optimizer_state:
            self._say_once("clients train one after the other: each has an optimizer of its own to go on with")
        elif len(jobs) >= self._least:
            try:
                yield from self._stacked(jobs, kind)
                return
            except NotVectorizable as reason:
                self._say_once(f"clients train one after the other; {first.client.architecture}: {reason}")
            except torch.OutOfMemoryError as error:
                raise RunError(
                    f"{first.client.title} ({first.client.architecture}), round {first.round}, training: the "
                    f"device's memory ran out with {len(jobs)} clients as one; set run.workers below {len(jobs)}"
                ) from error
        for job in jobs:
            fresh = functools.partial(self._context.store.allocate, job.client.architecture, job.variant)
            yield run_job(job, self._context.method, self._context.model_factory, fresh)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(f"{self._context.method.name}: {text}")

    def _stacked(self, jobs: Sequence[TrainJob], kind: Hashable) -> list[JobResult]:
        """Receive one after the other, train as one, upload one after the other; all uploads leave the device as one.

        In an exchange without training the networks are only looked through for NaN as one.

        Raises:
            NotVectorizable: they cannot train as one.
        """
        method = self._context.method
        model_factory = self._context.model_factory
        store = self._context.store
        network, variant = jobs[0].client.architecture, jobs[0].variant
        template = model_factory.module(network, variant)
        trains = jobs[0].exchange.trains
        if trains and jobs[0].client.privacy.max_grad_norm:
            raise NotVectorizable("gradients are bounded row by row")
        before = [client_weights(job.client, variant, model_factory) for job in jobs]
        works: list[ClientWork] = []
        stacked: Tensors = {}
        with copy_once():  # of what all are sent
            loaded = weights_on(before, model_factory.device)
            for place, job in enumerate(jobs):
                work = ClientWork(job, method, model_factory, before[place], loaded[place])
                with work.own_layers():
                    work.receive()
                works.append(work)
                put_row(stacked, place, len(jobs), own_tensors(template))
        if trains:
            nonfinite = self._train(works, stacked, kind)
            if dropout_layers(template):
                self._say_once(f"{network}: dropout draws other masks for clients trained as one than for each alone")
        else:
            _, nonfinite = numbers_and_nonfinite([], stacked)
        for place, work in enumerate(works):
            own = {name: tensor[place] for name, tensor in stacked.items()}
            work.client.bound = model_factory.load(network, variant, own).train()
            with work.own_layers():
                work.make_upload(lambda _, place=place: nonfinite[place])  # type: ignore[misc]
                with work.stage("uploading"):
                    work.keep_copies()
        outcomes = []
        with copy_once():
            leaving = [work.leaving() for work in works]
            if not store.on_device:
                leaving += [list(work.after.values()) for work in works]
            fetch(tensor for tensors in leaving for tensor in tensors)
            for work in works:
                if work.client.plugins:  # which see the client at work
                    model_factory.load(network, variant, work.after)
                with work.own_layers():
                    outcomes.append(work.finish(functools.partial(store.allocate, network, variant)))
        return outcomes

    def _train(self, works: Sequence[ClientWork], stacked: Tensors, kind: Hashable) -> list[str | None]:
        """Train as one, the networks' tensors (K, ...) in place; the first that is not finite, client by client.

        Raises:
            NotVectorizable: they cannot train as one.
            RunError: the method failed.
        """
        method, model_factory = self._context.method, self._context.model_factory
        job, clients = works[0].job, [work.client for work in works]
        phases = method.phases(clients[0].training) if job.exchange.phases is None else job.exchange.phases
        template = model_factory.module(job.client.architecture, job.variant)
        numbers = [client.id for client in clients]
        seed = derive_seed(clients[0].seed, "layers", job.exchange.name, job.round, *numbers)  # layers draw as one
        try:
            _check_data(clients, phases)
            stack = StackedClients(clients, stacked, method, template, self._known, kind, model_factory.training)
            with seeded_global_rng(seed), attributes_kept(template):
                trained, nonfinite = stack.train(phases)
        except (NotVectorizable, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise placed(error, clients[0], f"training (with {len(clients) - 1} others)", job.round) from error
        for work, one in zip(works, trained, strict=True):
            work.trained = one
        return nonfinite


def _kind(client: Client, variant: str, samples: Sequence[LabeledSamples], prepares: list[object]) -> Hashable:
    """What clients who work together have in common: network and kind of inputs. prepares: those seen before; grows."""
    if client.prepare not in prepares:
        prepares.append(client.prepare)
    inputs = tuple((own.x.shape[1:], own.x.dtype) for own in samples)
    return client.architecture, variant, prepares.index(client.prepare), inputs


def _check_data(clients: Sequence[Client], phases: Sequence[Phase]) -> None:
    """Whether what each phase trains on can lie in one tensor, and is prepared alike.

    Raises:
        NotVectorizable: it cannot.
    """
    for phase in phases:
        pairs = [pair for pair in (phase_data(client, phase) for client in clients) if len(pair[0])]
        kinds = {(samples.x.shape[1:], samples.x.dtype) for samples, _ in pairs}
        if len(kinds) > 1 or any(prepare != pairs[0][1] for _, prepare in pairs):
            raise NotVectorizable(f"inputs of phase '{phase.name or 'training'}' differ in shape or preparation")
