"""From stored images to what a network sees: resizing and normalizing.

All are tensor functions of a batch, several times as fast as transforming image by image.

Shapes: N images, C channels (1 gray, 3 RGB), H x W pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from polyfed.data.samples import LabeledSamples
from polyfed.errors import ConfigError

_ROWS = 1000  # images that are floats at a time
_LEAST = 2.0**-126  # smallest std: below it float32 has fewer digits, and soon none


def resize(samples: LabeledSamples, size: int | tuple[int, int] | None) -> LabeledSamples:
    """Images of another size: bilinear, smoothed where they shrink, of the same type.

    Args:
        samples: x (N, C, H, W).
        size: pixels a side, or (height, width); None, or the size that they have, leaves them as they are.
    """
    x = samples.x
    size = (size, size) if isinstance(size, int) else size
    if size is None or x.shape[2:] == size:
        return samples
    if x.dim() != 4:
        raise ConfigError(f"data.image_size: expected images (N, C, H, W) to resize, got inputs {tuple(x.shape)}")
    parts = [functional.interpolate(p.float(), size, mode="bilinear", antialias=True) for p in x.split(_ROWS)]
    if x.dtype == torch.uint8:
        parts = [part.round().clamp(0, 255) for part in parts]
    whole = torch.cat([part.to(x.dtype) for part in parts])
    return LabeledSamples(whole, samples.y, samples.scale)


def convert_channels(x: Tensor, channels: int) -> Tensor:
    """Gray images as RGB (three equal channels), or RGB as gray (luma of ITU-R BT.601, as Pillow and JPEG have it).

    Args:
        x: (N, C, H, W) uint8, C 1 or 3.
        channels: 1 or 3.
    """
    if x.shape[1] == channels:
        return x
    if {x.shape[1], channels} != {1, 3}:
        raise ConfigError(f"expected gray (1) or RGB (3) images, got {x.shape[1]} channels to make {channels} of")
    if channels == 3:
        return x.repeat(1, 3, 1, 1)
    red, green, blue = x.to(torch.int32).unbind(1)
    gray: Tensor = (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16  # .299, .587, .114 times 65536
    return gray.to(torch.uint8).unsqueeze(1)


@dataclass(frozen=True)
class Prepare:
    """Stored inputs to network inputs: ``(x / 255 - mean) / std`` for uint8 images, on whatever device they are.

    Only uint8 means "a stored image". Rows of a table, floats (..., F) with F means, become ``(x - mean) / std``. Other
    float inputs are taken to be ready (embeddings, or images that the user has normalized) and pass unchanged, as int64
    does where there are no means (ids of words).

    Args:
        mean: per channel, in 0..1; or per feature of a table; empty for inputs that are ready.
        std: per channel, in 0..1, above 0; or per feature.
        table: whether mean and std are those of a table's features.

    Raises:
        ConfigError: as many means as stds are expected, and positive stds; on call: images with other channels, rows
            with other features.

    >>> Prepare((0.5,), (0.25,))(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
    tensor([[[[-2.,  2.]]]])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    table: bool = False

    def __post_init__(self) -> None:
        sane = all(_LEAST <= s <= 1 / _LEAST for s in self.std) and all(abs(m) <= 1 / _LEAST for m in self.mean)
        if len(self.mean) != len(self.std) or not sane:
            raise ConfigError(
                f"expected one positive std per mean, all finite in float32, got mean {self.mean} and std {self.std}"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """(..., C, H, W) uint8 to float32 of the same shape; (..., F) rows of a table likewise; others as they are."""
        if self.table:
            if not x.is_floating_point() or x.shape[-1] != len(self.mean):
                expected = f"expected rows of {len(self.mean)} features as floats"
                raise ConfigError(f"{expected}, got {tuple(x.shape)}, {x.dtype}")
            mean_F, std_F = self._constants(x.device)
            standardized: Tensor = (x - mean_F) / std_F
            return standardized
        if x.is_floating_point() or (x.dtype == torch.int64 and not self.mean):
            return x
        channels = len(self.mean)
        if x.dtype != torch.uint8 or x.dim() < 3 or x.shape[-3] != channels:
            raise ConfigError(
                f"expected uint8 images of shape (N, {channels}, H, W), got {tuple(x.shape)} of type {x.dtype}"
            )
        scale_C11, shift_C11 = self._constants(x.device)
        return x.to(torch.float32).mul_(scale_C11).add_(shift_C11)

    def of_features(self, places: Sequence[int]) -> Prepare:
        """The same of rows that have only some of a table's features."""
        return Prepare(tuple(self.mean[p] for p in places), tuple(self.std[p] for p in places), self.table)

    def _constants(self, device: torch.device) -> Tensor:
        """What bytes are multiplied by and what is added, (2, C, 1, 1); of a table mean and std, (2, F). Made once."""
        if device not in self._places:
            scale = [1 / (255 * s) for s in self.std]
            shift = [-m / s for m, s in zip(self.mean, self.std, strict=True)]
            with torch.inference_mode(False):  # whatever the caller is in
                if self.table:
                    made = torch.tensor([self.mean, self.std], dtype=torch.float32)
                else:
                    made = torch.tensor([scale, shift], dtype=torch.float32).view(2, -1, 1, 1)
                self._places[device] = made.to(device)
        return self._places[device]

    @functools.cached_property
    def _places(self) -> dict[torch.device, Tensor]:
        return {}
