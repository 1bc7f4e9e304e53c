"""Defence at the server: uploads that are too large are refused, and the others are held to what they have in common.

What of two clients' uploads can be laid side by side, number by number, are its `parts`:

- tensors of the groups that a method declares as `changes`, of one name and shape, that began at the same numbers: what
  counts is the change since. So it is layer by layer where architectures differ and share layers, within an
  architecture where each is averaged alone, within a rate where clients train slices;
- rows of one class, in tensors with a row for each of the message's "labels" (class means, prototypes, outputs);
- tensors that a method declares as `comparable` (outputs on common inputs), of one name and shape.

Parts of one sort that the same clients have sent are one vector for each of them, but for rows, which stay apart. With
`[defence] rule`

- "median", "trimmed", "geometric": the robust centre takes the place of every one of them, so that whatever the method
  makes of them is made of the centre (equal models average to themselves);
- "clip": those longer than the median of the clients' lengths are brought to it;
- "krum": the whole uploads of those who are farthest from the others are left out; their distance is the mean square
  over the parts that two have in common.

All other floats (kernels, features) are brought to the median of the clients' sizes, whatever the rule: a size is the
root mean square of the rows' L2 norms. Whole numbers and single numbers are believed, except that where a centre has
taken all places, it does not matter how much each of them counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyfed.core.forms import MOST
from polyfed.core.message import Group, Message, State, read_only, shallow
from polyfed.core.method import Method
from polyfed.core.server import Server
from polyfed.core.settings import Defence
from polyfed.core.uploads import counterparts, every_tensor, sends
from polyfed.errors import RequestError
from polyfed.functional import robust

_FEW = 3  # below so many nobody can be outvoted
_Place = tuple[str, str | None, int | None]  # entry, name within the group, row


class _Part(NamedTuple):
    """A piece of an upload. key: what is the same of whom it can be compared with. sort: what it may be joined with.

    base: from where its way is measured; None: from zero.
    """

    place: _Place
    key: Hashable
    sort: Hashable
    value: Tensor
    base: Tensor | None

    @property
    def vector(self) -> Tensor:
        """What is compared. (D,) float32 or float64"""
        value = _wide(self.value)
        return (value if self.base is None else value - self.base.to(value)).flatten()

    def moved_to(self, vector: Tensor) -> Tensor:
        """The value of which `vector` is what is compared, in tensors of its own."""
        new = vector.view(self.value.shape)
        return (new.clone() if self.base is None else self.base.to(new) + new).to(self.value.dtype)


@dataclass
class Watch:
    """What a defence has done in a round. left_out: clients. shortened: vectors and tensors.

    few: parts of which fewer than three clients sent one, where nobody can be outvoted.
    """

    left_out: set[int] = field(default_factory=set)
    shortened: int = 0
    few: int = 0

    def record(self) -> dict[str, Any]:
        """For the round's record."""
        return {"left_out": sorted(self.left_out), "shortened": self.shortened, "few": self.few}


def check_defence(method: Method, defence: Defence) -> None:
    """Whether a rule can be applied to what the method uploads.

    Raises:
        RequestError: it cannot; says what the method sends.
    """
    if defence.rule == "none" or not method.rigid or not sends(method):
        return
    entry, reason = next(iter(method.rigid.items()))
    raise RequestError(
        f"defence.rule: expected uploads that can be held to one another, came {method.name or type(method).__name__}, "
        f"which sends '{entry}': {reason}; with rule 'none' max_norm still holds"
    )


def objection(defence: Defence, method: Method, classes: int, message: Message, received: Message) -> str | None:
    """Why an upload is refused, if it is: for its size, or because its "labels" would set rows apart from all others'.

    No number may be larger than `defence.largest`, and none that stands alone (a count of steps, of parameters) larger
    than what any count can be: squares and sums of such numbers are finite, so that one upload spoils no arithmetic.
    Of a group of the method's `changes` the size is the L2 norm of the change since `received`, of any other tensor the
    root mean square of its rows' L2 norms; whole numbers and single numbers have none.

    Args:
        classes: of the task. message: finite. received: what the client was sent.
    """
    for entry, name, tensor in every_tensor(message):
        bound = defence.largest if tensor.dim() else MOST
        if bound and tensor.is_floating_point() and tensor.numel() and not (size := _magnitude(tensor)) <= bound:
            place = entry if name is None else f"{entry}/{name}"
            setting = f"defence.largest = {bound:g}" if tensor.dim() else f"{bound:g}"
            return f"a number of '{place}' is {size:.4g}, above {setting}"
    labels = message.get("labels")
    if defence.rule != "none" and isinstance(labels, Tensor):
        distinct = labels.unique()
        if len(distinct) < labels.numel() or bool(((distinct < 0) | (distinct >= classes)).any()):
            return f"expected 'labels' that are classes below {classes}, each once, came others"
    for entry, value in message.items() if defence.max_norm else ():
        size = max(_sizes(value, counterparts(method, entry, value, received)), default=0.0)
        if not size <= defence.max_norm:
            return f"the norm of '{entry}' is {size:.4g}, above defence.max_norm = {defence.max_norm:g}"
    return None


