"""Features of images (C, H, W): what filters find in patches of k x k pixels, averaged over g x g cells.

g = 3 and k = 5, or g = 2 and k = 3 where a side has 8 pixels or fewer (Coates and Ng, "Selecting receptive fields in
deep networks", NeurIPS 2011); of every average the square root, so that large ones vary less (Perronnin et al.,
"Improving the Fisher kernel", ECCV 2010). There are two kinds of filters:

    random   `filters`, `bias`: normal numbers, mean removed, norm 1; ReLU(filter . patch + bias), zeros around an image
    centers  `directions`, `offsets`: centers of normalized, whitened patches; ReLU(center . z - 1/2), patches within:
                 u = (p - mean of p) / (standard deviation of p + 0.3),  p: the d = C k k numbers of a patch
                 z = Z (u - m),  m, Sigma = V Lambda V': mean and covariance of u,  Z = V (Lambda + 0.03)^-1/2 V'
             The centers are those of spherical k-means (Coates and Ng, "Learning feature representations with
             k-means", 2012), which `scripts/photograph_filters.py` runs. Filters of one channel look at each channel of
             an image by itself.

Shapes: N images, P patches, d numbers of a patch, K filters, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_SMALL_SIDE = 8  # pixels
_BIAS = 0.25  # standard deviation of a bias
_SMALLEST = 1e-8  # smallest mean, and variance: its square root has a slope there
_IMAGES = 16  # at a time: their maps fit the caches, and their memory is used again
FLOOR = 0.3  # standard deviation below which a patch is rather flat than faint


def count_cells(shape: Sequence[int]) -> int:
    """g, cells of a side."""
    return 2 if min(shape[1:]) <= _SMALL_SIDE else 3


def patch_side(shape: Sequence[int]) -> int:
    """k, pixels of a patch's side."""
    return 2 * count_cells(shape) - 1


def find_features(made: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The features (N, D) of images by their filters."""
    pool = _pool_directions if "directions" in made else _pool_filters
    if torch.compiler.is_compiling():  # exported for any number of images
        return pool(made, x)
    return torch.cat([pool(made, images) for images in x.split(_IMAGES)])


def _average(maps: Tensor, side: int) -> Tensor:
    """(N, K, H, W), none of them below zero, to (N, K g g)."""
    means = F.adaptive_avg_pool2d(maps, (side + 1) // 2).flatten(1)
    return means.clamp(min=_SMALLEST).sqrt()


# random filters ------------------------------------------------------------------------------------------------------


def draw_filters(shape: Sequence[int], features: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Filters (K, C, k, k) and their biases (K,)."""
    side = patch_side(shape)
    count = max(1, features // count_cells(shape) ** 2)
    filters = torch.randn(count, shape[0], side, side, generator=generator)
    filters = filters - filters.mean(dim=(1, 2, 3), keepdim=True)
    filters = filters / filters.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    bias = _BIAS * torch.randn(count, generator=generator)
    return {"filters": filters, "bias": bias}


def _pool_filters(drawn: Mapping[str, Tensor], x: Tensor) -> Tensor:
    filters = drawn["filters"]
    side = filters.shape[-1]
    maps = F.conv2d(x, filters, drawn["bias"], padding=side // 2)
    return _average(maps.relu_(), side)


# centers of patches --------------------------------------------------------------------------------------------------


def _pool_directions(made: Mapping[str, Tensor], x: Tensor) -> Tensor:
    directions = made["directions"]
    channels, side = directions.shape[1], directions.shape[-1]
    each = x.reshape(-1, channels, *x.shape[2:])  # of gray filters and several channels: each channel is an image
    average = torch.full_like(directions[:1], 1 / directions[0].numel())
    mean = F.conv2d(each, average)
    variance = F.conv2d(each.square(), average) - mean.square()
    spread = variance.clamp(min=_SMALLEST).sqrt() + FLOOR
    maps = F.conv2d(each, directions) / spread - made["offsets"].view(-1, 1, 1)
    return _average(maps.relu_(), side).reshape(x.shape[0], -1)  # len would fix the number where it is exported
