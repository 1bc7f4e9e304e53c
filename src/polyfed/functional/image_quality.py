"""How alike two images are: PSNR and SSIM; and how restless one is: total variation.

Shapes: N images, C channels, H x W pixels, values in [0, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_SIGMA = 1.5  # pixels, of the Gaussian window of SSIM
_WINDOW = 11  # pixels a side
_K1, _K2 = 0.01, 0.03


def psnr(x: Tensor, y: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in decibels, image by image (N,): -10 log10 mean (x - y)^2; infinite if equal."""
    mse_N = (x - y).square().flatten(1).mean(dim=1)
    return 10 * torch.log10(1 / mse_N)


def ssim(x: Tensor, y: Tensor) -> Tensor:
    """Structural similarity, image by image (N,), 1 for equal ones: the mean of its index over windows and channels.

    A window is Gaussian, sigma 1.5 over 11 x 11 pixels, and lies wholly within the image; smaller images have the
    largest odd window that fits. Variances are those of the weighted pixels (divided by the weights' sum, not by one
    less). K1 = 0.01, K2 = 0.03.

    Source: Wang, Bovik, Sheikh, Simoncelli, IEEE Transactions on Image Processing 13(4), 2004, eq. 13 to 16.
    """
    window = _gaussian(x)

    def local_mean(image: Tensor) -> Tensor:
        return functional.conv2d(image, window, groups=image.shape[1])

    mean_x = local_mean(x)
    mean_y = local_mean(y)
    var_x = local_mean(x * x) - mean_x.square()
    var_y = local_mean(y * y) - mean_y.square()
    covariance = local_mean(x * y) - mean_x * mean_y
    c1 = _K1**2
    c2 = _K2**2
    above = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    below = (mean_x.square() + mean_y.square() + c1) * (var_x + var_y + c2)
    return (above / below).flatten(1).mean(dim=1)


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of neighbors, down plus across, image by image (N,); a side of one pixel counts 0."""
    down = x.diff(dim=2).abs().flatten(1)
    across = x.diff(dim=3).abs().flatten(1)
    return down.sum(dim=1) / max(1, down.shape[1]) + across.sum(dim=1) / max(1, across.shape[1])


def _gaussian(x: Tensor) -> Tensor:
    """The window for images like `x`: (C, 1, side, side), which sums to 1 for each channel."""
    largest = min(_WINDOW, x.shape[2], x.shape[3])
    side = largest - (1 - largest % 2)
    offsets = torch.arange(side, dtype=x.dtype, device=x.device) - side // 2
    weights = torch.exp(-offsets.square() / (2 * _SIGMA**2))
    weights = weights / weights.sum()
    return torch.outer(weights, weights).expand(x.shape[1], 1, side, side)
