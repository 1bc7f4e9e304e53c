"""Clients of several runs in one stack, where a step of theirs is the same function; `lockstep` brings them together.

A run's records are those of the run alone, up to rounding. What fails as one is done again run by run, so that an error
is that of the run in which it arises.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
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
        self._places: dict[Hashable, int] = {}  # in this list, of the exchanges that are asked for now
        self._networks: list[nn.Module] = []
        self._places_of: weakref.WeakKeyDictionary[VectorizedExecutor, dict[Hashable, int]]  # of each run's networks
        self._places_of = weakref.WeakKeyDictionary()
        self._apart: set[Hashable] = set()  # kinds of which each run has stacks of its own

    def answers(self, asked: Sequence[Sequence[Member]]) -> list[Answer]:
        """Carry out what several runs ask for, each the jobs of an exchange; time is shared by jobs."""
        members = [member for own in asked for member in own]
        outcomes: dict[Member, JobResult] = {}
        errors: dict[VectorizedExecutor, Exception] = {}
        spent: dict[Member, tuple[float, float]] = {}
        with keep_global_rng():
            for places in self.alike(members):
                some = [members[place] for place in places if members[place].executor not in errors]
                began = time.perf_counter()
                used = time.process_time()
                for member, outcome in zip(some, self._carried_out(some), strict=True):
                    if isinstance(outcome, Exception):
                        errors[member.executor] = outcome
                    else:
                        outcomes[member] = outcome
                share = ((time.perf_counter() - began) / len(places), (time.process_time() - used) / len(places))
                spent |= dict.fromkeys(some, share)
        self._places.clear()  # which names runs that may be over by the next time
        return [_answer(own, outcomes, errors, spent) for own in asked]

    def kind(self, member: Member) -> tuple[Hashable, ...]:
        """See `Stacks`; with what else must be equal where two come from different runs."""
        job = member.job
        key = (member.executor, job.client.architecture, job.variant, id(job.exchange))
        if key not in self._places:
            self._places[key] = _place_in(self._kinds, self._what_is_equal(member))
        return (*super().kind(member), self._places[key])

    def _what_is_equal(self, member: Member) -> tuple[object, ...]:
        job = member.job
        context = member.context
        training = job.client.training
        phases = context.method.phases(training) if job.exchange.phases is None else job.exchange.phases
        network = self._network(member)
        # masks of dropout would be others than those of the run alone, and others again where it goes on
        has_masks = bool(dropout_layers(self._networks[network]))
        return (
            step_of(context.method),
            list(phases) if job.exchange.trains else None,
            settings_of_steps(training),
            bool(job.client.privacy.max_grad_norm),
            context.model_factory.precision,
            context.model_factory.device,
            network,
            weakref.ref(member.executor) if has_masks else None,
        )

    def _network(self, member: Member) -> int:
        """The place of the client's network among those that differ."""
        job = member.job
        known = self._places_of.setdefault(member.executor, {})
        key = (job.client.architecture, job.variant)
        if key not in known:
            network = member.context.model_factory.module(*key)
            same = [place for place, other in enumerate(self._networks) if _is_same_network(network, other)]
            if not same:
                self._networks.append(network)
            known[key] = same[0] if same else len(self._networks) - 1
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


def _answer(
    own: Sequence[Member],
    outcomes: Mapping[Member, JobResult],
    errors: Mapping[VectorizedExecutor, Exception],
    spent: Mapping[Member, tuple[float, float]],
) -> Answer:
    error = next((errors[member.executor] for member in own if member.executor in errors), None)
    shares = [spent[member] for member in own if member in spent]
    outcome = [outcomes[member] for member in own] if error is None else error
    return Answer(outcome, sum(seconds for seconds, _ in shares), sum(used for _, used in shares))


def _place_in(known: list[Any], value: object) -> int:
    """Where a value stands in a list, at the end of which it is put if it is new."""
    if value not in known:
        known.append(value)
    return known.index(value)


def _is_same_network(one: nn.Module, other: nn.Module) -> bool:
    """Whether two networks that were made by the same function compute the same from the same weights."""
    layers = list(one.modules())
    others = list(other.modules())
    return len(layers) == len(others) and str(one) == str(other) and all(map(_is_same_layer, layers, others))


def _is_same_layer(one: nn.Module, other: nn.Module) -> bool:
    kept = one.state_dict().keys()
    named = [{**dict(layer.named_parameters()), **dict(layer.named_buffers())} for layer in (one, other)]
    pairs = [(attributes(one), attributes(other)), (named[0], named[1])]
    if type(one) is not type(other) or any(mine.keys() != theirs.keys() for mine, theirs in pairs):
        return False
    return all(_is_equal(value, theirs[name], name in kept) for mine, theirs in pairs for name, value in mine.items())


def _is_equal(one: object, other: object, is_weight: bool) -> bool:
    """Whether two of a layer's values are; of weights only the form counts, of what is no plain value the type."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        form = (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)
        return form and (is_weight or torch.equal(one, other))
    if isinstance(one, bool | int | float | str | tuple | None):
        return one == other
    return type(one) is type(other)
