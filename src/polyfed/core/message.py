"""What crosses between server and clients: named tensors, one level of groups deep. Also the shape of explicit state.

A message is ``{"header": {"weight": ..., "bias": ...}, "count": tensor(500)}``. Numbers that are not tensors are sent
as 0-d tensors. Serialized here and nowhere else, as safetensors.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from polyfed.errors import ConfigError, RunError
from polyfed.functional.device_copies import memory_key, move_together

Group = Mapping[str, Tensor]
Message = Mapping[str, Tensor | Group]
State = dict[str, Tensor | dict[str, Tensor]]  # tensors are replaced, never written into: a round can be undone

_SEPARATOR = "/"
ADDENDS = "addends"  # the group of an upload of which the server learns the total alone (`[secure_sums]`)
_CPU = torch.device("cpu")


def flatten(message: Message) -> dict[str, Tensor]:
    """``{"header": {"bias": t}}`` to ``{"header/bias": t}``. Empty groups leave nothing behind.

    Raises:
        RunError: a top-level name holds "/", or a value is not a tensor.
    """
    flat: dict[str, Tensor] = {}
    for name, value in message.items():
        if _SEPARATOR in name:
            raise RunError(f"expected message names without '{_SEPARATOR}', got '{name}'")
        if isinstance(value, Tensor):
            flat[name] = value
        else:
            flat |= {f"{name}{_SEPARATOR}{key}": entry for key, entry in _members(name, value).items()}
    return flat


def _members(name: str, value: object) -> Group:
    """The tensors of a group.

    Raises:
        RunError: it is none, but a number, say.
    """
    if not isinstance(value, Mapping):
        raise _no_tensor(name, value)
    for key, entry in value.items():
        if not isinstance(entry, Tensor):
            raise _no_tensor(f"{name}{_SEPARATOR}{key}", entry)
    return value


def _no_tensor(name: str, value: object) -> RunError:
    number = isinstance(value, int | float)
    hint = f"; write torch.tensor({value!r})" if number else ""
    return RunError(f"expected tensors in messages and states, got {type(value).__name__} as '{name}'{hint}")


def unflatten(flat: Group) -> State:
    """The inverse of `flatten`.

    Raises:
        ConfigError: a name is that of a tensor and of a group.
    """
    message: State = {}
    for key, value in flat.items():
        name, separator, rest = key.partition(_SEPARATOR)
        members = message.setdefault(name, {} if separator else value)
        if isinstance(members, Tensor) == bool(separator):
            raise ConfigError(f"expected '{name}' to be a tensor or a group, got both")
        if isinstance(members, dict):
            members[rest] = value
    return message


def nbytes(message: Message) -> int:
    """Exact logical size in bytes: the sum of the tensors' sizes, names and framing not counted.

    >>> nbytes({"labels": torch.zeros(2, dtype=torch.int32), "means": torch.zeros(2, 500)})
    4008
    """
    return sum(t.numel() * t.element_size() for t in flatten(message).values())


def to_bytes(message: Message) -> bytes:
    """Serialize as safetensors."""
    return safetensors.torch.save({k: v.detach().cpu().contiguous().clone() for k, v in flatten(message).items()})


def from_bytes(data: bytes) -> State:
    """The inverse of `to_bytes`; nothing in `data` is executed.

    Raises:
        ConfigError: `data` is not a whole safetensors file.
    """
    try:
        return unflatten(safetensors.torch.load(data))
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RuntimeError, MemoryError) as error:
        raise ConfigError(f"expected a message as safetensors, got {len(data)} bytes that are not: {error}") from None


def freeze(message: Message) -> Message:
    """A view of the message whose entries cannot be replaced; the receiver copies what it keeps."""
    return MappingProxyType(
        {k: v if isinstance(v, Tensor) else MappingProxyType(dict(_members(k, v))) for k, v in message.items()}
    )


def clone(message: Message, copied: Mapping[Hashable, Tensor] | None = None, device: torch.device = _CPU) -> State:
    """The message in tensors of its own, in the plain order of their entries, where `places_of` has them.

    copied: what is copied already, by the `memory_key` of where it was.
    """
    tensors = tensors_of(message)
    places = places_of(tensors, device)
    known = copied or {}
    keys = [memory_key(tensor, place) for tensor, place in zip(tensors, places, strict=True)]
    there = move_together(tensors, places)
    return with_tensors(message, [known[k] if k in known else _own(t) for k, t in zip(keys, there, strict=True)])


def places_of(tensors: Iterable[Tensor], device: torch.device) -> list[torch.device]:
    """Where the tensors of a message or state lie if it lies on a device: all but numbers and whole numbers there.

    Those (counts, labels) are looked at one by one, for which a GPU would be waited for; they are in main memory.
    """
    return [device if tensor.dim() and tensor.is_floating_point() else _CPU for tensor in tensors]


def tensors_of(message: Message) -> list[Tensor]:
    """The tensors of a message, group by group, in its order.

    Raises:
        RunError: something in it is no tensor.
    """
    entries = [[v] if isinstance(v, Tensor) else list(_members(k, v).values()) for k, v in message.items()]
    return [entry for members in entries for entry in members]


def writes(message: Message) -> list[int]:
    """How often each tensor of a message has been written into. What is written through NumPy does not count."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors_of(message)]


