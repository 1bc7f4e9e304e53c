"""Clipping against NumPy: what is longer has the bound's norm, what is not keeps its bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed.functional.clipping import clip_by_global_norm, clip_factors, clip_rows

BOUNDS = [float(most) for most in np.random.default_rng(0).uniform(0.01, 50, 200)]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_are_numpys_and_one_is_one(dtype: torch.dtype) -> None:
    norms = drawn(50).abs().to(dtype) * 20
    for most in BOUNDS:
        found = clip_factors(norms, most)
        assert bool((found[norms <= most] == 1).all())
        np.testing.assert_allclose(found, np.minimum(1, most / norms.numpy()), rtol=1e-6)


def test_a_bound_that_is_never_reached_changes_no_bit() -> None:
    grads = {"w": drawn(4, 3), "b": drawn(3), "none": None}
    norm = float(sum(np.square(g.numpy()).sum() for g in grads.values() if g is not None) ** 0.5)
    for most in (norm + bound for bound in BOUNDS):
        found = clip_by_global_norm(grads, most)
        assert found["none"] is None
        assert all(torch.equal(g, found[name]) for name, g in grads.items() if g is not None)


def test_a_gradient_that_is_longer_has_the_bounds_norm_and_its_direction() -> None:
    grads = {"w": drawn(4, 3), "b": drawn(3)}
    flat = np.concatenate([g.numpy().ravel() for g in grads.values()])
    short = clip_by_global_norm(grads, 0.5)
    found = np.concatenate([g.numpy().ravel() for g in short.values() if g is not None])
    np.testing.assert_allclose(found, 0.5 * flat / np.linalg.norm(flat), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_only_rows_that_are_longer_are_shrunk(dtype: torch.dtype) -> None:
    s = drawn(64, 2, 3).to(dtype) * torch.linspace(0.1, 30, 64).to(dtype).view(-1, 1, 1)
    norms = np.linalg.norm(s.float().numpy().reshape(64, -1), axis=1)
    for most in BOUNDS:
        found = clip_rows(s, most)
        assert torch.equal(found[norms < most * 0.9999], s[norms < most * 0.9999])
        longer = np.linalg.norm(found.double().numpy().reshape(64, -1), axis=1)[norms > most]
        np.testing.assert_allclose(longer, most, rtol=2e-3 if dtype == torch.float16 else 1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3e38])
def test_a_row_without_a_finite_norm_becomes_zeros(value: float) -> None:
    s = torch.tensor([[3.0, 4.0], [value, value]])
    torch.testing.assert_close(clip_rows(s, 1.0), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
