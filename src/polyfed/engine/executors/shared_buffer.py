"""Tensors handed from one process to another: copied into memory, described in plain facts, nothing pickled.

What lies in a buffer is described in plain lists and dictionaries, which the processes tell each other as JSON. A
`SharedBuffer` is memory that both processes hold; the content of a `Parcel` travels as bytes.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyfed.errors import RunError

_ALIGNED = 64  # bytes; as PyTorch aligns its own tensors
_LENGTH = 8  # bytes that tell how long a parcel's facts are
_SPARE = 1.25  # how much larger than asked for, so that it is not enlarged again at once

Tree = Mapping[str, Any]  # names -> tensors, None, or such mappings; a message, a state, or several of them


class TensorBuffer:
    """Memory that tensors are copied into. It grows with what is put in."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._used = 0  # bytes of what was put in last

    def write(self, tree: Tree) -> dict[str, Any]:
        """Copy all tensors in, over what was there; returns where they lie, for `view`.

        Strides are those that ``tensor.clone()`` would have. None stays None.

        Raises:
            RunError: something in `tree` is neither a tensor, nor a mapping, nor None.
        """
        end = 0
        placed = []

        def place(tensor: Any) -> list[Any]:
            nonlocal end
            if not isinstance(tensor, Tensor):
                raise RunError(f"expected tensors in messages and states, got {type(tensor).__name__}")
            like = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
            where = [str(tensor.dtype).removeprefix("torch."), tensor.shape, like.stride(), end]
            placed.append((tensor.detach(), where))
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
            return where

        described: dict[str, Any] = _mapped(tree, place)
        if end and (self._memory is None or len(self._memory) < end):
            self._memory = self._larger(int(_SPARE * end) // mmap.PAGESIZE * mmap.PAGESIZE + mmap.PAGESIZE)
        self._used = end
        for tensor, where in placed:
            self._at(where).copy_(tensor)
        return described

    def view(self, described: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of `write`, where they lie: whoever keeps one for longer than to the next `write` copies it."""
        found: dict[str, Any] = _mapped(described, self._at)
        return found

    def read(self, described: Mapping[str, Any]) -> dict[str, Any]:
        """The same in tensors of their own."""
        found: dict[str, Any] = _mapped(self.view(described), Tensor.clone)
        return found

    def _larger(self, size: int) -> mmap.mmap:
        """Memory of so many bytes, a multiple of a page's, in place of what there is."""
        return mmap.mmap(-1, size)

    def _at(self, where: Any) -> Tensor:
        name, shape, strides, begin = where
        kind = getattr(torch, name)
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(self._memory, dtype=kind, count=count, offset=begin).as_strided(shape, strides)


class SharedBuffer(TensorBuffer):
    """Shared memory with one writer and one reader, one of them forked from the other.

    Memory is used for what was put in at most, and freed with the last process that holds the buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._file = os.memfd_create("polyfed")

    def view(self, described: Mapping[str, Any]) -> dict[str, Any]:
        """See `TensorBuffer`; the other process may have made the memory larger."""
        size = os.fstat(self._file).st_size
        if size and (self._memory is None or len(self._memory) < size):
            self._memory = mmap.mmap(self._file, size)
        return super().view(described)

    def close(self) -> None:
        """Give up this process's hold on it."""
        os.close(self._file)
        self._memory = None

    def _larger(self, size: int) -> mmap.mmap:
        os.ftruncate(self._file, size)
        return mmap.mmap(self._file, 0)


class Parcel(TensorBuffer):
    """Tensors with facts, as one piece of bytes: the length of the facts, the facts as JSON, the memory."""

    def seal(self, facts: Mapping[str, Any]) -> bytes:
        """The facts, and what was put in last."""
        said = json.dumps(facts).encode()
        content = b"" if self._memory is None else self._memory[: self._used]
        return b"".join([len(said).to_bytes(_LENGTH, "little"), said, content])

    def open(self, data: bytes) -> dict[str, Any]:
        """The facts of what was sealed; its tensors can be looked at now.

        They begin at the same multiples of 64 bytes as before, on which the last bits of a matrix product may depend.
        """
        begin = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        size = len(data) - begin
        self._memory = None
        if size:
            self._memory = mmap.mmap(-1, size)
            self._memory[:] = memoryview(data)[begin:]
        self._used = size
        facts: dict[str, Any] = json.loads(data[_LENGTH:begin])
        return facts


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """`function` of all leaves but None, which stay."""
    if tree is None or isinstance(tree, Tensor | list):  # asked first, as there are many of them
        return None if tree is None else function(tree)
    if isinstance(tree, Mapping):
        return {name: _mapped(entry, function) for name, entry in tree.items()}
    return function(tree)
