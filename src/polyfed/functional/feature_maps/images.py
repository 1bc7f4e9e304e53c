"""Random patch filters: features of images (C, H, W).

K patches k x k, mean removed, norm 1; ReLU of the convolution plus a bias, averaged over g x g cells; g = 3 and k = 5,
or g = 2 and k = 3 where a side has 8 or fewer (Coates and Ng, "Selecting receptive fields in deep networks", NeurIPS
2011); then the square root, so that large means vary less (Perronnin et al., "Improving the Fisher kernel", ECCV 2010).

Shapes: N images, K filters, D = K g^2 features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_SMALL_SIDE = 8  # pixels
_BIAS = 0.25  # standard deviation of a bias
_SMALLEST = 1e-8  # smallest mean: its square root has a slope there
_IMAGES = 16  # at a time: their maps fit the caches, and their memory is used again


def draw_filters(shape: Sequence[int], features: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Filters (K, C, k, k) and their biases (K,)."""
    cells = count_cells(shape)
    side = 2 * cells - 1
    count = max(1, features // cells**2)
    filters = torch.randn(count, shape[0], side, side, generator=generator)
    filters = filters - filters.mean(dim=(1, 2, 3), keepdim=True)
    filters = filters / filters.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    bias = _BIAS * torch.randn(count, generator=generator)
    return {"filters": filters, "bias": bias}


def count_cells(shape: Sequence[int]) -> int:
    """g, cells of a side."""
    return 2 if min(shape[1:]) <= _SMALL_SIDE else 3


def pool_patches(drawn: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The features (N, D) of images."""
    if torch.compiler.is_compiling():  # exported for any number of images
        return _pool(drawn, x)
    return torch.cat([_pool(drawn, some) for some in x.split(_IMAGES)])


def _pool(drawn: Mapping[str, Tensor], x: Tensor) -> Tensor:
    filters = drawn["filters"]
    side = filters.shape[-1]
    maps = F.conv2d(x, filters, drawn["bias"], padding=side // 2)
    means = F.adaptive_avg_pool2d(maps.relu_(), (side + 1) // 2).flatten(1)
    return means.clamp(min=_SMALLEST).sqrt()