def _magnitude(tensor: Tensor) -> float:
    low, high = tensor.aminmax()
    return max(-float(low), float(high))


def _sizes(value: Tensor | Group, base: Group) -> Iterator[float]:
    """Of an entry of an upload; see `objection`. base: what came down of it, where it is a change."""
    squares = 0.0
    for name, tensor in _floats({"": value}):
        if name is None or name not in base:
            yield _size(tensor)
        else:
            squares += float((tensor.double() - base[name].to(tensor).double()).square().sum())
    yield math.sqrt(squares)


def defended(
    defence: Defence, method: Method, server: Server, uploads: Mapping[int, Message], watch: Watch
) -> Mapping[int, Message]:
    """What the method gets in place of `uploads`; the very same where no rule is set.

    Args:
        server: in the passage that the uploads are of, before their aggregation: what it would send now is where the
            clients' changes began. watch: is told what is done.
    """
    if defence.rule == "none" or not uploads:
        return uploads
    sent = {i: method.broadcast(server, i) if method.changes else {} for i in uploads}
    parts = _parts(method, uploads, sent, of_changes=defence.rule == "clip")
    holders = _holders(parts)
    watch.few += sum(len(who) < _FEW for who in holders.values())
    found = {i: _Copy(message) for i, message in uploads.items()}
    chunks = _chunks(parts, holders)
    if defence.rule == "krum":
        kept = _kept(list(uploads), chunks, robust.supposed(len(uploads), defence.share))
        watch.left_out |= found.keys() - kept
        found = {i: copy for i, copy in found.items() if i in kept}
    else:
        for who, pieces in chunks:
            _replace(who, pieces, _rule(defence, len(who)), found, watch)
    _shorten(found, {i: {part.place[:2] for part in own} for i, own in parts.items()}, watch)
    return {i: copy.message for i, copy in found.items()}


def _rule(defence: Defence, count: int) -> Callable[[Tensor], Tensor]:
    """(K, D) -> (D,), the centre of all, or (K, D)."""
    return {
        "median": robust.median,
        "trimmed": lambda vectors: robust.trimmed_mean(vectors, robust.supposed(count, defence.share)),
        "geometric": robust.geometric_median,
        "clip": robust.shortened,
    }[defence.rule]


# parts ------------------------------------------------------------------------------------------------------------


