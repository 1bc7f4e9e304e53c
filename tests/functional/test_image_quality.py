"""PSNR, SSIM and total variation against NumPy loops, and what they must be whatever the image."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.functional.image_quality import psnr, ssim, total_variation


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ssim_by_windows(x: np.ndarray, y: np.ndarray, side: int) -> float:
    """Wang et al., eq. 13 to 16, window by window and channel by channel."""
    offsets = np.arange(side) - side // 2
    window = np.exp(-(offsets[:, None] ** 2 + offsets[None, :] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    c1, c2 = 0.01**2, 0.03**2
    values = []
    for one, other in zip(x, y, strict=True):
        for top in range(one.shape[0] - side + 1):
            for left in range(one.shape[1] - side + 1):
                a, b = (image[top : top + side, left : left + side] for image in (one, other))
                mean_a, mean_b = (window * a).sum(), (window * b).sum()
                var_a, var_b = (window * (a - mean_a) ** 2).sum(), (window * (b - mean_b) ** 2).sum()
                both = (window * (a - mean_a) * (b - mean_b)).sum()
                above = (2 * mean_a * mean_b + c1) * (2 * both + c2)
                values.append(above / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)))
    return float(np.mean(values))


def test_psnr_is_that_of_the_mean_squared_difference() -> None:
    x, y = images(3, 2, 6, 5), images(3, 2, 6, 5, seed=1)
    expected = [-10 * math.log10(np.mean((a.numpy() - b.numpy()) ** 2)) for a, b in zip(x, y, strict=True)]
    assert torch.allclose(psnr(x, y), torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(psnr(x, y), psnr(y, x))  # brighter or darker by as much is as far


def test_psnr_of_known_differences() -> None:
    x = images(2, 1, 4, 4)
    assert psnr(x, x).tolist() == [math.inf, math.inf]
    for away in (0.1, -0.1):
        assert torch.allclose(psnr(x, x + away), torch.full((2,), 20.0, dtype=torch.float64))
        assert torch.allclose(psnr(x, x + away / 10), torch.full((2,), 40.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("shape", "side"), [((1, 13, 12), 11), ((3, 11, 14), 11), ((1, 8, 8), 7), ((2, 5, 9), 5), ((1, 1, 4), 1)]
)
def test_ssim_is_that_of_its_windows(shape: tuple[int, ...], side: int) -> None:
    x, y = images(2, *shape), images(2, *shape, seed=1)
    near = (x + 0.2 * (y - x)).clamp(0, 1)
    for other in (y, near):
        expected = [ssim_by_windows(a.numpy(), b.numpy(), side) for a, b in zip(x, other, strict=True)]
        assert torch.allclose(ssim(x, other), torch.tensor(expected, dtype=torch.float64))


def test_total_variation_counts_both_directions() -> None:
    x = images(3, 2, 4, 5)
    down, across = np.abs(np.diff(x.numpy(), axis=2)), np.abs(np.diff(x.numpy(), axis=3))
    expected = down.mean(axis=(1, 2, 3)) + across.mean(axis=(1, 2, 3))
    assert torch.allclose(total_variation(x), torch.from_numpy(expected))
    assert torch.allclose(total_variation(1 - x), total_variation(x))
    assert total_variation(torch.full((1, 1, 3, 3), 0.7)).item() == 0
    assert total_variation(torch.tensor([[[[0.0, 1.0, 0.0]]]])).item() == 1
