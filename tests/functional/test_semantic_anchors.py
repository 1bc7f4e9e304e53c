"""Semantic anchors against PyTorch's layers and NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.functional.semantic_anchors import draw_anchors, margin_contrastive_loss, mean_nearest_distance


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
    with pytest.raises(ValueError, match=r"expected at least two rows \(S, D\), got \(1, 3\)"):
        mean_nearest_distance(rows[:1])


def test_the_contrast_against_numpy() -> None:
    z, anchors, y = draw(6, 3), draw(4, 3, seed=1), torch.tensor([0, 3, 1, 1, 2, 0])
    w = torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0, 1.0])
    found = margin_contrastive_loss(z, y, w, anchors, torch.tensor(0.7))
    d = np.linalg.norm(z.double().numpy()[:, None] - anchors.double().numpy(), axis=2)
    d[np.arange(6), y.numpy()] += 0.7
    losses = d[np.arange(6), y.numpy()] + np.log(np.exp(-d).sum(1))
    assert float(found) == pytest.approx((losses * w.numpy()).sum() / w.numpy().sum(), rel=1e-6)


def test_the_margin_asks_for_more() -> None:
    """A row at its own anchor still loses while others are nearer than the margin."""
    anchors, y = torch.tensor([[0.0, 0.0], [3.0, 0.0]]), torch.tensor([0])
    losses = [
        float(margin_contrastive_loss(anchors[:1], y, torch.ones(1), anchors, torch.tensor(m))) for m in (0.0, 3.0, 6.0)
    ]
    assert losses == sorted(losses)
    assert losses[1] == pytest.approx(np.log(2))


def test_gradients_are_finite_at_an_anchor_and_under_vmap() -> None:
    anchors, y = draw(3, 4), torch.tensor([0, 2])

    def loss(z: torch.Tensor) -> torch.Tensor:
        return margin_contrastive_loss(z, y, torch.ones(2), anchors, torch.tensor(1.0))

    at = torch.stack([anchors[y], anchors[y] + 0.5])
    found = torch.func.vmap(torch.func.grad(loss))(at)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[1], torch.func.grad(loss)(at[1]))


def test_small_distances_of_many_rows_far_from_zero_are_kept() -> None:
    rows = 1000 + 0.1 * torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    exact = rows.double()
    gaps = (exact[:, None] - exact[None]).norm(dim=2).fill_diagonal_(torch.inf)
    assert float(mean_nearest_distance(rows)) == pytest.approx(float(gaps.min(dim=1).values.mean()), rel=1e-5)