def _parts(
    method: Method, uploads: Mapping[int, Message], sent: Mapping[int, Message], of_changes: bool
) -> dict[int, list[_Part]]:
    """All parts of every upload.

    Args:
        sent: what each client is sent. of_changes: weights are measured from there; else as they are, which for who
            began at the same numbers is the same but for lengths.
    """
    bases = {
        i: {
            (entry, name): tensor
            for entry, value in message.items()
            for name, tensor in counterparts(method, entry, value, sent[i]).items()
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
) -> Iterable[_Part]:
    """The parts of one entry of an upload. family: of those who began at the same numbers."""
    value, labels = message[entry], message.get("labels")
    for name, tensor in _floats({entry: value}):
        if entry in method.changes and name is not None:
            base = bases.get((entry, name))
            key = (entry, name, *tensor.shape, None if base is None else family)
            yield _Part((entry, name, None), key, (entry, key[-1]), tensor, base)
        elif entry in method.comparable:
            yield _Part((entry, name, None), (entry, name, *tensor.shape), entry, tensor, None)
        elif name is None and isinstance(labels, Tensor) and labels.shape == tensor.shape[:1]:
            for row, label in enumerate(labels.tolist()):
                key = (entry, label, *tensor.shape[1:])
                yield _Part((entry, None, row), key, key, tensor[row], None)


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


def _holders(parts: Mapping[int, Sequence[_Part]]) -> dict[Hashable, tuple[int, ...]]:
    """Key of a part -> who has sent one."""
    found: dict[Hashable, tuple[int, ...]] = {}
    for i, own in parts.items():
        for part in own:
            found[part.key] = (*found.get(part.key, ()), i)
    return found


_Pieces = list[list[_Part]]  # of each of some clients its parts, in the same order


def _chunks(
    parts: Mapping[int, Sequence[_Part]], holders: Mapping[Hashable, tuple[int, ...]]
) -> list[tuple[tuple[int, ...], _Pieces]]:
    """Parts of one sort that the same clients have: the clients, and each one's parts, in the same order."""
    known = {i: {part.key: part for part in own} for i, own in parts.items()}
    keys: dict[Hashable, list[Hashable]] = {}
    for key, who in holders.items():
        keys.setdefault((known[who[0]][key].sort, who), []).append(key)
    by_chunk = [(holders[of[0]], of) for of in keys.values()]
    return [(who, [[known[i][key] for key in of] for i in who]) for who, of in by_chunk]


def _vectors(pieces: _Pieces) -> Tensor:
    """(K, D)"""
    rows = [torch.cat([part.vector for part in own]) for own in pieces]
    widest = functools.reduce(torch.promote_types, (row.dtype for row in rows))
    return torch.stack([row.to(widest) for row in rows])


# what is done -----------------------------------------------------------------------------------------------------


class _Copy:
    """An upload whose tensors can be replaced, rows of them too."""

    def __init__(self, message: Message) -> None:
        self._message: State = shallow(message)
        self._own: set[tuple[str, str | None]] = set()  # tensors that may be written into

    @property
    def message(self) -> Message:
        """As it is now."""
        return read_only(self._message)

    def put(self, place: _Place, new: Tensor) -> None:
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


def _replace(
    who: Sequence[int], pieces: _Pieces, rule: Callable[[Tensor], Tensor], found: Mapping[int, _Copy], watch: Watch
) -> None:
    """Put what the rule makes of some clients' vectors in their places."""
    before = _vectors(pieces)
    after = rule(before)
    sizes = [part.value.numel() for part in pieces[0]]
    if after.dim() == 1:  # one centre for all, in the same tensors
        new = [part.moved_to(vector) for part, vector in zip(pieces[0], after.split(sizes), strict=True)]
        for i, own in zip(who, pieces, strict=True):
            for part, tensor in zip(own, new, strict=True):
                found[i].put(part.place, tensor.to(part.value.dtype))
        return
    for i, own, old, vector in zip(who, pieces, before, after, strict=True):
        if torch.equal(old, vector):
            continue
        watch.shortened += 1
        for part, piece in zip(own, vector.split(sizes), strict=True):
            found[i].put(part.place, part.moved_to(piece))


def _kept(ids: Sequence[int], chunks: Iterable[tuple[tuple[int, ...], _Pieces]], hostile: int) -> set[int]:
    """Whom Krum keeps; everybody where nothing can be compared."""
    place = {i: number for number, i in enumerate(ids)}
    squares = torch.zeros((len(ids), len(ids)), dtype=torch.float64)
    counts = torch.zeros_like(squares)
    for who, pieces in chunks:
        vectors = _vectors(pieces)
        at = torch.tensor([place[i] for i in who])
        squares[at[:, None], at] += robust.squared_distances(vectors)
        counts[at[:, None], at] += vectors.shape[1]
    if not bool((counts - counts.diag().diag()).any()):
        return set(ids)
    return {ids[number] for number in robust.krum(squares / counts, hostile)}


def _shorten(found: Mapping[int, _Copy], done: Mapping[int, set[tuple[str, str | None]]], watch: Watch) -> None:
    """Bring all floats that are no parts to the median of their sizes."""
    sizes: dict[tuple[str, str | None], dict[int, float]] = {}
    for i, copy in found.items():
        for entry, value in copy.message.items():
            for name, tensor in _floats({entry: value}):
                if (entry, name) not in done[i]:
                    sizes.setdefault((entry, name), {})[i] = _size(tensor)
    for (entry, name), of in sizes.items():
        watch.few += len(of) < _FEW
        factors = robust.to_the_median(torch.tensor(list(of.values()), dtype=torch.float64))
        for i, factor in zip(of, factors.tolist(), strict=True):
            if factor < 1:
                members = found[i].message[entry]
                tensor = members if isinstance(members, Tensor) else members[name or ""]
                found[i].put((entry, name, None), tensor * factor)
                watch.shortened += 1


def _floats(message: Message) -> list[tuple[str | None, Tensor]]:
    """Tensors with floats, by their names within a group (None: it stands alone); no single and no empty ones."""
    named = [(name, tensor) for _, name, tensor in every_tensor(message)]
    return [(name, t) for name, t in named if t.is_floating_point() and t.dim() and t.numel()]


def _wide(tensor: Tensor) -> Tensor:
    """At least float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _size(tensor: Tensor) -> float:
    """The root mean square of the rows' L2 norms."""
    return math.sqrt(float(tensor.double().square().sum()) / len(tensor))
