"""The clients' weights: one flat row per client, in memory that worker processes share, or on the run's GPU.

A row begins with the network's float32 numbers, parameters and buffers, tied tensors once, each tensor begun at a
multiple of 64 bytes; tensors of other types (BatchNorm's counters) lie behind them. Rows of one architecture and
variant lie side by side. Who has no weights of its own has no row.

A row is written once, by whoever allocated it, and never again: new weights go to another row. A row's place
is free for others as soon as no tensor that looks into it is alive.
"""

from __future__ import annotations

import bisect
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.model_factory import ModelFactory
from polyfed.errors import RunError
from polyfed.functional.device_copies import move_together

_ALIGNED = 64  # bytes; as PyTorch aligns its own tensors
GROWTH_BYTES = 64 * 2**20  # bytes by which the memory grows at least; what is not written to takes no memory
_SHARE = 0.5  # of the available memory that all clients' rows together may need, to be kept in memory
_DEVICE_SHARE = 0.1  # likewise of a GPU's free memory; a round holds rows from before and after it


@dataclass(frozen=True)
class TensorSlot:
    """Where a tensor lies in a row. begin: in bytes. stride: in elements, as in the network."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int

    @property
    def end(self) -> int:
        """Where the next may begin."""
        return self.begin - -(math.prod(self.shape) * self.dtype.itemsize) // _ALIGNED * _ALIGNED


class RowLayout:
    """Where a network's tensors lie in its row.

    Attributes:
        places: by name, in the network's order; tied tensors have one. floats: P, how many float32 numbers a row begins
        with, gaps included. nbytes: of a whole row.
    """

    def __init__(self, places: Mapping[str, TensorSlot]) -> None:
        self.places = places
        self.floats = max((p.end for p in places.values() if p.dtype == torch.float32), default=0) // 4
        self.nbytes = max((p.end for p in places.values()), default=_ALIGNED)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> RowLayout:
        """That of a network's tensors by name."""
        found: dict[str, TensorSlot] = {}
        known: dict[object, TensorSlot] = {}
        end = 0
        for first in (True, False):
            for name, tensor in tensors.items():
                if (tensor.dtype == torch.float32) is not first:
                    continue
                shape = tuple(tensor.shape)
                stride = tuple(torch.empty_like(tensor, device="meta").stride())
                address = (tensor.data_ptr(), tensor.dtype, shape, stride) if tensor.numel() else name
                if address not in known:
                    known[address] = TensorSlot(tensor.dtype, shape, stride, end)
                    end = known[address].end
                found[name] = known[address]
        return cls({name: found[name] for name in tensors})

    def described(self) -> dict[str, list[Any]]:
        """What lies where, in plain lists, for `read`."""
        places = self.places.items()
        return {n: [str(p.dtype).removeprefix("torch."), list(p.shape), list(p.stride), p.begin] for n, p in places}

    @classmethod
    def read(cls, described: Mapping[str, Sequence[Any]]) -> RowLayout:
        """The inverse of `described`, for looking at rows that were written.

        Raises:
            ValueError: no such type.
        """
        places = {}
        for name, (kind, shape, stride, begin) in described.items():
            dtype = getattr(torch, kind, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"expected a type of tensors for '{name}', got '{kind}'")
            places[name] = TensorSlot(dtype, tuple(shape), tuple(stride), begin)
        return cls(places)

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """The tensors that lie in a row. row: (nbytes,) uint8."""
        typed = {place.dtype: row.view(place.dtype) for place in self.places.values()}
        return {
            name: typed[place.dtype].as_strided(
                place.shape, place.stride, typed[place.dtype].storage_offset() + place.begin // place.dtype.itemsize
            )
            for name, place in self.places.items()
        }


class WeightRow(Mapping[str, Tensor]):
    """A client's weights, by name: in main memory, views into the row or, where that lies on a GPU, copies.

    Attributes:
        architecture, variant: of the network that they are of. begin: where in the store's memory the row lies; -1: on
        a GPU.
        bytes: (nbytes,) uint8, the whole row. flat: (P,) its float32 numbers, gaps (zeros) included.
    """

    def __init__(self, architecture: str, variant: str, layout: RowLayout, begin: int, content: Tensor) -> None:
        self.architecture = architecture
        self.variant = variant
        self.layout = layout
        self.begin = begin
        self.bytes = content
        self._views: dict[str, Tensor] | None = None
        self._read: dict[str, Tensor] | None = None  # what was asked for of a row on a GPU

    @property
    def flat(self) -> Tensor:
        return self.bytes[: 4 * self.layout.floats].view(torch.float32)

    @property
    def views(self) -> dict[str, Tensor]:
        """All tensors by name, where the row lies; always the same objects."""
        if self._views is None:
            self._views = self.layout.views(self.bytes)
        return self._views

    def write(self, tensors: Mapping[str, Tensor]) -> WeightRow:
        """Copy tensors in, from any device. Only into a fresh row, and before anybody else has it.

        Raises:
            ValueError: other names or shapes than the row's.
        """
        if tensors.keys() != self.layout.places.keys():
            odd = min(tensors.keys() ^ self.layout.places.keys())
            raise ValueError(f"expected the tensors of '{self.architecture}', but only one side has '{odd}'")
        for name, view in self.views.items():
            if tensors[name].shape != view.shape:
                came = tuple(tensors[name].shape)
                raise ValueError(f"expected shape {tuple(view.shape)} for '{name}', got {came}")
        views = list(self.views.values())
        here = move_together([tensors[name] for name in self.views], [view.device for view in views])
        if views:  # an empty row stands for weights that are elsewhere
            torch._foreach_copy_(views, here)
        return self

    def __getitem__(self, name: str) -> Tensor:
        if self._read is None:
            self._read = self.views if self.bytes.is_cpu else self.layout.views(self.bytes.cpu())
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.places)

    def __len__(self) -> int:
        return len(self.layout.places)


