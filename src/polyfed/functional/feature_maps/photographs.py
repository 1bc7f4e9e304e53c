"""Filters of images made of the patches of two photographs, the same for everybody: `scripts/photograph_filters.py`.

`photographs.safetensors` has 256 of them, as `images` makes filters of centers, for images of 1 and 3 channels and for
patches of 3 x 3 and 5 x 5 pixels. They stand in an order in which any first ones serve. Images with another number of
channels get gray filters for each channel.

Shapes: K filters, D features.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Sequence

import safetensors.torch
from torch import Tensor

from polyfed.functional.feature_maps import images

FILE = importlib.resources.files(__package__).joinpath("photographs.safetensors")
_CHANNELS = (1, 3)


def filters(shape: Sequence[int], features: int) -> dict[str, Tensor]:
    """Directions (K, C, k, k) and offsets (K,), for `features` of images of this shape (C, H, W)."""
    channels = shape[0] if shape[0] in _CHANNELS else 1
    name = f"{channels} x {images.patch_side(shape)} x {images.patch_side(shape)}"
    count = _count_filters(shape, features)
    return {kind: _read()[f"{kind} {name}"][:count].float() for kind in ("directions", "offsets")}


def count_features(shape: Sequence[int], features: int) -> int:
    """D of `filters`: `features`, or a few less, as a filter gives one for every cell, and every channel of its own.

    Raises:
        ValueError: there are not as many filters, or an image holds no patch.
    """
    side, each = images.patch_side(shape), _features_of_a_filter(shape)
    if min(shape[1:]) < side:
        raise ValueError(
            f"expected images of at least {side} x {side} pixels for the filters of photographs, got {tuple(shape[1:])}"
        )
    count, most = _count_filters(shape, features), len(_read()["offsets 1 x 3 x 3"])
    if count > most:
        raise ValueError(
            f"expected at most {most * each} features of images {tuple(shape)} by the filters of photographs, "
            f"got {features}; map = 'random' has any number"
        )
    return count * each


def _count_filters(shape: Sequence[int], features: int) -> int:
    return max(1, features // _features_of_a_filter(shape))


def _features_of_a_filter(shape: Sequence[int]) -> int:
    times = 1 if shape[0] in _CHANNELS else shape[0]
    return times * images.count_cells(shape) ** 2


@functools.cache
def _read() -> dict[str, Tensor]:
    return safetensors.torch.load(FILE.read_bytes())
