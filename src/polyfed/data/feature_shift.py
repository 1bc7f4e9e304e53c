"""Feature skew: every client sees its images in a way of its own, turned, add_noise or tint.

The clients are spread evenly over what `strength` allows and dealt their places at random, so that any two differ:
client k gets place p in 0..K-1 and its images are changed once, before training.

* ``rotation``: turned anticlockwise by 360 strength p / K degrees about the center, bilinear, black outside.
* ``noise``: plus Gaussian noise of deviation strength (p + 1) / K, pixels being in 0..1 (after Li et al., ICDE 2022).
* ``color``: with the angle a = 2 pi p / K. RGB: channel c (0 red, 1 green, 2 blue) is multiplied by
  1 + strength cos(a - 2 pi c / 3), a tint that runs once round the color circle. Gray: contrast about the middle gray
  is multiplied by 1 + strength cos a, and strength sin(a) / 2 is added.

Strength lies in 0..1; 0 changes nothing, bit for bit. Results are rounded and clamped to uint8.

Shapes: N images, C channels (1 gray, 3 RGB), H x W pixels, K clients.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from polyfed.data.samples import LabeledSamples
from polyfed.errors import ConfigError
from polyfed.registry import suggest

SKEWS = ("none", "rotation", "noise", "color")

_ROWS = 1000  # images that are floats at a time
_MIDDLE = 127.5  # gray


@dataclass(frozen=True)
class FeatureShift:
    """How each client sees its images.

    Args:
        kind: one of `SKEWS`.
        strength: 0..1.
        clients: K.
        rng: purpose -> generator: "skew" deals the places, and each client's set has its own for noise.

    Raises:
        ConfigError: an unknown kind (with the nearest), a strength out of its range; on call: inputs that are no uint8
            images.
    """

    kind: str
    strength: float
    clients: int
    rng: Callable[[str], np.random.Generator]

    def __post_init__(self) -> None:
        if self.kind not in SKEWS:
            raise ConfigError(f"unknown feature_shift '{self.kind}'{suggest(str(self.kind), SKEWS)}")
        if not (isinstance(self.strength, numbers.Real) and 0 <= self.strength <= 1):
            raise ConfigError(f"expected a feature_shift_strength in 0..1, got {self.strength}")

    @property
    def enabled(self) -> bool:
        """Whether anything changes."""
        return self.kind != "none" and self.strength > 0

    def place(self, client: int) -> int:
        """The client's place p in 0..K-1."""
        return int(self.rng("skew").permutation(self.clients)[client])

    def __call__(self, samples: LabeledSamples, client: int, part: str) -> LabeledSamples:
        """One client's samples as it sees them; `part` ("train", "validation", "test") names the stream of noise."""
        if not self.enabled or len(samples) == 0:
            return samples
        _check_images(samples.x)
        part_of_K = self.place(client) / self.clients
        if self.kind == "rotation":
            x = rotate(samples.x, 360 * self.strength * part_of_K)
        elif self.kind == "noise":
            deviation = self.strength * (part_of_K + 1 / self.clients)
            x = add_noise(samples.x, deviation, self.rng(f"skew noise {client} {part}"))
        else:
            x = tint(samples.x, self.strength, 2 * math.pi * part_of_K)
        return LabeledSamples(x, samples.y, samples.scale)


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Images (N, C, H, W) uint8 turned anticlockwise about their center: bilinear, black outside, of the same size."""
    height, width = x.shape[2:]
    cos = math.cos(math.radians(degrees))
    sin = math.sin(math.radians(degrees))
    # where each pixel comes from, in units of half the width and half the height, y pointing down
    source = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    grid = functional.affine_grid(source[None], [1, 1, height, width], align_corners=False)

    def turn(part: Tensor) -> Tensor:
        return functional.grid_sample(
            part, grid.expand(len(part), -1, -1, -1), "bilinear", "zeros", align_corners=False
        )

    return _by_parts(x, turn)


def add_noise(x: Tensor, deviation: float, rng: np.random.Generator) -> Tensor:
    """Images (N, C, H, W) uint8 plus Gaussian noise of standard deviation `deviation`, of pixels in 0..1."""
    return _by_parts(
        x, lambda part: part + torch.from_numpy(rng.standard_normal(part.shape, np.float32)) * (255 * deviation)
    )


def tint(x: Tensor, strength: float, angle: float) -> Tensor:
    """Images (N, C, H, W) uint8 in another light: RGB by a gain per channel, gray by contrast and brightness.

    Args:
        x: C is 1 or 3.
        strength: 0..1.
        angle: in radians; which tint, or which mixture of contrast and brightness.
    """
    if x.shape[1] == 1:
        contrast = 1 + strength * math.cos(angle)
        middle = _MIDDLE * (1 + strength * math.sin(angle))
        return _by_parts(x, lambda part: (part - _MIDDLE) * contrast + middle)
    gains = [1 + strength * math.cos(angle - 2 * math.pi * channel / 3) for channel in range(3)]
    return _by_parts(x, lambda part: part * torch.tensor(gains).view(1, 3, 1, 1))


def _by_parts(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """`change` of uint8 images as floats, some rows at a time; rounded and clamped to uint8."""
    changed = torch.empty_like(x)
    for start in range(0, len(x), _ROWS):
        part = change(x[start : start + _ROWS].float())
        changed[start : start + _ROWS] = part.round_().clamp_(0, 255).to(torch.uint8)
    return changed


def _check_images(x: Tensor) -> None:
    if x.dtype != torch.uint8 or x.dim() != 4 or x.shape[1] not in (1, 3):
        raise ConfigError(
            f"data.feature_shift expects gray or RGB images stored as uint8, got {tuple(x.shape)} of {x.dtype}"
        )