class WeightStore:
    """The rows of a federation's clients.

    Memory is used for what was written to. It is shared with processes forked from this one after `open`; only this
    one makes rows, the others find them by their places. Where the rows of all clients would not fit into half of the
    available memory, they lie in a file without a name, which the system reads and writes as it needs them. Where the
    networks compute on an NVIDIA GPU, they lie there if they fit into a tenth of its free memory.

    Args:
        architectures: the networks. owners: the architectures of all clients. folder: for such a file; None: the
            system's place for temporary files.
    """

    def __init__(self, model_factory: ModelFactory, owners: Sequence[str], folder: Path | None = None) -> None:
        self._model_factory = model_factory
        self._owners = owners
        self._folder = folder
        self._layouts: dict[tuple[str, str], RowLayout] = {}
        self._free: dict[tuple[str, str], list[int]] = {}
        self._rows: dict[tuple[str, str], int] = {}  # places made, free or not
        self._memory: _Memory | None = None
        self._on_device: bool | None = None  # decided when the first row is made

    @property
    def nbytes(self) -> int:
        """Bytes of a row for each client."""
        return sum(self.layout(architecture).nbytes for architecture in self._owners)

    @property
    def on_device(self) -> bool:
        """Whether rows lie on the GPU where the networks compute."""
        if self._on_device is None:
            device = self._model_factory.device
            self._on_device = (
                device.type == "cuda" and self.nbytes <= _DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]
            )
        return self._on_device

    def keep_in_main_memory(self) -> None:
        """Have rows there, wherever the networks compute; before the first is made."""
        self._on_device = False

    def open(self) -> None:
        """Have memory that processes forked from now on share."""
        self._opened()

    def layout(self, architecture: str, variant: str = "") -> RowLayout:
        """Where the tensors of this network lie in a row."""
        key = (architecture, variant)
        if key not in self._layouts:
            self._layouts[key] = RowLayout.of(self._model_factory.state(architecture, variant))
        return self._layouts[key]

    def allocate(self, architecture: str, variant: str = "") -> WeightRow:
        """A row that nobody else has, to be written; what it holds means nothing, but gaps are zeros.

        Raises:
            RunError: there is no room for it.
        """
        key = (architecture, variant)
        layout = self.layout(architecture, variant)
        if self.on_device:
            content = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self._model_factory.device)
            return WeightRow(architecture, variant, layout, -1, content)
        free = self._free.setdefault(key, [])
        memory = self._opened()
        if not free:
            count = max(1, self._rows.get(key, 0))
            begin = memory.extend(count * layout.nbytes)
            free.extend(reversed(range(begin, begin + count * layout.nbytes, layout.nbytes)))
            self._rows[key] = self._rows.get(key, 0) + count
        begin = free.pop()
        return WeightRow(architecture, variant, layout, begin, memory.at(begin, layout.nbytes, free.append))

    def store(self, number: int, architecture: str, variant: str, tensors: Mapping[str, Tensor]) -> WeightRow:
        """A row of client `number` holding copies of `tensors`.

        Raises:
            ValueError: there is no such client, it has another architecture, or they are not its network's tensors.
            RunError: there is no room for it.
        """
        if not 0 <= number < len(self._owners):
            raise ValueError(f"expected weights of clients 0 to {len(self._owners) - 1}, got client {number}'s")
        if architecture != self._owners[number]:
            raise ValueError(f"expected '{self._owners[number]}' as client {number}'s network, got '{architecture}'")
        for name, place in self.layout(architecture, variant).places.items():
            if name in tensors and tensors[name].dtype != place.dtype:
                raise ValueError(f"expected {place.dtype} for '{name}', got {tensors[name].dtype}")
        return self.allocate(architecture, variant).write(tensors)

    def view(self, architecture: str, variant: str, begin: int) -> WeightRow:
        """The row at a place, as a forked process finds it: it is there as long as this store's process holds it."""
        layout = self.layout(architecture, variant)
        return WeightRow(architecture, variant, layout, begin, self._opened().at(begin, layout.nbytes))

    def _opened(self) -> _Memory:
        if self._memory is None:
            self._memory = _Memory(_file(self.nbytes, self._folder))
        return self._memory