def with_tensors(message: Message, tensors: Iterable[Tensor]) -> State:
    """The message with others in place of `tensors_of(message)`."""
    others = iter(tensors)
    return {
        k: next(others) if isinstance(v, Tensor) else {name: next(others) for name in v} for k, v in message.items()
    }


def numbers_of(values: Sequence[Tensor]) -> list[float]:
    """Numbers of 0-d tensors; those that lie on a device are asked for together, as that stops a GPU."""
    away = [value.float() for value in values if not value.is_cpu]
    asked = iter(torch.stack(away).tolist() if away else [])
    return [value.item() if value.is_cpu else next(asked) for value in values]


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def contiguous(state: Message, device: torch.device = _CPU) -> State:
    """The state, every tensor's entries in the plain order, as they are after a checkpoint was read; see `places_of`.

    Copies those that lie otherwise (a network's may lie channels last): sums over them would round otherwise.
    """
    tensors = tensors_of(state)
    there = move_together(tensors, places_of(tensors, device))
    return with_tensors(
        state,
        [t.contiguous() if t.device == moved.device else _own(moved) for t, moved in zip(tensors, there, strict=True)],
    )


def shallow_copy(state: Message) -> State:
    """New dictionaries around the same tensors: enough to undo changes to a state."""
    return {k: v if isinstance(v, Tensor) else dict(_members(k, v)) for k, v in state.items()}


def get_group(message: Message, name: str) -> Group:
    """The group called `name`.

    Raises:
        RunError: it is missing or a single tensor.
    """
    value = message.get(name)
    if value is None or isinstance(value, Tensor):
        raise RunError(f"expected a group '{name}' in the message, got {sorted(message) or 'an empty message'}")
    return value


def members(message: Message, name: str) -> Group:
    """Those of the group of this name; none where there is no such group."""
    value = message.get(name, {})
    return {} if isinstance(value, Tensor) else value


def get_tensor(message: Message, name: str) -> Tensor:
    """The single tensor called `name`.

    Raises:
        RunError: it is missing or a group.
    """
    value = message.get(name)
    if not isinstance(value, Tensor):
        raise RunError(f"expected a tensor '{name}' in the message, got {sorted(message) or 'an empty message'}")
    return value


def largest_entry(tensors: Iterable[Tensor]) -> Tensor:
    """The largest magnitude in tensors of one device, NaN where there is one: 0-d, there."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    largest: Tensor = torch.linalg.vector_norm(flat, math.inf)
    return largest


def first_nonfinite(message: Message, only_here: bool = False) -> str | None:
    """The name of the first tensor that holds NaN or infinity, or None. only_here: of those in main memory."""
    with torch.no_grad():
        floats = {name: value for name, value in flatten(message).items() if value.is_floating_point()}
        floats = {name: value for name, value in floats.items() if value.is_cpu or not only_here}
        sums = numbers_of([value.sum() for value in floats.values()])
        for (name, value), total in zip(floats.items(), sums, strict=True):
            if not math.isfinite(total) and not bool(torch.isfinite(value).all()):  # a sum may also have run over
                return name
    return None
