"""Semantic anchors against PyTorch's layers and NumPy, directions on the sphere against a loop over pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.functional.server_prototypes import draw_anchors, margin_contrastive_loss, mean_nearest_distance, spread


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_anchors_are_those_of_the_layers() -> None:
    """Biases are drawn, too, by PyTorch's layers; normalization takes them out."""
    draws = torch.Generator().manual_seed(3)
    classes = torch.randn(5, 8, generator=draws)
    layers: list[nn.Module] = []
    for _ in range(2):
        linear = nn.Linear(8, 8)
        linear.weight.data.uniform_(-(8**-0.5), 8**-0.5, generator=draws)
        layers += [linear, nn.BatchNorm1d(8), nn.ReLU()]
    expected = nn.Sequential(*layers).train()(classes).detach()
    found = draw_anchors(5, 8, torch.Generator().manual_seed(3))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(found, draw_anchors(5, 8, torch.Generator().manual_seed(4)))


def test_the_gap_against_numpy() -> None:
    rows = draw(4, 3)
    x = rows.double().numpy()
    nearest = [min(np.linalg.norm(x[a] - x[b]) for b in range(4) if a != b) for a in range(4)]
    assert float(mean_nearest_distance(rows)) == pytest.approx(np.mean(nearest), rel=1e-6)
    assert float(mean_nearest_distance(torch.ones(2, 3))) == 0


def test_the_contrast_against_numpy() -> None:
    z, anchors, y = draw(6, 3), draw(4, 3, seed=1), torch.tensor([0, 3, 1, 1, 2, 0])
    w = torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0, 1.0])
    found = margin_contrastive_loss(z, y, w, anchors, torch.tensor(0.7))
    d = np.linalg.norm(z.double().numpy()[:, None] - anchors.double().numpy(), axis=2)
    d[np.arange(6), y.numpy()] += 0.7
    losses = d[np.arange(6), y.numpy()] + np.log(np.exp(-d).sum(1))
    assert float(found) == pytest.approx((losses * w.numpy()).sum() / w.numpy().sum(), rel=1e-6)


def test_gradients_are_finite_at_an_anchor_and_under_vmap() -> None:
    anchors, y = draw(3, 4), torch.tensor([0, 2])

    def loss(z: torch.Tensor) -> torch.Tensor:
        return margin_contrastive_loss(z, y, torch.ones(2), anchors, torch.tensor(1.0))

    at = torch.stack([anchors[y], anchors[y] + 0.5])
    found = torch.func.vmap(torch.func.grad(loss))(at)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[1], torch.func.grad(loss)(at[1]))


def by_hand(rows: Any, steps: int) -> Any:
    """Pair by pair, in NumPy."""
    p = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    v, lr = np.zeros_like(p), 0.1
    for step in range(steps):
        force = np.zeros_like(p)
        for i in range(len(p)):
            for j in range(len(p)):
                if i != j:
                    gap = p[i] - p[j]
                    force[i] += gap / (gap @ gap)
        v = 0.9 * v + lr * force
        p = p + v
        p = p / np.linalg.norm(p, axis=1, keepdims=True)
        lr *= 0.95 if step % 10 == 0 else 1
    return p


@pytest.mark.parametrize("steps", [0, 1, 2, 25])
def test_against_a_loop_over_pairs(steps: int) -> None:
    rows = draw(5, 4)
    np.testing.assert_allclose(spread(rows, steps).numpy(), by_hand(rows.double().numpy(), steps), atol=1e-6)


def test_one_row_equal_rows_and_rows_of_zeros() -> None:
    one = draw(1, 3)
    torch.testing.assert_close(spread(one, 50), one / one.norm())
    for rows in (torch.ones(3, 4), torch.cat([torch.zeros(1, 4), draw(2, 4)])):
        assert spread(rows, 50).isfinite().all()
