"""Clients of several runs in one stack, where a step of theirs is the same function; `lockstep` brings them together.

A run's records are those of the run alone, up to rounding. What fails as one is done again run by run, so that an error
is that of the run in which it arises.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.method import NotVectorizable
from polyfed.core.randomness import keep_global_rng
from polyfed.core.settings import Training
from polyfed.engine.executors.jobs import JobResult
from polyfed.engine.executors.lockstep import Answer, take_turns
from polyfed.engine.executors.stack_parts import attributes
from polyfed.engine.executors.vectorized import Member, Stacks, VectorizedExecutor
from polyfed.engine.method_wrappers import step_of
from polyfed.functional.modes import dropout_layers

# settings that may differ within a stack: rates are each client's own, and the others are read outside of steps
_OF_EACH = {"lr", "lr_schedule", "lr_gamma", "warmup_rounds", "rounds", "client_fraction", "client_weights"}


def run_together(runs: Sequence[Callable[[], None]], size: int, device: torch.device) -> None:
    """Run several runs side by side; each is a function that makes a federation and runs it.

    Args:
        size: of a stack, at most, with the clients of all runs. device: of all.

    Raises:
        BaseException: the first that one of the runs has raised, or Ctrl-C; all of them have ended then.
    """
    take_turns(runs, SharedStacks(size, device).answers, _is_quick)


def settings_of_steps(training: Training) -> dict[str, object]:
    """The settings of local training that are equal in a stack."""
    return training.model_dump(exclude=_OF_EACH)


def _is_quick(members: Sequence[Member]) -> bool:
    return not any(member.job.exchange.trains for member in members)


class SharedStacks(Stacks):
    """Jobs of several runs in stacks; see `Stacks`."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size, device)
        self._kinds: list[object] = []
        self._forms: list[object] = []
        self._places: dict[Hashable, int] = {}  # in the first list, of the exchanges that are asked for now
        self._places_of: weakref.WeakKeyDictionary[VectorizedExecutor, dict[Hashable, int]]  # of each run's networks
        self._places_of = weakref.WeakKeyDictionary()
        self._apart: set[Hashable] = set()  # kinds of which each run has stacks of its own

    def answers(self, asked: Sequence[Sequence[Member]]) -> list[Answer]:
        """Carry out what several runs ask for, each the jobs of an exchange; time is shared by jobs."""
        members = [member for own in asked for member in own]
        outcomes: dict[Member, JobResult | Exception] = {}
        spent: dict[Member, tuple[float, float]] = {}
        with keep_global_rng():
            for wave in self.waves(members):
                groups = [[members[place] for place in places] for places in wave]
                whole = [member for some in groups for member in some]
                began = time.perf_counter()
                used = time.process_time()
                for some, ready in zip(groups, self.side_by_side(groups), strict=True):
                    outcomes |= zip(some, ready or self._carried_out(some), strict=True)
                share = ((time.perf_counter() - began) / len(whole), (time.process_time() - used) / len(whole))
                spent |= dict.fromkeys(whole, share)
        self._places.clear()  # which names runs that may be over by the next time
        answers = []
        for own in asked:
            found = [outcomes[member] for member in own]
            error = next((outcome for outcome in found if isinstance(outcome, Exception)), None)
            answers.append(Answer(error or found, *(sum(spent[member][kind] for member in own) for kind in (0, 1))))
        return answers

    def kind(self, member: Member) -> tuple[Hashable, ...]:
        """See `Stacks`; with what else must be equal where two come from different runs."""
        job = member.job
        key = (member.executor, job.client.architecture, job.variant, id(job.exchange))
        if key not in self._places:
            self._places[key] = _place_in(self._kinds, self._what_is_equal(member))
        return (*super().kind(member), self._places[key])

    def may_be_beside(self, members: Sequence[Member]) -> bool:
        """See `Stacks`."""
        return self.kind(members[0]) not in self._apart and super().may_be_beside(members)

    def _what_is_equal(self, member: Member) -> tuple[object, ...]:
        job = member.job
        context = member.context
        training = job.client.training
        phases = context.method.phases(training) if job.exchange.phases is None else job.exchange.phases
        network = context.model_factory.module(job.client.architecture, job.variant)
        # masks of dropout would be others than those of the run alone, and others again where it goes on
        apart = weakref.ref(member.executor) if dropout_layers(network) else None
        return (
            step_of(context.method),
            list(phases) if job.exchange.trains else None,
            settings_of_steps(training),
            bool(job.client.privacy.max_grad_norm),
            context.model_factory.precision,
            context.model_factory.device,
            self._place_of(network, member),
            apart,
        )

    def _place_of(self, network: nn.Module, member: Member) -> int:
        """Where the form of a client's network stands in the list."""
        known = self._places_of.setdefault(member.executor, {})
        key = (member.job.client.architecture, member.job.variant)
        if key not in known:
            known[key] = _place_in(self._forms, _form_of(network))
        return known[key]

    def _carried_out(self, members: Sequence[Member]) -> list[JobResult | Exception]:
        """The outcomes of jobs that are alike; errors where a run's jobs could not be done."""
        runs = list(dict.fromkeys(member.executor for member in members))
        together = self._of_several(members) if len(runs) > 1 else None
        if together is not None:
            return [*together]
        found: dict[Member, JobResult | Exception] = {}
        for run in runs:
            own = [member for member in members if member.executor is run]
            try:
                found |= zip(own, self.outcomes(own), strict=True)
            except Exception as error:
                found |= dict.fromkeys(own, error)
        return [found[member] for member in members]

    def _of_several(self, members: Sequence[Member]) -> list[JobResult] | None:
        """The results of jobs of several runs as one; None where each run's are to be done by themselves."""
        first = members[0]
        kind = self.kind(first)
        if len(members) < self.least(first) or kind in self._apart or first.job.client.training.keep_optimizer_state:
            return None
        try:
            return self.stacked(members)
        except NotVectorizable:  # as each run then says
            self._apart.add(kind)
        except torch.OutOfMemoryError:
            self._apart.add(kind)
            first.executor.say_once(
                f"the device's memory ran out with {len(members)} clients of several runs as one; from now on each run "
                f"has stacks of its own; with run.workers below {len(members)} they would stay together"
            )
        except Exception:  # shows again in the run that it is of
            return None
        return None


def _place_in(known: list[Any], value: object) -> int:
    """Where a value stands in a list, at the end of which it is put if it is new."""
    if value not in known:
        known.append(value)
    return known.index(value)


def _form_of(network: nn.Module) -> tuple[object, ...]:
    """What is equal for networks that were made by the same function and compute the same from the same weights."""
    weights = network.state_dict().keys()
    named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    tensors = [(name, t.shape, t.dtype, t.requires_grad) for name, t in named.items()]
    fixed = {name: t.tolist() for name, t in named.items() if name not in weights}
    layers = [
        (type(each), {name: _plain(value) for name, value in attributes(each).items()}) for each in network.modules()
    ]
    return str(network), tensors, fixed, layers


def _plain(value: object) -> object:
    """A value that can be compared, else its type."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str | None) else type(value)
