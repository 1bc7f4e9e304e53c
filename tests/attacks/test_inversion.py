"""Features inverted, of functions whose answer is known; and how near images are, against NumPy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyfed.attacks.reconstruction import invert_features, psnr, total_variation
from polyfed.methods.building_blocks.feature_pairs import add_noise

SHAPE = (1, 6, 6)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal() -> nn.Module:
    """A linear extractor that can be inverted exactly: 36 numbers to 36."""
    with torch.no_grad():
        layer = nn.Linear(36, 36, bias=False)
        layer.weight.copy_(torch.linalg.qr(drawn(36, 36, seed=3))[0])
    return nn.Sequential(nn.Flatten(), layer).requires_grad_(False)


def smooth(count: int) -> Tensor:
    """Images in [0, 1] with structure, (count, 1, 6, 6)."""
    ramp = torch.linspace(0, 1, 6)
    faces = [ramp.view(1, 6).expand(6, 6), ramp.view(6, 1).expand(6, 6), 1 - ramp.view(6, 1).expand(6, 6)]
    return torch.stack([faces[k % 3] * (1 - 0.1 * k) for k in range(count)]).unsqueeze(1)


def attacked(s: Tensor, seed: int = 7, **options: object) -> Tensor:
    given = {"steps": 150, "lr": 0.1, "tv": 0.0, **options}
    return invert_features(EXTRACTOR, s, drawn(len(s), *SHAPE, seed=seed), **given)[0]  # type: ignore[arg-type]


EXTRACTOR = orthogonal()


def test_the_more_noise_the_further() -> None:
    x = smooth(6)
    s = EXTRACTOR(x)
    noisy = [s, *(add_noise(s, level, drawn(*s.shape, seed=5)) for level in (0.4, 0.8, 1.2))]
    found = [float(psnr(attacked(each), x).mean()) for each in noisy]
    assert found[0] > 50, "an invertible extractor gives the images away"
    assert all(before - after > 1 for before, after in itertools.pairwise(found))
    # sigma is that of s; an orthogonal map brings the noise back as it is
    expected = psnr(x, x + 0.8 * float(s.std(correction=0)) * drawn(*x.shape, seed=9)).mean()
    assert abs(found[2] - float(expected)) < 1


def test_the_prior_smooths_and_repairs_noise() -> None:
    x = smooth(6)
    s = add_noise(EXTRACTOR(x), 0.8, drawn(6, 36, seed=5))
    plain, prior = attacked(s), attacked(s, tv=0.5)
    assert bool((total_variation(prior) < total_variation(plain)).all())
    assert float(psnr(prior, x).mean()) > float(psnr(plain, x).mean()) + 1


def test_a_row_is_attacked_alike_whatever_is_beside_it() -> None:
    s, start = EXTRACTOR(smooth(3)), drawn(3, *SHAPE)
    together = invert_features(EXTRACTOR, s, start, steps=40, lr=0.05, tv=0.1)
    for row in range(3):
        k = slice(row, row + 1)
        alone = invert_features(EXTRACTOR, s[k], start[k], steps=40, lr=0.05, tv=0.1)
        assert torch.allclose(alone[0], together[0][k], atol=1e-5)
        assert torch.allclose(alone[1], together[1][k], atol=1e-6)


def test_the_loss_is_what_it_says() -> None:
    s = drawn(2, 36, seed=1)
    for steps, tv in ((0, 0.3), (3, 0.3), (3, 0.0)):
        x, losses = invert_features(EXTRACTOR, s, drawn(2, *SHAPE), steps=steps, lr=0.1, tv=tv, pixel=0.25)
        for row in range(2):
            off = ((x[row].flatten() @ EXTRACTOR[1].weight.T - s[row]) ** 2).mean() / (s[row] ** 2).mean()
            steep = (x[row] * 0.25).diff(dim=1).abs().mean() + (x[row] * 0.25).diff(dim=2).abs().mean()
            assert float(losses[row]) == pytest.approx(float(off + tv * steep), rel=1e-4)


def test_features_that_are_all_zero_are_a_target_too() -> None:
    x, loss = invert_features(nn.Flatten(), torch.zeros(1, 36), drawn(1, *SHAPE), steps=200, lr=0.05, tv=0.0)
    assert bool(torch.isfinite(x).all())
    assert bool(torch.isfinite(loss).all())
    assert float(x.abs().max()) < 0.1


def test_psnr_is_that_of_the_mean_squared_difference() -> None:
    x, y = uniform(3, 2, 6, 5), uniform(3, 2, 6, 5, seed=1)
    expected = [-10 * math.log10(np.mean((a.numpy() - b.numpy()) ** 2)) for a, b in zip(x, y, strict=True)]
    assert torch.allclose(psnr(x, y), torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(psnr(x, y), psnr(y, x))  # brighter or darker by as much is as far


def test_psnr_of_known_differences() -> None:
    x = uniform(2, 1, 4, 4)
    assert psnr(x, x).tolist() == [math.inf, math.inf]
    for away in (0.1, -0.1):
        assert torch.allclose(psnr(x, x + away), torch.full((2,), 20.0, dtype=torch.float64))
        assert torch.allclose(psnr(x, x + away / 10), torch.full((2,), 40.0, dtype=torch.float64))


def test_total_variation_counts_both_directions() -> None:
    x = uniform(3, 2, 4, 5)
    down, across = np.abs(np.diff(x.numpy(), axis=2)), np.abs(np.diff(x.numpy(), axis=3))
    expected = down.mean(axis=(1, 2, 3)) + across.mean(axis=(1, 2, 3))
    assert torch.allclose(total_variation(x), torch.from_numpy(expected))
    assert torch.allclose(total_variation(1 - x), total_variation(x))
    assert total_variation(torch.full((1, 1, 3, 3), 0.7)).item() == 0
    assert total_variation(torch.tensor([[[[0.0, 1.0, 0.0]]]])).item() == 1
