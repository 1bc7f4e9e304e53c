"""A stand-in for CUDA graphs on the CPU, for tests of recorded steps.

A capture notes every operation below autograd and vmap with the tensors that it was handed, and leaves the memory as it
was, as a GPU computes nothing meanwhile. A replay does the operations again, on the same memory and with the same
numbers of Python's. A capture refuses to read a number out of a tensor, as a GPU's does, and a replay reads no memory
that was given up since.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from polyfed.engine.executors import recorded_step
from polyfed.functional.modes import dropout_layers

done = {"captures": 0, "replays": 0}


class _Elsewhere:
    """A tensor in memory that is not the graph's own."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._form = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype

    def __call__(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None, "a replay reads memory that was given up since the capture"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._form)


class CUDAGraph:
    """What was done within `graph`."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, list[Tensor]]] = []  # operation, arguments, and results to write into

    def replay(self) -> None:
        """Do it again."""
        done["replays"] += 1
        with torch.no_grad():
            for operation, given, results in self.steps:
                args, kwargs = tree_map(lambda value: value() if isinstance(value, _Elsewhere) else value, given)
                for result, made in zip(results, _tensors(operation(*args, **kwargs)), strict=bool(results)):
                    result.copy_(made)


class graph(TorchDispatchMode):
    """Within the block operations are noted in a graph."""

    def __init__(self, made: CUDAGraph, pool: Any = None, stream: Any = None) -> None:
        super().__init__()
        self._graph = made
        self._own: dict[int, Tensor] = {}  # memory made while recording, by its address
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # what is written of other memory, as it was

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        for memory, content in self._before.values():
            memory.copy_(content)
        done["captures"] += 1

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operation is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        written = _written(operation, args, kwargs)
        for value in written:
            if _memory(value) not in self._own and _memory(value) not in self._before:
                whole = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
                self._before[_memory(value)] = whole, whole.clone()
        noted = tree_map(self._noted, (args, kwargs))
        made = operation(*args, **kwargs)
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        results = _tensors(made)
        if any(_memory(result) in given for result in results if result.numel()):
            if not written:
                return made  # a view, which lies where it lies
            results = []
        self._own |= {_memory(result): result for result in results}
        self._graph.steps.append((operation, noted, [result.detach() for result in results]))
        return made

    def _noted(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.detach()
        return value if not value.numel() or _memory(value) in self._own else _Elsewhere(value)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _written(operation: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that it writes into."""
    found: list[Tensor] = []
    for place, about in enumerate(operation._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(about.name)
        writes = about.alias_info is not None and about.alias_info.is_write
        if writes or (operation._schema.name.endswith("batch_norm") and about.name.startswith("running")):
            found += _tensors(value)
    return found


def use(patch: pytest.MonkeyPatch) -> None:
    """Have stacks on the CPU recorded, by this."""
    patch.setitem(done, "captures", 0)
    patch.setitem(done, "replays", 0)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    functions: dict[str, Any] = {
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": lambda: (0, 0),
        "Stream": lambda device: stream,
        "stream": contextlib.nullcontext,
        "current_stream": lambda device: stream,
        "set_stream": lambda stream: None,
        "device": contextlib.nullcontext,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
    }
    for name, function in functions.items():
        patch.setattr(torch.cuda, name, function)

    def worthwhile(self: recorded_step.Recordings, label: Any, network: torch.nn.Module) -> bool:
        return recorded_step.RECORDS and label not in self.refused and not dropout_layers(network)

    patch.setattr(recorded_step.Recordings, "worthwhile", worthwhile)
