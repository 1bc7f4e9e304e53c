"""Fixed maps of prepared inputs to features.

A map is made once and never trained. What it does follows from the names and shapes of its tensors, and not from their
numbers, so that it can be exported (`torch.export`). It is made for the form of an input:

    images (C, H, W)  `filters`, or `directions` and `offsets`, of patches (`feature_maps.images`)
    series (C, L)     `kernels of dilation ...` (`feature_maps.series`)
    numbers (F,)      `projection` (`feature_maps.numbers`)
    ids (L,), whole   `words` (`feature_maps.texts`)

Unit features have norm 1 in every row, so that a sum of them, or of their products, changes by 1 with a row: what the
features of inputs without structure have in common (`common`, the mean over normal numbers) is projected out first, as
it is most of a row and tells nothing of its class. Both are done to each row by itself and look at no data.

Shapes: N inputs, D features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.functional.feature_maps import images, numbers, series, texts
from polyfed.functional.feature_maps import photographs as photograph_filters

_STRANGERS = 100  # inputs of normal numbers, for what features have in common
_WITHIN = 1 - 2**-20  # a unit feature's norm, which rounding then leaves below 1


@dataclass(frozen=True)
class FeatureMap:
    """phi, a map of prepared inputs to features. Its tensors, by name, are all that is to be stored of it."""

    tensors: Mapping[str, Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """The features (N, D) of prepared inputs (N, ...), in float32, where the inputs are; all finite.

        A row of which a feature is not finite is zeros: in a sum it would hide all others, and no noise would hide it.
        """
        here = {name: tensor.to(x.device) for name, tensor in self.tensors.items()}
        if "words" in here:
            return texts.find_words(x, len(self.tensors["words"]))
        return bound_rows(_features(here, x), here.get("common"))


def draw_map(
    x: Tensor,
    features: int,
    generator: torch.Generator,
    categories: Sequence[int] = (),
    words: int = 0,
    unit: bool = False,
    photographs: bool = False,
) -> FeatureMap:
    """Draw a map for inputs like `x` (N, ...), which is read for its form alone.

    Args:
        features: D, or a few less where filters have several features each; of ids without known `words`.
        categories: of rows of a table, per feature, how many categories there are, 0 for a number.
        words: V, how many ids there are; 0: not known, so that ids share `features` counts.
        unit: whether rows of features have norm 1; not of ids.
        photographs: of images, whether filters are those of photographs, of which none is drawn.
    """
    shape = x.shape[1:]
    if not x.is_floating_point():
        return FeatureMap({"words": torch.arange(words or features, dtype=torch.int32)})
    if len(shape) == 3 and photographs:
        drawn = photograph_filters.filters(shape, features)
    elif len(shape) == 3:
        drawn = images.draw_filters(shape, features, generator)
    elif len(shape) == 2:
        drawn = series.draw_kernels(shape, features, generator)
    else:
        drawn = numbers.draw_projection(math.prod(shape), features, generator, categories)
    if unit:
        drawn["common"] = common_direction(functools.partial(_features, drawn), shape, generator)
    return FeatureMap(drawn)


def common_direction(features: Callable[[Tensor], Tensor], shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """What the features of inputs without structure have in common, (D,): their mean over normal numbers, of norm 1."""
    strangers = torch.randn(_STRANGERS, *shape, generator=generator)
    return F.normalize(features(strangers).mean(dim=0), dim=0)


def bound_rows(phi_ND: Tensor, common_D: Tensor | None) -> Tensor:
    """Features, all finite; those of unit features without their common direction, and of norm 1.

    Args:
        common_D: see `common_direction`; None: rows keep their norms.
    """
    if common_D is not None:
        without_ND = phi_ND - torch.outer(phi_ND @ common_D, common_D)
        phi_ND = F.normalize(without_ND, dim=1) * _WITHIN
    return torch.where(phi_ND.isfinite().all(dim=1, keepdim=True), phi_ND, 0.0)


def count_features(x: Tensor, features: int, photographs: bool = False) -> int | None:
    """D of the map that `draw_map` draws for inputs like `x`; None for ids, of which it need not know how many.

    Raises:
        ValueError: photographs give no such map, see `feature_maps.photographs`.
    """
    shape = x.shape[1:]
    if not x.is_floating_point():
        return None
    if len(shape) == 3 and photographs:
        return photograph_filters.count_features(shape, features)
    if len(shape) == 3:
        cells = images.count_cells(shape)
        return cells**2 * max(1, features // cells**2)
    return 2 * max(1, features // 2) if len(shape) == 2 else features


def _features(here: Mapping[str, Tensor], x: Tensor) -> Tensor:
    if "filters" in here or "directions" in here:
        return images.find_features(here, x)
    if "projection" in here:
        return numbers.project(here, x)
    return series.convolve(here, x)
