"""Changes of images that leave their class: drawn for every batch that trains, or fixed, as views of a row.

All are tensor functions of a batch and draw from the generator that they are handed, so they repeat.

Shapes: N images, C channels, H x W pixels, V views.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from polyfed.errors import ConfigError
from polyfed.registry import suggest

_PADDING = 4  # pixels; He et al. 2016, and the authors' code of FedHeNN, FedGH and FedIN


@dataclass(frozen=True)
class Augmentation:
    """A random change of images before `Prepare`.

    Args:
        draw: (N, a generator) to what is drawn for N images, (N, ...), on the generator's device; of a generator on the
            CPU the same images come out on every device.
        apply: images (N, C, H, W) and what was drawn for them, on their device, to new images of their type;
            ConfigError where they are no batch of images.
        fixed: (V, ...), of what may be drawn the V that stand for all, where nothing is drawn; the first changes no
            image.
    """

    draw: Callable[[int, torch.Generator], Tensor]
    apply: Callable[[Tensor, Tensor], Tensor]
    fixed: Tensor

    def views(self) -> list[Callable[[Tensor], Tensor]]:
        """Functions of a batch of images (N, C, H, W), of which each changes every image alike."""
        return [functools.partial(self._view, drawn) for drawn in self.fixed]

    def _view(self, drawn: Tensor, x: Tensor) -> Tensor:
        return self.apply(x, drawn.to(x.device).expand(len(x), -1))


def _draw_crops(count: int, generator: torch.Generator) -> Tensor:
    """(N, 3): where each crop begins, down and across, and whether it is flipped."""
    device = generator.device
    corner_N2 = torch.randint(0, 2 * _PADDING + 1, (count, 2), generator=generator, device=device)
    flip_N1 = torch.randint(0, 2, (count, 1), generator=generator, device=device)
    return torch.cat([corner_N2, flip_N1], dim=1)


def _crop_and_flip(x: Tensor, drawn_N3: Tensor) -> Tensor:
    """Crops after padding with 4 black pixels, some of them flipped."""
    if x.dim() != 4:
        raise ConfigError(f"expected images of shape (N, C, H, W) to augment, got {tuple(x.shape)}")
    count, channels, height, width = x.shape
    down_N1, right_N1, flip_N1 = drawn_N3.split(1, dim=1)
    across_W = torch.arange(width, device=x.device)
    across_NW = torch.where(flip_N1 == 1, width - 1 - across_W, across_W) + right_N1
    down_NH = torch.arange(height, device=x.device) + down_N1
    padded = functional.pad(x, (_PADDING, _PADDING, _PADDING, _PADDING))
    pixel = down_NH[:, :, None] * (width + 2 * _PADDING) + across_NW[:, None, :]
    pixel = pixel.view(count, 1, height * width).expand(count, channels, height * width)
    return padded.flatten(2).gather(2, pixel).view(count, channels, height, width)


_MIDDLE, _LESS, _MORE = _PADDING, _PADDING // 2, _PADDING + _PADDING // 2  # where a crop begins
_CORNERS = [[_MIDDLE, _MIDDLE], [_LESS, _LESS], [_MORE, _MORE], [_LESS, _MORE], [_MORE, _LESS]]
_VIEWS = torch.tensor([[*corner, flip] for flip in (0, 1) for corner in _CORNERS])
augment = Augmentation(_draw_crops, _crop_and_flip, _VIEWS)  # a random crop, and a flip of every other image on average
AUGMENTATIONS: dict[str, Augmentation | None] = {"none": None, "crop-flip": augment}


def augmentation(name: str) -> Augmentation | None:
    """The augmentation of that name; None for "none"."""
    if name not in AUGMENTATIONS:
        raise ConfigError(f"unknown augmentation '{name}'{suggest(str(name), AUGMENTATIONS)}")
    return AUGMENTATIONS[name]
