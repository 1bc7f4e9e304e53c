"""Changes of images that leave their class: drawn for every batch that trains, or fixed, as views of a row.

All are tensor functions of a batch and draw from the generator that they are handed, so they repeat.

Shapes: N images, C channels, H x W pixels, V views.
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
    """A random change of images before `Prepare`.

    Args:
        draw: (N, the shape of an image, a generator) to what is drawn for N images, (N, ...), on the generator's
            device; of a generator on the CPU the same images come out on every device.
        apply: images (N, C, H, W) and what was drawn for them, on their device, to new images of their type;
            ConfigError where they are no batch of images.
        fixed: the shape of an image to (V, ...), of what may be drawn the V that stand for all, where nothing is drawn;
            the first changes no image.
    """

    draw: Callable[[int, Sequence[int], torch.Generator], Tensor]
    apply: Callable[[Tensor, Tensor], Tensor]
    fixed: Callable[[Sequence[int]], Tensor]

    def views(self, shape: Sequence[int]) -> list[Callable[[Tensor], Tensor]]:
        """Functions of a batch of images of this shape (C, H, W), of which each changes every image alike."""
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
    if x.dim() != 4:
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


def _shifts(shape: Sequence[int], flips: bool) -> Tensor:
    """The image and four shifts of it by half the padding, along the diagonals; with `flips` each flipped, too."""
    middle = _padding(shape)
    shift = (middle + 1) // 2
    less, more = middle - shift, middle + shift
    corners = [[middle, middle], [less, less], [more, more], [less, more], [more, less]]
    return torch.tensor([[*corner, flip] for flip in range(1 + flips) for corner in corners])


def _crops(flips: bool) -> Augmentation:
    return Augmentation(
        functools.partial(_draw_crops, flips=flips), _crop_and_flip, functools.partial(_shifts, flips=flips)
    )


# a random crop; and a flip of every other image on average
AUGMENTATIONS: dict[str, Augmentation | None] = {"none": None, "crop": _crops(False), "crop-flip": _crops(True)}


def augmentation(name: str) -> Augmentation | None:
    """The augmentation of that name; None for "none"."""
    if name not in AUGMENTATIONS:
        raise ConfigError(f"unknown augmentation '{name}'{suggest(str(name), AUGMENTATIONS)}")
    return AUGMENTATIONS[name]
