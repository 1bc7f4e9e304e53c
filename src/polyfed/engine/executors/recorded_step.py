"""Steps of a stack that a GPU replays: what they read and write stays where it is, and a graph repeats the rest.

A step of small networks is some hundred kernels of a few microseconds each, which take longer to be launched than to
run. A CUDA graph launches them as one. It knows addresses and no values: whatever changes from step to step, or from
round to round, must lie in tensors that it was captured with.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.engine.executors.stack_data import StackState
from polyfed.engine.operation_counter import Uncompiled
from polyfed.errors import kind_and_line
from polyfed.functional.modes import dropout_layers

RECORDS = True  # benchmarks switch it off, to tell what recorded steps are worth
_CLOSE = 0.05  # of the largest change: how far a replay may be off when it is tried
_WARM_UPS = 2  # steps before the last one that is launched, in which libraries choose kernels and allocate
_MOST_CAPTURES = 48  # of a network and exchange, before it is asked whether each was worth it
_WORTH = 8  # replays of a graph, at least: recording it takes several launched steps
_MOST_STATES = 64  # that are remembered, each with its clients' weights and data

Step = Callable[[Sequence[Tensor]], None]  # takes what was drawn for it


@dataclass(frozen=True)
class _Recording:
    """A step as a graph. drawn: where it finds what was drawn for it. keeps: what must live as long."""

    graph: Any
    drawn: Sequence[Tensor]
    keeps: object


class Recordings:
    """What is remembered for all stacks of a run, the oldest of too many apart.

    Attributes:
        refused: why steps are launched, by network and exchange.
    """

    def __init__(self) -> None:
        self.refused: dict[Hashable, str] = {}
        self._states: dict[tuple[Hashable, Hashable], StackState] = {}
        self._captures: Counter[Hashable] = Counter()  # by label
        self._replays: Counter[Hashable] = Counter()
        self._pool: Any = None

    def worthwhile(self, label: Hashable, network: nn.Module) -> bool:
        """Whether steps are recorded; those of dropout layers are not, as a graph has the states of no generator."""
        on_gpu = any(parameter.is_cuda for parameter in network.parameters())
        return RECORDS and on_gpu and label not in self.refused and not dropout_layers(network)

    def forget(self, label: Hashable) -> bool:
        """Give back all memory, and launch the label's steps from now on; whether there was anything to give back."""
        had = bool(self._states)
        self._states.clear()
        self.refused[label] = "memory ran out"
        return had

    def state(self, label: Hashable, place: Hashable, new: StackState) -> StackState:
        """One of a phase that stays where it is, round after round, with the values of a new one of these shapes."""
        shapes = ((kind, name, t.shape, t.dtype) for kind, group in new.values.items() for name, t in group.items())
        key = (label, (place, tuple(new.trained), *shapes))
        state = self._states.pop(key, new)
        if state is not new:
            for kind, group in state.values.items():
                _copy(list(group.values()), [new.values[kind][name] for name in group])
            state.rate.copy_(new.rate)
            state.clear()
        if len(self._states) >= _MOST_STATES:
            del self._states[next(iter(self._states))]
        self._states[key] = state
        return state

    def replay(
        self,
        label: Hashable,
        state: StackState,
        key: Hashable,
        number: int,
        drawn: Sequence[Tensor],
        step: Step,
        keeps: object,
    ) -> bool:
        """Take a step by its graph, which is made when the step comes up for the second time.

        Args:
            key: equal for steps that differ in nothing but what lies in the state and in `drawn`. number: of the step.
            drawn: what was drawn for it.
            keeps: what the step looks into beside the state, which must live as long as the graph.

        Returns:
            Whether it was taken; otherwise it is to be launched.
        """
        recording = state.graphs.get(key)
        if recording is None:
            if key not in state.graphs:
                state.graphs[key] = None
                return False
            try:
                if self._captures[label] >= _MOST_CAPTURES and self._replays[label] < _WORTH * self._captures[label]:
                    raise RuntimeError("its steps are of too many kinds")
                self._captures[label] += 1
                recording = state.graphs[key] = self._recorded(state, number, drawn, step, keeps)
            except Exception as error:
                self.refused[label] = kind_and_line(error)
                self._states = {key: state for key, state in self._states.items() if key[0] != label}
                return False
        _copy(recording.drawn, drawn)
        state.number.fill_(number)
        recording.graph.replay()
        self._replays[label] += 1
        return True

    def _recorded(
        self, state: StackState, number: int, drawn: Sequence[Tensor], step: Step, keeps: object
    ) -> _Recording:
        """The step as a graph, which does what the step does when it is launched; the state is as before."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        drawn = [tensor.clone() for tensor in drawn]
        state.number.fill_(number)
        written = state.written()
        before = [tensor.detach().clone() for tensor in written]
        device = state.number.device
        current = torch.cuda.current_stream(device)
        stream = torch.cuda.Stream(device)
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(current)
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream):  # a capture waits for the present device
                for _ in range(_WARM_UPS):
                    step(drawn)
                    _copy(written, before)
                with _waits_are_errors(), _CopiesAreErrors():  # type: ignore[no-untyped-call]
                    step(drawn)  # before a capture, which leaves things behind where it breaks off
                launched = [tensor.detach().clone() for tensor in written]
                _copy(written, before)
                with torch.cuda.graph(graph, pool=self._pool, stream=stream):  # nothing is computed
                    step(drawn)
                graph.replay()
            count = len(state.tensors)
            parts = (slice(count), slice(count, count + len(state.optimizer.tensors())))
            current.wait_stream(stream)
            if not all(_is_same_step(written[part], launched[part], before[part]) for part in parts):
                raise RuntimeError("replayed, its step gives other numbers than launched")
        finally:
            torch.cuda.set_stream(current)  # where a capture that failed has left another one
            current.wait_stream(stream)
            _copy(written, before)
        return _Recording(graph, drawn, keeps)


@contextlib.contextmanager
def _waits_are_errors() -> Iterator[None]:
    """Within the block nobody may wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # PyTorch calls it a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class _CopiesAreErrors(Uncompiled):
    """Within the block nothing is copied from or to the device: a graph has no values, only where they were."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        kinds = {value.device.type for value in (*args, made) if isinstance(value, Tensor)}
        if "copy" in func._schema.name and len(kinds) > 1:
            raise RuntimeError("a step that is recorded copies nothing from or to the GPU")
        return made


def _is_same_step(found: Sequence[Tensor], expected: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Whether tensors changed as expected, up to what kernels round differently from one call to the next."""
    pairs = [
        ((new.detach() - old).float(), (launched - old).float())
        for new, launched, old in zip(found, expected, before, strict=True)
        if old.is_floating_point() and old.numel()
    ]
    most = _CLOSE * max((float(change.abs().nan_to_num(0.0, 0.0).amax()) for _, change in pairs), default=0.0)
    return all(torch.allclose(one, other, rtol=0.0, atol=most, equal_nan=True) for one, other in pairs)


def _copy(places: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    if places:
        torch._foreach_copy_([place.detach() for place in places], [tensor.detach() for tensor in tensors])
