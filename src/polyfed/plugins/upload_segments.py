"""What of several clients' uploads can be laid side by side, number by number: their parts.

- Tensors of the groups that a method declares as `delta_entries`, of one name and shape, that began at the same
  numbers: what counts is the change since. So it is layer by layer where architectures differ and share layers, within
  an architecture where each is averaged alone, within a rate where clients train slices.
- Rows of one class, in tensors with a row for each of the message's "labels" (class means, prototypes, outputs).
- Tensors that a method declares as `aligned_entries` (outputs on common inputs), of one name and shape.

Parts of one sort that the same clients have sent are one vector for each of them, but for rows, which stay apart.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyfed.core.message import Message, State, freeze, shallow_copy
from polyfed.core.method import Method
from polyfed.engine.uploads import base_tensors, iter_tensors
from polyfed.functional.centering import widened

Place = tuple[str, str | None, int | None]  # entry, name within the group, row


class Segment(NamedTuple):
    """A piece of an upload. key: what is the same of whom it can be compared with. sort: what it may be joined with.

    base: from where its way is measured; None: from zero.
    """

    place: Place
    key: Hashable
    sort: Hashable
    value: Tensor
    base: Tensor | None

    @property
    def vector(self) -> Tensor:
        """What is compared. (D,) float32 or float64"""
        value = widened(self.value)
        if self.base is not None:
            value = value - self.base.to(value)
        return value.flatten()

    def moved_to(self, vector: Tensor) -> Tensor:
        """The value of which `vector` is what is compared, in tensors of its own."""
        new = vector.view(self.value.shape)
        moved = new.clone() if self.base is None else self.base.to(new) + new
        return moved.to(self.value.dtype)


def parts_of(
    method: Method, uploads: Mapping[int, Message], sent: Mapping[int, Message], of_changes: bool
) -> dict[int, list[Segment]]:
    """All parts of every upload.

    Args:
        sent: what each client is sent. of_changes: weights are measured from there; else as they are, which for who
            began at the same numbers is the same but for lengths.
    """
    bases = {
        i: {
            (entry, name): tensor
            for entry, value in message.items()
            for name, tensor in base_tensors(method, entry, value, sent[i]).items()
        }
        for i, message in uploads.items()
    }
    family = _families(bases)
    return {
        i: [
            part if of_changes else part._replace(base=None)
            for entry in message
            for part in _of_entry(method, entry, message, bases[i], family[i])
        ]
        for i, message in uploads.items()
    }


def _of_entry(
    method: Method, entry: str, message: Message, bases: Mapping[tuple[str, str], Tensor], family: int
) -> Iterable[Segment]:
    """The parts of one entry of an upload. family: of those who began at the same numbers."""
    value = message[entry]
    labels = message.get("labels")
    for name, tensor in floats_of({entry: value}):
        if entry in method.delta_entries and name is not None:
            base = bases.get((entry, name))
            key = (entry, name, *tensor.shape, None if base is None else family)
            yield Segment((entry, name, None), key, (entry, key[-1]), tensor, base)
        elif entry in method.aligned_entries:
            yield Segment((entry, name, None), (entry, name, *tensor.shape), entry, tensor, None)
        elif name is None and isinstance(labels, Tensor) and labels.shape == tensor.shape[:1]:
            for row, label in enumerate(labels.tolist()):
                key = (entry, label, *tensor.shape[1:])
                yield Segment((entry, None, row), key, key, tensor[row], None)


def _families(bases: Mapping[int, Mapping[tuple[str, str], Tensor]]) -> dict[int, int]:
    """Number of client -> which others have begun at the same numbers wherever names and shapes are the same."""
    known: list[dict[tuple[object, ...], Tensor]] = []
    found = {}
    for i, tensors in bases.items():
        shaped: dict[tuple[object, ...], Tensor] = {(*name, *t.shape): t for name, t in tensors.items()}
        found[i] = next((number for number, others in enumerate(known) if _agree(others, shaped)), len(known))
        if found[i] == len(known):
            known.append({})
        known[found[i]] |= shaped
    return found


def _agree(one: Mapping[tuple[object, ...], Tensor], other: Mapping[tuple[object, ...], Tensor]) -> bool:
    """Whether they have something in common, and all of that is alike bit for bit."""
    common = one.keys() & other.keys()
    return bool(common) and all(one[key] is other[key] or torch.equal(one[key], other[key]) for key in common)


def owners_of(parts: Mapping[int, Sequence[Segment]]) -> dict[Hashable, tuple[int, ...]]:
    """Key of a part -> who has sent one."""
    found: dict[Hashable, tuple[int, ...]] = {}
    for i, own in parts.items():
        for part in own:
            found[part.key] = (*found.get(part.key, ()), i)
    return found


Pieces = list[list[Segment]]  # for each of some clients its parts, in the same order


def blocks_of(
    parts: Mapping[int, Sequence[Segment]], holders: Mapping[Hashable, tuple[int, ...]]
) -> list[tuple[tuple[int, ...], Pieces]]:
    """Parts of one sort that the same clients have: the clients, and each one's parts, in the same order."""
    known = {i: {part.key: part for part in own} for i, own in parts.items()}
    keys: dict[tuple[Hashable, tuple[int, ...]], list[Hashable]] = {}
    for key, who in holders.items():
        keys.setdefault((known[who[0]][key].sort, who), []).append(key)
    return [(who, [[known[i][key] for key in of] for i in who]) for (_, who), of in keys.items()]


def vectors_of(pieces: Pieces) -> Tensor:
    """(K, D)"""
    rows = [torch.cat([part.vector for part in own]) for own in pieces]
    widest = functools.reduce(torch.promote_types, (row.dtype for row in rows))
    return torch.stack([row.to(widest) for row in rows])


class EditableMessage:
    """An upload whose tensors can be replaced, rows of them too."""

    def __init__(self, message: Message) -> None:
        self._message: State = shallow_copy(message)
        self._own: set[tuple[str, str | None]] = set()  # tensors that may be written into

    @property
    def message(self) -> Message:
        """As it is now."""
        return freeze(self._message)

    def put(self, place: Place, new: Tensor) -> None:
        """Put a tensor, or a row of one, in its place."""
        entry, name, row = place
        members = self._message[entry]
        if row is None:
            if isinstance(members, Tensor):
                self._message[entry] = new
            else:
                members[name or ""] = new
            return
        assert isinstance(members, Tensor)
        if (entry, name) not in self._own:
            members = self._message[entry] = members.clone()
            self._own.add((entry, name))
        members[row] = new


def floats_of(message: Message) -> list[tuple[str | None, Tensor]]:
    """Tensors with floats, by their names within a group (None: it stands alone); no single and no empty ones."""
    named = [(name, tensor) for _, name, tensor in iter_tensors(message)]
    return [(name, t) for name, t in named if t.is_floating_point() and t.dim() and t.numel()]