def client_row(client: Client) -> WeightRow | None:
    """The row of a federation's client, None where it has no weights of its own.

    Raises:
        RunError: it was given other weights than a row of the store.
    """
    if client.weights is None or isinstance(client.weights, WeightRow):
        return client.weights
    raise RunError(f"expected a row of the store as {client.title}'s weights, got {type(client.weights).__name__}")


@dataclass(frozen=True)
class _File:
    """What memory is mapped from. number: of the open file; -1: of none, and nobody shares it. grow: to a size."""

    number: int
    grow: Callable[[int], None]


def _file(needed: int, folder: Path | None) -> _File:
    """In memory if `needed` bytes are no more than a share of what is available, else on disk."""
    if needed > _SHARE * available_memory():
        number, name = tempfile.mkstemp(prefix=".polyfed", dir=_existing(folder))
        os.unlink(name)
        return _File(number, lambda size: _reserve(number, size))
    try:
        number = os.memfd_create("polyfed")
    except (AttributeError, OSError):  # macOS; where a sandbox forbids it
        return _File(-1, lambda size: None)
    return _File(number, lambda size: _enlarge(number, size))


def _enlarge(number: int, size: int) -> None:
    """Make memory so large; what is not written to takes none."""
    try:
        os.ftruncate(number, size)
    except OSError as error:
        raise RunError(f"expected room for {size} bytes of clients' weights in memory: {error.strerror}") from None


def _reserve(number: int, size: int) -> None:
    """Make a file so large, with room on disk for all of it, as writing to mapped memory could not report a lack."""
    held = os.fstat(number).st_size
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(number, held, size - held)
        else:
            os.ftruncate(number, size)
    except OSError as error:
        raise RunError(
            f"expected room for {size} bytes of clients' weights on disk, as memory is short: {error.strerror}"
        ) from None


def _existing(folder: Path | None) -> Path | None:
    """The folder, or the first above it that is there."""
    return None if folder is None else next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def available_memory() -> float:
    """Bytes of memory that are free or can be freed, within the limit of this process's container."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf  # Windows
    found = [read_number("/proc/meminfo", "MemAvailable:", 1024), float(pages)]
    limit = read_number("/sys/fs/cgroup/memory.max", "", 1)
    used = read_number("/sys/fs/cgroup/memory.current", "", 1)
    cached = read_number("/sys/fs/cgroup/memory.stat", "inactive_file ", 1) or 0.0
    if limit is not None and used is not None:
        found.append(limit - used + cached)
    return min(size for size in found if size is not None)


def read_number(path: str, label: str, unit: int) -> float | None:
    """The number behind a label in one of the system's files, in bytes; None where there is none."""
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
        return next(float(line.removeprefix(label).split()[0]) * unit for line in lines if line.startswith(label))
    except (OSError, ValueError, StopIteration):
        return None


class _Memory:
    """A file's content, mapped piece by piece as it grows, so that what was mapped stays where it is."""

    def __init__(self, file: _File) -> None:
        self._file = file
        self._begins: list[int] = []
        self._pieces: list[mmap.mmap] = []
        self._mapped = self._used = 0  # bytes
        if file.number >= 0:
            weakref.finalize(self, os.close, file.number)

    def extend(self, size: int) -> int:
        """Where `size` more bytes begin, which lie in one piece."""
        if self._used + size > self._mapped:
            self._used, unit = self._mapped, mmap.ALLOCATIONGRANULARITY
            more = -(-max(size, GROWTH_BYTES, self._mapped // 4) // unit) * unit
            self._file.grow(self._mapped + more)
            self._map(more)
        self._used += size
        return self._used - size

    def at(self, begin: int, size: int, free: Callable[[int], None] | None = None) -> Tensor:
        """(size,) uint8: these bytes. free: called with `begin` when no tensor looks at them any more."""
        if begin >= self._mapped:  # what the process that this one was forked from has added since
            self._map(os.fstat(self._file.number).st_size - self._mapped)
        place = bisect.bisect_right(self._begins, begin) - 1
        part = np.frombuffer(self._pieces[place], np.uint8, size, begin - self._begins[place])
        if free is not None:
            weakref.finalize(part, free, begin).atexit = False
        return torch.from_numpy(part)

    def _map(self, size: int) -> None:
        offset = self._mapped if self._file.number >= 0 else 0
        self._pieces.append(mmap.mmap(self._file.number, size, offset=offset))
        self._begins.append(self._mapped)
        self._mapped += size
