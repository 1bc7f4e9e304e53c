"""The clients' weights: one flat row per client, in main memory or on the run's GPU.

A row has the parameters and buffers of a network, tied tensors once, each begun at a multiple of 64 bytes. Who has no
weights of its own has no row.

A row is written once and never again: new weights go to another row. Its memory is free as soon as no tensor that looks
into it is alive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.model_factory import ModelFactory
from polyfed.errors import RunError
from polyfed.functional.device_copies import move_together

_ALIGNED = 64  # bytes; as PyTorch aligns its own tensors
_DEVICE_SHARE = 0.1  # of a GPU's free memory that all rows together may need; a round holds those before and after it


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
        places: by name, in the network's order; tied tensors have one. nbytes: of a whole row.
    """

    def __init__(self, places: Mapping[str, TensorSlot]) -> None:
        self.places = places
        self.nbytes = max((p.end for p in places.values()), default=_ALIGNED)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> RowLayout:
        """That of a network's tensors by name."""
        found: dict[str, TensorSlot] = {}
        known: dict[object, TensorSlot] = {}
        end = 0
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            stride = tuple(torch.empty_like(tensor, device="meta").stride())
            address = (tensor.data_ptr(), tensor.dtype, shape, stride) if tensor.numel() else name
            if address not in known:
                known[address] = TensorSlot(tensor.dtype, shape, stride, end)
                end = known[address].end
            found[name] = known[address]
        return cls(found)

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
        architecture, variant: of the network that they are of.
        bytes: (nbytes,) uint8, the whole row.
    """

    def __init__(self, architecture: str, variant: str, layout: RowLayout, content: Tensor) -> None:
        self.architecture = architecture
        self.variant = variant
        self.layout = layout
        self.bytes = content
        self._views: dict[str, Tensor] | None = None
        self._version = 0  # of the content, when it was written
        self._read: dict[str, Tensor] | None = None  # what was asked for of a row on a GPU

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
                shape = tuple(tensors[name].shape)
                raise ValueError(f"expected shape {tuple(view.shape)} for '{name}', got {shape}")
        views = list(self.views.values())
        here = move_together([tensors[name] for name in self.views], [view.device for view in views])
        if views:  # an empty row stands for weights that are elsewhere
            torch._foreach_copy_(views, here)
        self._version = self.bytes._version
        return self

    def take(self, content: Tensor) -> WeightRow:
        """As `write`, of a whole row.

        Raises:
            RunError: it is one of another network.
        """
        if content.shape != self.bytes.shape:
            length = self.bytes.numel()
            raise RunError(f"expected {length} bytes of weights of '{self.architecture}', got {content.numel()}")
        self.bytes.copy_(content)
        self._version = self.bytes._version
        return self

    @property
    def is_intact(self) -> bool:
        """Whether nobody has written into it since then, or into an upload that has its tensors."""
        return self.bytes._version == self._version

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

    Where the networks compute on an NVIDIA GPU, they lie there if all fit into a tenth of its free memory; else in main
    memory.

    Args:
        owners: the architectures of all clients.
    """

    def __init__(self, model_factory: ModelFactory, owners: Sequence[str]) -> None:
        self._model_factory = model_factory
        self._owners = owners
        self._layouts: dict[tuple[str, str], RowLayout] = {}
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

    def layout(self, architecture: str, variant: str = "") -> RowLayout:
        """Where the tensors of this network lie in a row."""
        key = (architecture, variant)
        if key not in self._layouts:
            self._layouts[key] = RowLayout.of(self._model_factory.state(architecture, variant))
        return self._layouts[key]

    def allocate(self, architecture: str, variant: str = "") -> WeightRow:
        """A row that nobody else has, to be written; what it holds means nothing, but gaps are zeros."""
        layout = self.layout(architecture, variant)
        device = self._model_factory.device if self.on_device else "cpu"
        content = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        return WeightRow(architecture, variant, layout, content)

    def store(self, number: int, architecture: str, variant: str, tensors: Mapping[str, Tensor]) -> WeightRow:
        """A row of client `number` holding copies of `tensors`.

        Raises:
            ValueError: there is no such client, it has another architecture, or they are not its network's tensors.
        """
        if not 0 <= number < len(self._owners):
            raise ValueError(f"expected weights of clients 0 to {len(self._owners) - 1}, got client {number}'s")
        if architecture != self._owners[number]:
            raise ValueError(f"expected '{self._owners[number]}' as client {number}'s network, got '{architecture}'")
        for name, place in self.layout(architecture, variant).places.items():
            if name in tensors and tensors[name].dtype != place.dtype:
                raise ValueError(f"expected {place.dtype} for '{name}', got {tensors[name].dtype}")
        return self.allocate(architecture, variant).write(tensors)


def client_row(client: Client) -> WeightRow | None:
    """The row of a federation's client, None where it has no weights of its own.

    Raises:
        RunError: it was given other weights than a row of the store.
    """
    if client.weights is None or isinstance(client.weights, WeightRow):
        return client.weights
    raise RunError(f"expected a row of the store as {client.title}'s weights, got {type(client.weights).__name__}")
