"""Changes of images and series that leave their class: drawn for every batch that trains, or fixed, as views of a row.

All are tensor functions of a batch and draw from the generator that they are handed, so they repeat.

Shapes: N images or series, C channels, H x W pixels, L steps, V views.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from polyfed.errors import ConfigError
from polyfed.registry import suggest

_SHARE = 8  # of 32 pixels 4 are padded (He et al. 2016, and the authors' code of FedHeNN, FedGH and FedIN)
_FARTHEST = 10  # of 100 steps a series is shifted by 10 at most
_FORMS = {"images": "C, H, W", "series": "C, L"}


@dataclass(frozen=True)
class Augmentation:
    """A random change of inputs of one kind before `Prepare`.

    Args:
        kind: "images" (C, H, W) or "series" (C, L).
        draw: (N, the shape of an input, a generator) to what is drawn for N inputs, (N, ...), on the generator's
            device; of a generator on the CPU the same inputs come out on every device.
        change: inputs (N, ...) and what was drawn for them, on their device, to new inputs of their type.
        fixed: the shape of an input to (V, ...), of what may be drawn the V that stand for all, where nothing is drawn;
            the first changes no input.
    """

    kind: Literal["images", "series"]
    draw: Callable[[int, Sequence[int], torch.Generator], Tensor]
    change: Callable[[Tensor, Tensor], Tensor]
    fixed: Callable[[Sequence[int]], Tensor]

    def suits(self, shape: Sequence[int]) -> bool:
        """Whether inputs of this shape may be of the kind."""
        return len(shape) == len(_FORMS[self.kind].split(", "))

    def apply(self, x: Tensor, drawn: Tensor) -> Tensor:
        """`change`; ConfigError where x is no batch of inputs of the kind."""
        if not self.suits(x.shape[1:]):
            expected = f"expected {self.kind} of shape (N, {_FORMS[self.kind]}) to augment"
            raise ConfigError(f"{expected}, got {tuple(x.shape)}")
        return self.change(x, drawn)

    def views(self, shape: Sequence[int]) -> list[Callable[[Tensor], Tensor]]:
        """Functions of a batch of inputs of this shape, of which each changes every input alike."""
        return [functools.partial(self._view, drawn) for drawn in self.fixed(shape)]

    def _view(self, drawn: Tensor, x: Tensor) -> Tensor:
        return self.apply(x, drawn.to(x.device).expand(len(x), -1))


def _padding(shape: Sequence[int]) -> int:
    """Pixels on each side: an eighth of the shorter side, rounded."""
    return (min(shape[-2:]) + _SHARE // 2) // _SHARE


def _draw_crops(count: int, shape: Sequence[int], generator: torch.Generator, flips: bool) -> Tensor:
    """(N, 3): where each crop begins, down and across, and whether it is flipped."""
    device = generator.device
    corner_N2 = torch.randint(0, 2 * _padding(shape) + 1, (count, 2), generator=generator, device=device)
    flip_N1 = torch.randint(0, 2 if flips else 1, (count, 1), generator=generator, device=device)
    return torch.cat([corner_N2, flip_N1], dim=1)


def _crop_and_flip(x: Tensor, drawn_N3: Tensor) -> Tensor:
    """Crops after padding with black pixels, some of them flipped."""
    count, channels, height, width = x.shape
    padding = _padding(x.shape)
    down_N1, right_N1, flip_N1 = drawn_N3.split(1, dim=1)
    across_W = torch.arange(width, device=x.device)
    across_NW = torch.where(flip_N1 == 1, width - 1 - across_W, across_W) + right_N1
    down_NH = torch.arange(height, device=x.device) + down_N1
    padded = functional.pad(x, (padding, padding, padding, padding))
    pixel = down_NH[:, :, None] * (width + 2 * padding) + across_NW[:, None, :]
    pixel = pixel.view(count, 1, height * width).expand(count, channels, height * width)
    return padded.flatten(2).gather(2, pixel).view(count, channels, height, width)


def _shifts(shape: Sequence[int], flips: bool) -> Tensor:
    """The image and four shifts of it by half the padding, along the diagonals; with `flips` each flipped, too."""
    middle = _padding(shape)
    shift = (middle + 1) // 2
    less, more = middle - shift, middle + shift
    corners = [[middle, middle], [less, less], [more, more], [less, more], [more, less]]
    return torch.tensor([[*corner, flip] for flip in range(1 + flips) for corner in corners])


def _crops(flips: bool) -> Augmentation:
    draw, fixed = functools.partial(_draw_crops, flips=flips), functools.partial(_shifts, flips=flips)
    return Augmentation("images", draw, _crop_and_flip, fixed)


def _farthest(shape: Sequence[int]) -> int:
    """Steps by which a series is shifted at most: a tenth of it, rounded."""
    return (shape[-1] + _FARTHEST // 2) // _FARTHEST


def _draw_shifts(count: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """(N, 1): by how many steps each series is shifted."""
    most = _farthest(shape)
    return torch.randint(-most, most + 1, (count, 1), generator=generator, device=generator.device)


def _shift(x: Tensor, steps_N1: Tensor) -> Tensor:
    """Series that begin so many steps later, or earlier; what is then missing repeats the last value, or the first."""
    length = x.shape[2]
    from_NL = (torch.arange(length, device=x.device) + steps_N1).clamp(0, length - 1)
    return x.gather(2, from_NL.unsqueeze(1).expand_as(x))


def _both_ways(shape: Sequence[int]) -> Tensor:
    """The series as it is, and shifted both ways by as much as may be drawn, and by half of it."""
    most = _farthest(shape)
    half = (most + 1) // 2
    return torch.tensor([[0], [-half], [half], [-most], [most]])


AUGMENTATIONS: dict[str, Augmentation | None] = {
    "none": None,
    "crop": _crops(False),
    "crop-flip": _crops(True),  # and a flip of every other image on average
    "shift": Augmentation("series", _draw_shifts, _shift, _both_ways),
}


def augmentation(name: str) -> Augmentation | None:
    """The augmentation of that name; None for "none"."""
    if name not in AUGMENTATIONS:
        raise ConfigError(f"unknown augmentation '{name}'{suggest(str(name), AUGMENTATIONS)}")
    return AUGMENTATIONS[name]
