"""Steps of a stack that a GPU replays: what they read and write stays where it is, and a graph repeats the rest.

A step of small networks is some hundred kernels of a few microseconds each, which take longer to be launched than to
run. A CUDA graph launches them as one. It knows addresses and no values: whatever changes from step to step, or from
round to round, must lie in tensors that it was captured with.

Shapes: K clients, S steps of a phase.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polyfed.core.optimizers import Optimizer
from polyfed.core.settings import Training
from polyfed.engine.executors.stacked_loss import Tensors
from polyfed.engine.operation_counter import Uncompiled
from polyfed.functional.modes import dropout_layers

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
RECORDS = True  # benchmarks switch it off, to tell what recorded steps are worth
_CLOSE = 0.05  # of the largest change: how far a replay may be off when it is tried
_WARM_UPS = 3  # eager steps before a capture, in which libraries choose kernels and allocate, as PyTorch asks for
_MOST_GRAPHS = 24  # of a stack: kinds of steps, widths of batches, numbers of clients
_MOST_CAPTURES = 48  # of a stack, before it is asked whether each was worth it
_WORTH = 8  # replays of a graph, at least: recording it takes several launched steps
_MOST_STACKS = 64  # that are remembered, each with its clients' weights, and kinds of data


class FixedTensors:
    """Tensors that stay where they are, whatever values come.

    Attributes:
        version: another one whenever some had to move, as what came had another shape.
    """

    def __init__(self) -> None:
        self.version = 0
        self._held: dict[Hashable, list[Tensor]] = {}
        self._sources: dict[Hashable, Sequence[object]] = {}

    def hold(
        self, name: Hashable, tensors: Sequence[Tensor], sources: Sequence[object] = (), room: int | None = 0
    ) -> list[Tensor]:
        """These values where those of the last time lie; fewer rows go to the beginning.

        Args:
            sources: see `made_of`. room: for so many rows at least; None: exactly for these.
        """
        held = self._held.get(name, [])
        fits = _is_alike if room is None else _fits
        if len(held) != len(tensors) or not all(map(fits, tensors, held)):
            self.version += name in self._held
            held = self._held[name] = [_with_room(tensor.detach(), room or 0) for tensor in tensors]
        _copy([place[: len(t)] if t.dim() else place for place, t in zip(held, tensors, strict=True)], tensors)
        self._sources[name] = list(sources)
        return held

    def made_of(self, name: Hashable, sources: Sequence[object]) -> list[Tensor] | None:
        """What lies there, if it was made of the very same objects."""
        known = self._sources.get(name, ())
        same = len(known) == len(sources) and all(one is other for one, other in zip(known, sources, strict=True))
        return self._held[name] if known and same else None


@dataclass(frozen=True)
class Recording:
    """A step as a graph. sums: the names of what it sums. keeps: what must live as long, as the step looks into it."""

    graph: Any
    sums: frozenset[str]
    keeps: object


class Lane:
    """Where the graphs of one network run, one after the other: beside those of others, in memory of their own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()


