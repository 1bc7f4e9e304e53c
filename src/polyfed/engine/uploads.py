"""Uploads: whether there are any, where changes of weights began, and whether one has the form of its method."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from polyfed.core.message import Group, Message, members, nbytes
from polyfed.core.method import Method
from polyfed.core.upload_forms import Entry, Form, Members, UploadContext, UpTo


def has_upload(method: Method) -> bool:
    """Whether anything goes up."""
    return getattr(method.upload, "__func__", None) is not Method.upload


def sent_nbytes(method: Method, message: Message) -> int:
    """Bytes of a message on the wire; 0 where every client is alone with its server, as nothing crosses."""
    return 0 if method.is_alone else nbytes(message)


def base_tensors(method: Method, name: str, value: Tensor | Group, received: Message) -> Group:
    """What was broadcast of those tensors of a group that go up as changes of it (`Method.delta_entries`)."""
    if isinstance(value, Tensor) or name not in method.delta_entries:
        return {}
    down = members(received, name)
    return {key: t for key, t in down.items() if key in value and value[key].shape == t.shape and t.is_floating_point()}


def batchnorm_buffers(network: nn.Module) -> frozenset[str]:
    """Names of what BatchNorm and its like keep of the data, also within a part of the network."""
    layers = [layer for layer in network.modules() if isinstance(layer, _NormBase)]
    kept_here = {id(buffer) for layer in layers for buffer in layer.buffers()}
    return endings(name for name, buffer in network.named_buffers() if id(buffer) in kept_here)


def endings(names: Iterable[str]) -> frozenset[str]:
    """The names, and what a part of the network calls them: "own.norm.weight" is also "norm.weight" and "weight"."""
    parts = (name.split(".") for name in names)
    return frozenset(".".join(one[begin:]) for one in parts for begin in range(len(one)))


def iter_tensors(message: Message) -> Iterator[tuple[str, str | None, Tensor]]:
    """Name, name within the group (None: it stands alone), tensor."""
    for name, value in message.items():
        if isinstance(value, Tensor):
            yield name, None, value
        else:
            yield from ((name, key, tensor) for key, tensor in value.items())


def find_mismatch(form: Form, message: Message, known: UploadContext) -> str | None:
    """Why an upload is not of this form, in a line; None: it is."""
    chosen: dict[str, int] = {}
    for name, value in message.items():
        expected = form.get(name)
        if expected is None:
            known_names = ", ".join(f"'{one}'" for one in form) or "nothing"
            return f"expected {known_names}, got {_named(name)}"
        if isinstance(value, Tensor) != isinstance(expected, Entry):
            return f"expected a {'tensor' if isinstance(expected, Entry) else 'group'} as '{name}', got the other"
        if isinstance(expected, Entry):
            assert isinstance(value, Tensor)
            problem = _odd(f"'{name}'", value, expected, known, chosen)
        else:
            assert not isinstance(value, Tensor)
            problem = _odd_group(name, value, expected(known, name), known, chosen)
        if problem is not None:
            return problem
    return None


def largest_nbytes(form: Form | None, message: Message, known: UploadContext) -> int:
    """Bytes that an upload with the tensors of this one may have, by its form; without one, those that it has."""
    total = 0
    for name, value in message.items():
        expected = (form or {}).get(name)
        if isinstance(value, Tensor):
            total += _most_nbytes(value, [expected] if isinstance(expected, Entry) else [], known)
            continue
        allowed = {} if expected is None or isinstance(expected, Entry) else expected(known, name).entries
        total += sum(_most_nbytes(tensor, allowed.get(key, ()), known) for key, tensor in value.items())
    return total


def _most_nbytes(tensor: Tensor, entries: Sequence[Entry], known: UploadContext) -> int:
    shapes = [entry.shape for entry in entries if entry.shape is not None]
    sizes = [[known.size(size.most if isinstance(size, UpTo) else size) for size in shape] for shape in shapes]
    return max([tensor.numel(), *map(math.prod, sizes)]) * tensor.element_size()


def _odd_group(name: str, group: Group, expected: Members, known: UploadContext, chosen: dict[str, int]) -> str | None:
    if foreign := next((key for key in group if key not in expected.entries), None):
        return f"expected {len(expected.entries)} tensors of known names in '{name}', got {_named(foreign)}"
    if expected.whole and (missing := next((key for key in expected.entries if key not in group), None)):
        return f"expected '{missing}' in '{name}', which is missing"
    for key, tensor in group.items():
        problems = [_odd(f"'{name}/{key}'", tensor, entry, known, chosen) for entry in expected.entries[key]]
        if None not in problems:
            return problems[0]
    return None


def _odd(place: str, tensor: Tensor, entry: Entry, known: UploadContext, chosen: dict[str, int]) -> str | None:
    """What is wrong with a tensor. chosen: the sizes that the client chose until now; grows."""
    if tensor.dtype not in entry.types:
        return f"expected {_types(entry.types)} as {place}, got {_types((tensor.dtype,))}"
    if entry.shape is None:
        rows = known.size(entry.rows or 0)
        odd = tensor.dim() == 0 or len(tensor) != rows
        return f"expected {rows} rows in {place}, got the shape {tuple(tensor.shape)}" if odd else None
    if tensor.dim() != len(entry.shape):
        return f"expected {len(entry.shape)} dimensions of {place}, got the shape {tuple(tensor.shape)}"
    for given, size in zip(tensor.shape, entry.shape, strict=True):
        if isinstance(size, UpTo):
            most = known.size(size.most)
            if given > most or given != chosen.setdefault(size.name, given):
                wanted = f"{chosen[size.name]} rows" if given <= most else f"at most {most} rows"
                return f"expected {wanted} in {place}, got the shape {tuple(tensor.shape)}"
        elif given != known.size(size):
            return f"expected a size of {known.size(size)} in {place}, got the shape {tuple(tensor.shape)}"
    problem = _out_of_range(place, tensor, entry, known)
    return entry.check(known, tensor) if problem is None and entry.check is not None else problem


def _out_of_range(place: str, tensor: Tensor, entry: Entry, known: UploadContext) -> str | None:
    if not tensor.numel():
        return None
    low = tensor.min().item()
    high = tensor.max().item()
    if entry.least is not None and low < (least := known.size(entry.least)):
        return f"expected at least {least} in {place}, got {low:g}"
    if entry.most is not None and high > (most := known.size(entry.most)):
        return f"expected at most {most} in {place}, got {high:g}"
    if entry.distinct and len(tensor.unique()) < tensor.numel():
        return f"expected every number once in {place}, got some again"
    return None


def _types(types: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(one).removeprefix("torch.") for one in types)


def _named(name: str) -> str:
    """A name that somebody else has chosen, in a line."""
    return repr(name[:60])


class Rejected(Exception):
    """An upload that counts for nothing; says why, in a line."""
