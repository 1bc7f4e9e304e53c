"""Changes of images that leave their class: drawn for every batch that trains, or fixed, as views of a row.

All are tensor functions of a batch and draw from the generator that they are handed, so they repeat.

Shapes: N images, C channels, H x W pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from polyfed.errors import ConfigError
from polyfed.registry import suggest

_SHARE = 8  # of 32 pixels 4 are padded (He et al. 2016, and the authors' code of FedHeNN, FedGH and FedIN)


@dataclass(frozen=True)
class Augmentation:
    """Random crops of images (C, H, W) after padding, before `Prepare`. flips: and a flip of every other on average."""

    flips: bool

    @staticmethod
    def suits(shape: Sequence[int]) -> bool:
        """Whether inputs of this shape may be images."""
        return len(shape) == 3

    def draw(self, count: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Where each of N crops begins, down and across, and whether it is flipped: (N, 3), on the generator's device;
        of a generator on the CPU the same images come out on every device.
        """
        device = generator.device
        corner_N2 = torch.randint(0, 2 * _padding(shape) + 1, (count, 2), generator=generator, device=device)
        flip_N1 = torch.randint(0, 2 if self.flips else 1, (count, 1), generator=generator, device=device)
        return torch.cat([corner_N2, flip_N1], dim=1)

    def apply(self, x: Tensor, drawn_N3: Tensor) -> Tensor:
        """Images (N, ...) cropped after padding with black pixels, some of them flipped.

        Raises:
            ConfigError: x is no batch of images.
        """
        if not self.suits(x.shape[1:]):
            raise ConfigError(f"expected images of shape (N, C, H, W) to augment, got {tuple(x.shape)}")
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

    def views(self, shape: Sequence[int]) -> list[Callable[[Tensor], Tensor]]:
        """Functions of a batch of images of this shape, of which each changes every image alike, and the first none.

        They stand for all that may be drawn: the image and four shifts of it by half the padding, along the diagonals;
        with `flips` each flipped, too.
        """
        middle = _padding(shape)
        shift = (middle + 1) // 2
        less, more = middle - shift, middle + shift
        corners = [[middle, middle], [less, less], [more, more], [less, more], [more, less]]
        fixed = torch.tensor([[*corner, flip] for flip in range(1 + self.flips) for corner in corners])
        return [functools.partial(self._view, drawn) for drawn in fixed]

    def _view(self, drawn: Tensor, x: Tensor) -> Tensor:
        return self.apply(x, drawn.to(x.device).expand(len(x), -1))


def _padding(shape: Sequence[int]) -> int:
    """Pixels on each side: an eighth of the shorter side, rounded."""
    return (min(shape[-2:]) + _SHARE // 2) // _SHARE


AUGMENTATIONS: dict[str, Augmentation | None] = {
    "none": None,
    "crop": Augmentation(flips=False),
    "crop-flip": Augmentation(flips=True),
}


def augmentation(name: str) -> Augmentation | None:
    """The augmentation of that name; None for "none"."""
    if name not in AUGMENTATIONS:
        raise ConfigError(f"unknown augmentation '{name}'{suggest(str(name), AUGMENTATIONS)}")
    return AUGMENTATIONS[name]