class RecordedStack(FixedTensors):
    """What K clients of one kind have on the GPU for a phase, round after round, and their steps as graphs.

    Attributes:
        tensors, masks: the networks', (K, ...) by name. optimizer: of those that move.
        number: of the next step that is replayed, (1,). losses: of the steps so far, (S, K).
        sums: over the steps since they were last zeroed, (K, ...) by name.
    """

    tensors: Tensors
    masks: Tensors
    optimizer: Optimizer
    losses: Tensor

    def __init__(self, lane: Lane, device: torch.device) -> None:
        super().__init__()
        self.sums: Tensors = {}
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self._first = torch.zeros(1, dtype=torch.int64, device=device)  # of steps in a row
        self._rate = torch.zeros((), device=device)
        self._lane = lane
        self._moving: list[Tensor] = []  # of which the optimizer is
        self._at: int | None = None  # what `number` is, where that is known
        self._of_shapes: dict[Hashable, FixedTensors] = {}
        self._captures = self._replays = 0
        self._recordings: dict[Hashable, Recording | None] = {}

    def begin(
        self, tensors: Tensors, masks: Tensors, names: Sequence[str], training: Training, rate: float, steps: int
    ) -> None:
        """A phase of so many steps: weights come in, the optimizer forgets. names: of what moves."""
        held = self.hold("tensors", list(tensors.values()))
        self.tensors = dict(zip(tensors, held, strict=True))
        if held is not self._moving:
            self._moving = held
            self.optimizer = Optimizer([self.tensors[name] for name in names], training, self._rate)
        self.masks = dict(zip(masks, self.hold(("masks", *masks), list(masks.values())), strict=True))
        count = len(next(iter(tensors.values())))
        (self.losses,) = self.hold("losses", [self._rate.new_empty(steps, count)])
        self._rate.fill_(rate)
        self.optimizer.clear()
        self.clear_sums()
        self._at = None

    def clear_sums(self) -> None:
        if self.sums:
            torch._foreach_zero_(list(self.sums.values()))

    def hold_of_shape(self, name: Hashable, tensors: Sequence[Tensor], room: int | None = 0) -> list[Tensor]:
        """As `hold`, where those of other shapes stay, too: a step that reads them has their addresses in its key."""
        shapes = tuple((t.dtype, t.shape if room is None else t.shape[1:]) for t in tensors)
        place = _recent(self._of_shapes, (name, shapes), FixedTensors, _MOST_GRAPHS)
        return place.hold("", tensors, room=room)

    def of_step(self, drawn: Tensor) -> Tensor:
        """What was drawn for the step that is taken, of what was drawn for several in a row, (any, ...)."""
        return drawn.index_select(0, self.number - self._first).squeeze(0)

    def take_in(self, losses: Tensor, sums: Tensors) -> frozenset[str]:
        """Losses and sums of the first clients in a step that is being recorded; the names of the sums."""
        with torch.no_grad():
            count = len(losses)
            self.losses[:, :count].index_copy_(0, self.number, losses.to(self.losses.dtype).unsqueeze(0))
            for name, value in sums.items():
                if name not in self.sums or self.sums[name].shape[1:] != value.shape[1:]:
                    zeros = value.new_zeros(self.losses.shape[1], *value.shape[1:])
                    (self.sums[name],) = self.hold(("sums", name), [zeros])
                self.sums[name][:count].add_(value)
            self.number.add_(1)
        return frozenset(sums)

    def recording(
        self, key: Hashable, number: int, step: Callable[[], frozenset[str]], keeps: object
    ) -> Recording | None:
        """The step of this kind as a graph, once it comes up for the second time; None: it is to be launched.

        Args:
            key: equal for steps that differ in nothing but what lies in the tensors here. number: of the step.
            step: takes it, and returns the names of what it sums. keeps: what it looks into beside tensors here.

        Raises:
            RuntimeError: it cannot be recorded, or steps so far came up too seldom again.
        """
        key = (key, self.version)
        is_new = key not in self._recordings
        known = _recent(self._recordings, key, lambda: None, _MOST_GRAPHS)
        if known is None and not is_new:
            if self._captures >= _MOST_CAPTURES and self._replays < _WORTH * self._captures:
                raise RuntimeError("its steps are of too many kinds")
            self._captures += 1
            self._come_to(number)
            self._first.fill_(number)
            with torch.cuda.device(self.number.device):  # a capture waits for the present device
                known = self._recordings[key] = self._captured(step, keeps)
        return known

    def _captured(self, step: Callable[[], frozenset[str]], keeps: object) -> Recording:
        written = [*self.tensors.values(), *self.optimizer.tensors(), *self.sums.values(), self.losses, self.number]
        before = [tensor.detach().clone() for tensor in written]
        summed = set(self.sums)
        stream = self._lane.stream
        current = torch.cuda.current_stream(self.number.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS - 1):
                    step()
                    _copy(written, before)
                # before a capture, which leaves things behind where it breaks off
                with _waits_are_errors(), _CopiesAreErrors():  # type: ignore[no-untyped-call]
                    step()
                launched = [tensor.detach().clone() for tensor in written]
        finally:
            current.wait_stream(stream)
            self._take_back(written, before, summed)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._lane.pool, stream=stream):  # nothing is computed
                sums = step()
        except BaseException:
            torch.cuda.set_stream(current)  # where the capture has left another one
            raise
        try:
            is_same = self._replays_as(graph, written, launched, before)
        finally:
            self._take_back(written, before, summed)
        if not is_same:
            raise RuntimeError("replayed, its step gives other numbers than launched")
        return Recording(graph, sums, keeps)

    def _replays_as(
        self, graph: Any, written: Sequence[Tensor], launched: Sequence[Tensor], before: Sequence[Tensor]
    ) -> bool:
        """Whether a replay does to weights, and to what the optimizer remembers, what the launched step did."""
        current = torch.cuda.current_stream(self.number.device)
        self._lane.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._lane.stream):
                graph.replay()
        finally:
            current.wait_stream(self._lane.stream)
        count = len(self.tensors)
        parts = (slice(count), slice(count, count + len(self.optimizer.tensors())))
        return all(_is_same_step(written[part], launched[part], before[part]) for part in parts)

    def _take_back(self, written: Sequence[Tensor], before: Sequence[Tensor], summed: Collection[str]) -> None:
        """Undo a step that was taken to try it; sums of other names than before begin anew."""
        _copy(written, before)
        for name in self.sums.keys() - summed:
            self.sums[name].zero_()

    def _come_to(self, number: int) -> None:
        if self._at != number:
            self.number.fill_(number)
            self._at = number

    def replay(self, recording: Recording, first: int, count: int) -> Iterator[None]:
        """So many steps, of which `first` is the number of the first, one at a time, in a stream of their own.

        Other work that is asked for in between does not wait for them, nor they for it.
        """
        self._come_to(first)
        self._first.fill_(first)
        current = torch.cuda.current_stream(self.number.device)
        stream = self._lane.stream
        stream.wait_stream(current)
        try:
            for _ in range(count):
                with torch.cuda.stream(stream):
                    recording.graph.replay()
                self._replays += 1
                yield
        finally:
            current.wait_stream(stream)
        self._at = first + count


