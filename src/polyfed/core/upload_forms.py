"""What clients may upload, as the server knows it beforehand: names, types, sizes and ranges, by the method's `form`.

A form has an entry for every name that an upload may hold, in any setting of the hyperparameters: an `Entry` for a
tensor, a function for a group. A size is a number, a letter, or a function of what is `UploadContext`:

    C  classes        D  what enters the head        N  training rows of the client, as it introduced itself

`UpTo` is a size that the client chooses: one number wherever its name stands in an upload, with a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor

from polyfed.core.message import Group, Message
from polyfed.core.modules import as_split_model, float_state
from polyfed.core.server import Server

FLOATS = (torch.float32,)
MOST = 2**40  # largest single number: steps, parameters


class UploadContext(NamedTuple):
    """What the server knows of an upload before it comes. method: a `Method`. sent: what the client was sent."""

    method: Any
    server: Server
    client_id: int
    sent: Message

    def size(self, size: Size) -> int:
        """A size as a number."""
        if isinstance(size, int):
            return size
        if not isinstance(size, str):
            return size(self)
        if size == "C":
            return self.server.classes
        if size == "N":
            return self.server.clients[self.client_id].num_samples
        assert size == "D"
        return as_split_model(self.network()).feature_dim

    def network(self) -> torch.nn.Module:
        """The client's own network, with any weights."""
        return self.server.model(self.server.clients[self.client_id].architecture, {})


Size = Union[int, str, Callable[[UploadContext], int]]  # noqa: UP007


class UpTo(NamedTuple):
    """A size that the client chooses. most: included."""

    name: str
    most: Size


@dataclass(frozen=True)
class Entry:
    """A tensor of an upload.

    Args:
        shape: its sizes; None: any, with `rows` rows. types: those that it may have.
        least, most: of all its numbers, both included; None: anything finite. distinct: no number comes twice.
        check: of what is so far right, why it is wrong, in a line.
    """

    shape: tuple[Size | UpTo, ...] | None = ()
    types: tuple[torch.dtype, ...] = FLOATS
    least: Size | None = None
    most: Size | None = None
    distinct: bool = False
    rows: Size | None = None
    check: Callable[[UploadContext, Tensor], str | None] | None = None


@dataclass(frozen=True)
class Members:
    """A group of an upload. entries: by name; of several, any. whole: all must be there."""

    entries: Mapping[str, tuple[Entry, ...]]
    whole: bool = True


Form = Mapping[str, Union[Entry, Callable[[UploadContext, str], Members]]]  # noqa: UP007

# what many methods send -------------------------------------------------------------------------------------------

_PRESENT = UpTo("S", "C")  # classes of which there are rows
SAMPLES = Entry(types=(torch.int64,), least="N", most="N")  # how many training rows the client has
NUMBER = Entry(least=0, most=MOST)
LABELS = Entry((_PRESENT,), (torch.int32, torch.int64), 0, lambda known: known.server.classes - 1, distinct=True)
COUNTS = Entry((_PRESENT,), (torch.int32,), 0, "N")  # samples behind each of the rows

BY_CLASS = Entry(("C",), (torch.int32,), 0, "N")  # samples of each class


def rows_of(width: Size) -> Entry:
    """A row for each of the "labels"."""
    return Entry((_PRESENT, width), FLOATS)


def alike(tensors: Group) -> Members:
    """Tensors of the same names, shapes and types."""
    return Members({name: _same(tensor) for name, tensor in tensors.items()})


def as_sent(known: UploadContext, name: str) -> Members:
    """The tensors that were sent in the group of this name."""
    down = known.sent.get(name, {})
    return alike({} if isinstance(down, Tensor) else down)


def own_network(known: UploadContext, name: str) -> Members:
    """All that is averaged of the client's own network."""
    return alike(float_state(known.network()))


def sparsified(known: UploadContext, name: str) -> Members:
    """The same, each as it is or in a row with some of its entries."""
    whole = float_state(known.network())
    either = {key: (*_same(t), Entry((UpTo(f"entries of {key}", t.numel()),), (t.dtype,))) for key, t in whole.items()}
    return Members(either)


def bits(known: UploadContext, name: str) -> Members:
    """A bit for each entry of any of these tensors, eight in a byte."""
    whole = float_state(known.network())
    packed = {key: (Entry((-(-t.numel() // 8),), (torch.uint8,)),) for key, t in whole.items()}
    return Members(packed, whole=False)


def _same(tensor: Tensor) -> tuple[Entry, ...]:
    return (Entry(tuple(tensor.shape), (tensor.dtype,)),)
