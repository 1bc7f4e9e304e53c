"""Copies between main memory and GPUs: many tensors in few, as each copy makes a GPU wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["move_together"]


def move_together(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """The tensors, detached, each on its device.

    Those that are there already are not copied. Those that go the same way cross in one copy for each type.
    """
    found = [tensor.detach() for tensor in tensors]
    ways: dict[tuple[torch.device, torch.device, torch.dtype], list[int]] = {}
    for place, (tensor, device) in enumerate(zip(found, devices, strict=True)):
        if tensor.device != device:
            ways.setdefault((tensor.device, device, tensor.dtype), []).append(place)
    for (_, device, _), places in ways.items():
        whole = torch.cat([found[place].reshape(-1) for place in places]).to(device)
        parts = whole.split([found[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            found[place] = part.view(found[place].shape)
    return found
