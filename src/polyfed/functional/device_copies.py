"""Copies between main memory and GPUs: many tensors in few, as each copy makes a GPU wait."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_Known = dict[Hashable, tuple[Tensor, Tensor]]  # a tensor and its copy, which keep each other's memory
_known: ContextVar[_Known | None] = ContextVar("_known", default=None)


@contextmanager
def copy_once() -> Iterator[None]:
    """Within the block `move_together` does not copy again what has not changed since it was copied.

    Its results are shared then: copy one before changing it. A block within another shares what that one knows.
    """
    known = _known.get()
    before = _known.set({} if known is None else known)
    try:
        yield
    finally:
        _known.reset(before)


def move_together(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """The tensors, detached, each on its device.

    Those that are there already are not copied. Those that go the same way cross in one copy for each type.
    """
    found = [tensor.detach() for tensor in tensors]
    known = _known.get()
    numbered = {device: with_number(device) for device in set(devices)}
    ways: dict[tuple[torch.device, torch.device, torch.dtype], list[int]] = {}
    for place, (tensor, device) in enumerate(zip(found, devices, strict=True)):
        device = numbered[device]
        if tensor.device == device:
            continue
        if known is not None and memory_key(tensor, device) in known:
            found[place] = known[memory_key(tensor, device)][1]
        else:
            ways.setdefault((tensor.device, device, tensor.dtype), []).append(place)
    for (_, device, _), places in ways.items():
        whole = torch.cat([found[place].reshape(-1) for place in places])
        whole = whole.to(device, non_blocking=device.type == "cuda" and whole.is_cpu)  # such a copy is read at once
        parts = whole.split([found[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            tensor = found[place]
            found[place] = part.view(tensor.shape)
            if known is not None:
                known[memory_key(tensor, device)] = (tensor, found[place])
    return found


def move_group(tensors: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """Tensors by name, detached, on a device: see `move_together`."""
    found = move_together(list(tensors.values()), [torch.device(device)] * len(tensors))
    return dict(zip(tensors, found, strict=True))


def move_mappings(
    given: Sequence[Mapping[str, Any]], device: torch.device, wanted: Callable[[Tensor], bool] = lambda tensor: True
) -> Sequence[Mapping[str, Any]]:
    """The mappings with the tensors in them, also in groups, on a GPU: all of them in one copy for each type.

    What is the same for several stays the same. float64 stays where it is on devices that have none.
    """
    if device.type == "cpu":
        return given
    found = [{name: dict(v) if isinstance(v, Mapping) else v for name, v in each.items()} for each in given]
    groups = [*found, *(value for each in found for value in each.values() if isinstance(value, dict))]
    tensors = {id(t): t for group in groups for t in group.values() if isinstance(t, Tensor) and wanted(t)}
    if device.type != "cuda":
        tensors = {key: tensor for key, tensor in tensors.items() if tensor.dtype != torch.float64}
    there = dict(zip(tensors, move_together(list(tensors.values()), [device] * len(tensors)), strict=True))
    for group in groups:
        group.update({name: there[id(value)] for name, value in group.items() if id(value) in there})
    return found


def in_float64(tensor: Tensor) -> Tensor:
    """The tensor in float64; in main memory where its device has none."""
    return tensor.double() if tensor.device.type in ("cpu", "cuda") else tensor.cpu().double()


def with_number(device: torch.device) -> torch.device:
    """The device as tensors name theirs: "cuda" is the present one of several."""
    is_any = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_any else device


def memory_key(tensor: Tensor, device: torch.device) -> Hashable:
    """What is the same for two tensors of the same content in the same memory. device: where they go."""
    if tensor.is_inference():  # nothing tells whether it has changed
        return id(tensor), device
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor._version, device
