"""CUDA graphs and streams for the simulated device, in place of PyTorch's.

A capture notes every operation below autograd and vmap with the tensors that it was handed, and leaves the memory as it
was, as a GPU computes nothing meanwhile. A replay does the operations again, on the same memory and with the same
numbers: what was looked up in Python while it was recorded stays what it was. A capture refuses what a GPU's refuses,
waiting for the device and copies from or to the host, and a replay reads no memory that was given up since.

Streams do nothing but see to it that those who begin wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ops: Any = torch.ops.simulated_gpu
uncounted = [0] * 6  # of what `ops.counts()` counts, in captures and replays
done = {"captures": 0, "replays": 0}


@contextmanager
def not_counting() -> Iterator[None]:
    """What is done within the block does not count as launched."""
    before = ops.counts()
    try:
        yield
    finally:
        for place, (after, begun) in enumerate(zip(ops.counts(), before, strict=True)):
            uncounted[place] += after - begun


class Stream:
    """A queue of work.

    Attributes:
        waits: it begins with what the others have done so far. idle: another one waits for all that it was given.
    """

    every: ClassVar[list[Stream]] = []

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.waits, self.idle = False, True
        self.device = device
        Stream.every.append(self)

    def wait_stream(self, other: Stream) -> None:
        """What comes now begins when all that `other` was given is done."""
        other.waits = False
        self.waits = other.idle = True


default = current = Stream()


def stream_of(device: Any = None) -> Stream:
    """The current stream."""
    return current


@contextmanager
def in_stream(stream: Stream) -> Iterator[None]:
    """Have work go there."""
    global current
    before, current = current, stream
    try:
        yield
    finally:
        current = before


def set_stream(stream: Stream) -> None:
    """Have all work go there from now on."""
    global current
    current = stream


def set_sync_debug_mode(mode: Any) -> None:
    """Have waits for the device be errors, or not."""
    ops.refuse_waits(mode == "error")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class CUDAGraph:
    """What was done within `graph`."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, Any, Any]] = []  # operation, arguments, and results to write into

    def replay(self) -> None:
        """Do it again."""
        stream = current
        assert stream is default or stream.waits, "a stream began without waiting for the one that filled its tensors"
        stream.idle = stream is default
        done["replays"] += 1
        with not_counting(), torch.no_grad():
            for operation, args, kwargs, results in self.steps:
                made = operation(*tree_map(_taken, args), **tree_map(_taken, kwargs))
                for result, one in zip(results, _tensors(made), strict=bool(results)):
                    result.copy_(one)


def _taken(value: Any) -> Any:
    return value() if isinstance(value, _Elsewhere) else value


class _Elsewhere:
    """A tensor in memory that is not the graph's own."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._form = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._kind = tensor.dtype, tensor.device

    def __call__(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None, "a replay reads memory that was given up since the capture"
        dtype, device = self._kind
        return torch.empty(0, dtype=dtype, device=device).set_(storage, *self._form)


class graph(TorchDispatchMode):
    """Within the block operations are noted in a graph."""

    def __init__(self, made: CUDAGraph, pool: Any = None, stream: Stream | None = None) -> None:
        super().__init__()
        self._graph = made
        self._stream = stream or Stream()
        self._own: dict[int, Tensor] = {}  # memory made while recording, by its address
        self._before: dict[int, tuple[_Elsewhere, Tensor]] = {}  # what is written of other memory, as it was

    def __enter__(self) -> Any:
        stream = self._stream
        assert stream.device is None or stream.device.index == ops.get_device(), "it waits for another device first"
        self._before_it = current
        set_stream(self._stream)
        self._uncounted = not_counting()
        self._uncounted.__enter__()
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        for place, content in self._before.values():
            place().copy_(content)
        self._uncounted.__exit__(kind, error, trace)
        done["captures"] += 1
        if kind is None:  # PyTorch's goes on in its stream after an error
            set_stream(self._before_it)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [value for value in _written(operation, args, kwargs) if value.is_cuda]
        for value in written:
            self._save(value)
        before = ops.counts()
        made = operation(*args, **kwargs)
        _, waits, *copies = (after - begun for after, begun in zip(ops.counts(), before, strict=True))
        if waits or any(copies):
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({operation})")
        if not any(tensor.is_cuda for tensor in _tensors((args, kwargs, made))):
            return made
        noted = tree_map(self._noted, (args, kwargs))
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        results = _tensors(made)
        if any(_memory(result) in given for result in results if result.numel()):
            if not written:
                return made  # a view, which lies where it lies
            results = []
        self._own |= {_memory(result): result for result in results}
        self._graph.steps.append((operation, *noted, [result.detach() for result in results]))
        return made

    def _save(self, tensor: Tensor) -> None:
        address = _memory(tensor)
        if address not in self._own and address not in self._before:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            whole.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),), (1,))
            self._before[address] = _Elsewhere(whole), whole.clone()

    def _noted(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_cuda:
            return value.clone()  # a number, which the kernel is handed
        value = value.detach()
        return value if not value.numel() or _memory(value) in self._own else _Elsewhere(value)


def _written(operation: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that it writes into."""
    found: list[Tensor] = []
    for place, about in enumerate(operation._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(about.name)
        writes = about.alias_info is not None and about.alias_info.is_write
        if writes or (operation._schema.name.endswith("batch_norm") and about.name.startswith("running")):
            found += _tensors(value)
    return found


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "CUDAGraph": CUDAGraph,
    "graph": graph,
    "graph_pool_handle": lambda: (0, 0),
    "Stream": Stream,
    "stream": in_stream,
    "current_stream": stream_of,
    "set_stream": set_stream,
    "set_sync_debug_mode": set_sync_debug_mode,
    "get_sync_debug_mode": lambda: 0,
}
