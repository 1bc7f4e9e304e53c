"""Directions on the sphere: against a loop over pairs, the known equilibria, and that they move apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from polyfed.functional.sphere_spreading import spread


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


def energy(p: torch.Tensor) -> float:
    return -float(torch.pdist(p.double()).log().sum())


@pytest.mark.parametrize("steps", [0, 1, 2, 25])
def test_against_a_loop_over_pairs(steps: int) -> None:
    rows = draw(5, 4)
    np.testing.assert_allclose(spread(rows, steps).numpy(), by_hand(rows.double().numpy(), steps), atol=1e-6)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_few_rows_end_at_equal_angles(count: int) -> None:
    rows = 1 + 0.1 * draw(count, 6)  # all near one direction
    p = spread(rows, 500).double()
    cosines = (p @ p.T)[~torch.eye(count, dtype=torch.bool)]
    torch.testing.assert_close(cosines, torch.full_like(cosines, -1 / (count - 1)), atol=1e-4, rtol=0)
    assert p.norm(dim=1).numpy() == pytest.approx(1)


def test_the_energy_falls_where_they_do_not_fit_into_a_simplex() -> None:
    rows = draw(12, 3)
    energies = [energy(spread(rows, steps)) for steps in (0, 10, 100, 500)]
    assert energies == sorted(energies, reverse=True)
    assert torch.pdist(spread(rows, 500)).min() > 1.5 * torch.pdist(spread(rows, 0)).min()


def test_lengths_and_rotations_do_not_matter() -> None:
    rows = draw(4, 3)
    turn, _ = torch.linalg.qr(draw(3, 3, seed=1).double())
    scale = torch.tensor([[0.1], [1.0], [7.0], [30.0]])
    torch.testing.assert_close(spread(scale * rows, 60), spread(rows, 60), atol=1e-5, rtol=0)
    torch.testing.assert_close(spread(rows.double() @ turn, 60), spread(rows.double(), 60) @ turn, atol=1e-5, rtol=0)


def test_one_row_equal_rows_and_rows_of_zeros() -> None:
    one = draw(1, 3)
    torch.testing.assert_close(spread(one, 50), one / one.norm())
    for rows in (torch.ones(3, 4), torch.cat([torch.zeros(1, 4), draw(2, 4)])):
        assert spread(rows, 50).isfinite().all()
    with pytest.raises(ValueError, match=r"expected rows \(S, D\) of S > 0, got \(0, 3\)"):
        spread(torch.empty(0, 3), 5)
