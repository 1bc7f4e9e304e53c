"""Sub-models cut from one large model by width: which channels, where they are, cutting them out.

A network's channels form *groups*: all tensors on one residual stream share one, a hidden layer is one of its own. A
plan says for every dimension of every tensor which group it belongs to; a sub-model has some channels of each group.
Nothing here knows how a plan is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

WHOLE = 0  # the group of every dimension that is never cut: inputs, kernels
OUTPUT = 1  # the group of the classes: no sub-model cuts it, but who lacks a class may have no say in its row

Channels = Mapping[int, Tensor]  # group -> its channels that a sub-model has, (L,) int64; of a group not in it, all


class Axis(NamedTuple):
    """One dimension of a tensor: the group of its channels, each `repeat` entries long (pixels, once flattened)."""

    group: int
    repeat: int = 1

    def entries(self, channels: Tensor) -> Tensor:
        """The entries of this dimension that so many channels have: those of the first channel, of the next, ..."""
        if self.repeat == 1:
            return channels
        return (channels[:, None] * self.repeat + torch.arange(self.repeat, device=channels.device)).flatten()


@dataclass(frozen=True)
class ChannelPlan:
    """Which channels a network has, and where.

    axes: tensor name -> one axis per dimension. sizes: group -> its number of channels, of the groups that are cut.
    """

    axes: Mapping[str, tuple[Axis, ...]]
    sizes: Mapping[int, int]

    def channels(self, window: Callable[[int], Tensor]) -> dict[int, Tensor]:
        """The channels of every group that is cut. window: number of channels -> those that a sub-model has."""
        return {group: window(size) for group, size in self.sizes.items()}

    def entries(self, name: str, channels: Channels, shape: Sequence[int]) -> tuple[Tensor, ...]:
        """An index to the entries of a tensor of this name and shape that are of these channels.

        Trailing dimensions of which nothing is cut are left out.
        """
        axes = self.axes[name]
        last = max((dim for dim, axis in enumerate(axes) if axis.group in channels), default=-1)
        entries = [
            axis.entries(channels[axis.group]) if axis.group in channels else torch.arange(size)
            for axis, size in zip(axes[: last + 1], shape, strict=False)
        ]
        return torch.meshgrid(*entries, indexing="ij") if entries else ()


def width(size: int, rate: float) -> int:
    """ceil(rate * size), at least 1: how many of so many channels a sub-model keeps.

    >>> [width(10, rate) for rate in (1.0, 0.5, 0.1, 0.07)], width(100, 0.07)
    ([10, 5, 1, 1], 7)
    """
    return max(1, math.ceil(rate * size - 1e-9))  # 0.07 * 100 is a little more than 7


def first_channels(size: int, rate: float) -> Tensor:
    """The first ceil(rate * size) channels (HeteroFL)."""
    return torch.arange(width(size, rate))


def slice_channels(plan: ChannelPlan, tensors: Mapping[str, Tensor], channels: Channels) -> dict[str, Tensor]:
    """The sub-model's tensors; those of which nothing is cut are handed on as they are. Differentiable.

    Args:
        plan: knows every name in `tensors`. tensors: of the large model. channels: of the sub-model, by group.

    >>> plan = ChannelPlan({"weight": (Axis(OUTPUT), Axis(2, repeat=2))}, {2: 3})
    >>> slice_channels(plan, {"weight": torch.arange(6).reshape(1, 6)}, {2: torch.tensor([2, 0])})
    {'weight': tensor([[4, 5, 0, 1]])}
    """
    small = {}
    for name, tensor in tensors.items():
        for dim, axis in enumerate(plan.axes[name]):
            if axis.group in channels:
                tensor = tensor.index_select(dim, axis.entries(channels[axis.group]).to(tensor.device))
        small[name] = tensor
    return small
