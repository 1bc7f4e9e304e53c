"""Semantic anchors against PyTorch's layers, directions on the sphere against a loop over pairs, and the network behind
trained prototypes against autograd.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.functional import server_prototypes
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


def apart(margin: float) -> server_prototypes.Loss:
    return functools.partial(server_prototypes.margin_loss, margin=margin)


def test_a_step_of_the_fit_is_that_of_autograd() -> None:
    weights = server_prototypes.init_network(3, 5, 4, torch.Generator().manual_seed(0))
    rows, labels = draw(4, 4), torch.tensor([0, 2, 0, 1], dtype=torch.int32)
    before = {name: t.clone() for name, t in weights.items()}
    draws = torch.Generator().manual_seed(1)
    new, loss = server_prototypes.train_network(weights, rows, labels, apart(0.7), 1, 4, 0.5, draws)
    w = {name: t.clone().requires_grad_() for name, t in before.items()}
    hidden = (w["embedding"] @ w["hidden.weight"].T + w["hidden.bias"]).relu()
    value = apart(0.7)(hidden @ w["output.weight"].T + w["output.bias"], rows, labels.long())
    assert loss == pytest.approx(float(value.detach()), rel=1e-5)
    for (name, t), slope in zip(w.items(), torch.autograd.grad(value, list(w.values())), strict=True):
        assert torch.equal(weights[name], before[name])
        torch.testing.assert_close(new[name], t.detach() - 0.5 * slope, atol=1e-5, rtol=1e-5)


def test_initial_layers_are_uniform_within_one_over_the_root_of_their_inputs() -> None:
    made = server_prototypes.init_network(3, 400, 100, torch.Generator().manual_seed(0))
    for layer, inputs in (("hidden", 100), ("output", 400)):
        assert 0.95 * inputs**-0.5 < float(made[f"{layer}.weight"].abs().max()) <= inputs**-0.5


def test_the_margin_is_the_largest_gap_to_the_nearest() -> None:
    centers = draw(4, 3)
    d = np.linalg.norm(centers.numpy()[:, None] - centers.numpy()[None], axis=2) + np.diag([np.inf] * 4)
    assert server_prototypes.margin(centers, 100.0) == pytest.approx(d.min(1).max(), rel=1e-6)
    assert server_prototypes.margin(centers, 0.1) == 0.1
    assert server_prototypes.margin(centers[:1], 100.0) == 100.0


def test_orthogonality_against_numpy_with_cosines_of_both_signs() -> None:
    p, rows, labels = draw(3, 4), draw(5, 4, seed=1), torch.tensor([0, 2, 1, 1, 0])
    a, b = (t.double().numpy() for t in (rows, p))
    cosines = np.array([[x @ y / np.linalg.norm(x) / np.linalg.norm(y) for y in b] for x in a])
    own = np.eye(3)[labels]
    assert (cosines[own == 0] < 0).any()
    assert (cosines[own == 0] > 0).any()
    for gamma in (0.0, 0.5, 2.0):
        expected = (1 - cosines)[own == 1].mean() + gamma * np.abs(cosines[own == 0]).mean()
        found = server_prototypes.orthogonality(p, rows, labels, gamma)
        assert float(found) == pytest.approx(expected, rel=1e-6)


def test_the_margin_loss_keeps_small_distances_of_many_rows_far_from_zero() -> None:
    """By products of rows, as PyTorch takes distances of more than 25 rows, they would drown in rounding."""
    rows, prototypes = 1000 + 0.1 * draw(60, 3), 1000 + 0.1 * draw(5, 3, seed=1)
    labels = torch.arange(60) % 5
    gaps = np.linalg.norm(rows.double().numpy()[:, None] - prototypes.double().numpy()[None], axis=2)
    away = np.exp(-gaps - 0.5 * np.eye(5)[labels.numpy()])
    expected = -np.log(away[np.arange(60), labels.numpy()] / away.sum(1)).mean()
    found = server_prototypes.margin_loss(prototypes, rows, labels, 0.5)
    assert float(found) == pytest.approx(expected, rel=1e-5)
