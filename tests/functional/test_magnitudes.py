"""Thresholds by sorting in NumPy, the gradient by its formula and by finite differences of a smooth mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed.functional.magnitudes import keep_large, magnitude_threshold


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.29, 0.07, 0.001])
def test_the_threshold_is_the_magnitude_of_the_last_entry_that_is_kept(share: float) -> None:
    tensors = [drawn(5, 8), drawn(60, seed=1)]
    sizes = np.sort(np.abs(np.concatenate([t.numpy().ravel() for t in tensors])))[::-1]
    kept = max(1, round(share * 100 - 0.49))
    theta = magnitude_threshold(tensors, share)
    assert float(theta) == sizes[kept - 1]
    assert sum(int((t.abs() >= theta).sum()) for t in tensors) == kept


def test_equal_magnitudes_are_all_kept() -> None:
    x = torch.tensor([1.0, -1.0, 1.0, 0.5])
    assert int((x.abs() >= magnitude_threshold([x], 0.25)).sum()) == 3


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_shares_that_are_none(share: float) -> None:
    with pytest.raises(ValueError, match="expected entries and a share above 0 and up to 1, got 2 and"):
        magnitude_threshold([torch.ones(2)], share)
    with pytest.raises(ValueError, match="got 0 and"):
        magnitude_threshold([torch.ones(0)], 0.5)


def test_values_and_gradient_by_hand() -> None:
    x = drawn(200).requires_grad_()
    theta, weights = torch.tensor(0.7, dtype=torch.float64), drawn(200, seed=1)
    y = keep_large(x, theta)
    (weights * y).sum().backward()
    v, t, kept = x.detach().numpy(), 0.7, np.abs(x.detach().numpy()) >= 0.7
    np.testing.assert_array_equal(y.detach().numpy(), np.where(kept, v, 0.0))
    slope = np.where(kept, 1 + 2 * np.abs(v) * t / (np.abs(v) + t) ** 2, 0.0)
    np.testing.assert_allclose(x.grad.numpy(), weights.numpy() * slope, atol=1e-12)  # type: ignore[union-attr]
    assert 1 < slope[kept].min() < slope[kept].max() <= 1.5
    assert 0 < kept.sum() < 200


def test_the_bias_is_the_derivative_of_a_smooth_mask() -> None:
    """m(|x|) = -2 theta / (|x| + theta) has the derivative that the mask is given; sign and scale included."""
    theta, h = 0.4, 1e-6
    for value in (0.9, -0.9, 0.41):
        x = torch.tensor([value], dtype=torch.float64, requires_grad=True)
        keep_large(x, torch.tensor(theta, dtype=torch.float64)).sum().backward()
        up, down = (-2 * theta / (abs(value + step) + theta) for step in (h, -h))
        assert float(x.grad) == pytest.approx(1 + value * (up - down) / (2 * h), abs=1e-6)  # type: ignore[arg-type]


def test_threshold_0_is_the_tensor_itself_with_its_plain_gradient() -> None:
    x = torch.tensor([0.0, -2.0, 3.0], requires_grad=True)
    y = keep_large(x, torch.tensor(0.0))
    y.sum().backward()
    assert torch.equal(y, x)
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0, 1.0]


def test_it_runs_under_vmap_and_grad() -> None:
    x, theta = drawn(4, 6), torch.tensor([0.2, 0.5, 1.0, 0.0], dtype=torch.float64)
    slope = torch.func.grad(lambda one, t: keep_large(one, t).square().sum())
    found = torch.func.vmap(slope)(x, theta)
    for row in range(4):
        torch.testing.assert_close(found[row], slope(x[row], theta[row]))