class Recordings:
    """What is remembered for all stacks of a run, the least recently used of too many apart."""

    def __init__(self) -> None:
        self.refused: dict[Hashable, str] = {}  # by network and exchange: why its steps are launched
        self._lanes: dict[Hashable, Lane] = {}
        self._data: dict[tuple[Hashable, Hashable], FixedTensors] = {}
        self._stacks: dict[tuple[Hashable, Hashable], RecordedStack] = {}

    def worthwhile(self, label: Hashable, network: nn.Module) -> bool:
        """Whether steps are recorded; those of dropout layers are not, as a graph has the states of no generator."""
        parameter = next(network.parameters(), None)
        on_gpu = parameter is not None and parameter.is_cuda
        return RECORDS and on_gpu and label not in self.refused and not dropout_layers(network)

    def refuse(self, label: Hashable, reason: str) -> None:
        """Have the label's steps launched from now on, and give back what was held for them."""
        self.refused[label] = reason
        self._stacks = {key: stack for key, stack in self._stacks.items() if key[0] != label}
        self._data = {key: data for key, data in self._data.items() if key[0] != label}

    def forget(self) -> bool:
        """Give back the memory; whether there was any."""
        had = bool(self._stacks)
        self._stacks.clear()
        self._data.clear()
        return had

    def data(self, label: Hashable, kind: Hashable) -> FixedTensors:
        """Where the label's samples of this kind lie."""
        return _recent(self._data, (label, kind), FixedTensors, _MOST_STACKS)

    def stack(self, label: Hashable, kind: Hashable, device: torch.device) -> RecordedStack:
        """That of the label's clients in a phase of this kind."""
        if label not in self._lanes:
            self._lanes[label] = Lane(device)
        make = functools.partial(RecordedStack, self._lanes[label], device)
        return _recent(self._stacks, (label, kind), make, _MOST_STACKS)


def _recent(known: dict[K, T], key: K, make: Callable[[], T], most: int) -> T:
    """What is known by the key, or made, as the one used last; of more than `most` the one used first is forgotten."""
    if key not in known and len(known) >= most:
        del known[next(iter(known))]
    known[key] = known.pop(key) if key in known else make()
    return known[key]


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
    changed, expected = (
        [(t.detach() - old).float() for t, old in zip(ts, before, strict=True) if t.is_floating_point()]
        for ts in (found, expected)
    )
    sizes = [change.abs().nan_to_num(0.0, 0.0).amax() for change in expected if change.numel()]
    most = _CLOSE * float(torch.stack(sizes).max()) if sizes else 0.0
    pairs = zip(changed, expected, strict=True)
    return all(torch.allclose(one, other, rtol=0.0, atol=most, equal_nan=True) for one, other in pairs)


def _is_alike(tensor: Tensor, place: Tensor) -> bool:
    return tensor.dtype == place.dtype and tensor.shape == place.shape


def _fits(tensor: Tensor, place: Tensor) -> bool:
    """Whether its rows have room there."""
    if not tensor.dim() or not place.dim():
        return _is_alike(tensor, place)
    return _is_alike(tensor[:0], place[:0]) and len(tensor) <= len(place)


def _with_room(tensor: Tensor, room: int) -> Tensor:
    """Memory for it; for more rows, if it has fewer."""
    more = tensor.dim() and len(tensor) < room
    return tensor.new_empty(room, *tensor.shape[1:]) if more else torch.empty_like(tensor)


def _copy(places: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    if places:
        torch._foreach_copy_([place.detach() for place in places], [tensor.detach() for tensor in tensors])
