"""Filters made of centers of patches, as the program of the photographs' filters makes them: against loops."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.functional.feature_maps.feature_map import FeatureMap

MADE = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "photograph_filters.py")))


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


IMAGES = torch.randn(20, 2, 12, 10, generator=stream(1))


def patches_of(x: Tensor, side: int) -> np.ndarray:
    """(N, H', W', d), normalized, by loops."""
    pixels = x.double().numpy()
    rows, columns = (size - side + 1 for size in x.shape[2:])
    found = np.zeros((len(x), rows, columns, x.shape[1] * side * side))
    for n, i, j in np.ndindex(*found.shape[:3]):
        patch = pixels[n, :, i : i + side, j : j + side].ravel()
        found[n, i, j] = (patch - patch.mean()) / (patch.std() + 0.3)
    return found


def whitened(x: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whitened patches z (P, d), m and Z."""
    u = MADE.normalize_patches(x.double(), side)
    mean, matrix = MADE.whitening(len(u), u.sum(dim=0), u.T @ u)
    return (u - mean) @ matrix, mean, matrix


def test_patches_are_normalized_one_by_one() -> None:
    found = MADE.normalize_patches(IMAGES, 5)
    np.testing.assert_allclose(found, patches_of(IMAGES, 5).reshape(-1, 50), atol=1e-5)


def test_whitening_makes_directions_vary_alike() -> None:
    u = MADE.normalize_patches(IMAGES, 3)
    mean, matrix = whitened(IMAGES, 3)[1:]
    covariance = np.cov(u.double().numpy().T, bias=True)
    np.testing.assert_allclose(mean, u.double().mean(dim=0), atol=1e-6)
    raised = covariance + 0.03 * np.eye(len(covariance))
    np.testing.assert_allclose(matrix.numpy() @ raised @ matrix.numpy(), np.eye(len(covariance)), atol=1e-5)


def test_a_step_sums_the_patches_nearest_by_angle_and_adds_up() -> None:
    z = whitened(IMAGES, 3)[0]
    centers = torch.nn.functional.normalize(torch.randn(7, 18, generator=stream(2), dtype=torch.float64), dim=1)
    expected = np.zeros((7, 18))
    for one in z.numpy():
        cosines = [float(one @ center) / np.linalg.norm(one) for center in centers.numpy()]
        expected[int(np.argmax(cosines))] += one
    found = MADE.sum_nearest(z, centers)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    torch.testing.assert_close(MADE.sum_nearest(z[:99], centers) + MADE.sum_nearest(z[99:], centers), found)


@pytest.mark.parametrize(("side", "cells"), [(5, 3), (3, 2)])
def test_features_are_root_means_of_what_centers_answer(side: int, cells: int) -> None:
    z, mean, matrix = whitened(IMAGES, side)
    centers = MADE.sum_nearest(z, torch.nn.functional.normalize(z[::300], dim=1))
    centers = torch.nn.functional.normalize(centers, dim=1)
    found = FeatureMap(MADE.filters_of_centers(centers, mean, matrix, 2, side))(IMAGES[:4])
    answers = (patches_of(IMAGES[:4], side) - mean.numpy()) @ matrix.numpy() @ centers.numpy().T - 0.5
    maps = torch.from_numpy(np.maximum(answers, 0)).permute(0, 3, 1, 2)
    expected = torch.nn.functional.adaptive_avg_pool2d(maps, cells).flatten(1).clamp(min=1e-8).sqrt()
    assert found.shape == (4, len(centers) * cells**2)
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-3)


def test_gray_filters_look_at_each_channel_by_itself() -> None:
    z, mean, matrix = whitened(IMAGES[:, :1], 5)
    made = FeatureMap(MADE.filters_of_centers(torch.nn.functional.normalize(z[:3], dim=1), mean, matrix, 1, 5))
    torch.testing.assert_close(made(IMAGES), torch.cat([made(IMAGES[:, :1]), made(IMAGES[:, 1:])], dim=1))


def test_light_does_not_change_features_where_patches_are_not_faint() -> None:
    z, mean, matrix = whitened(IMAGES, 5)
    made = FeatureMap(MADE.filters_of_centers(torch.nn.functional.normalize(z[:9], dim=1), mean, matrix, 2, 5))
    torch.testing.assert_close(made(IMAGES + 3), made(IMAGES), atol=1e-3, rtol=1e-3)
    assert float(made(1000 * IMAGES).max()) < 3, "features are bounded, whatever the scale"
    assert not made(torch.full_like(IMAGES, torch.inf)).any()
