"""The update of an adapter, and how much of an update a rank leaves out, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed.functional.lora import Adapter, energy_beyond, product


def test_energy_beyond_a_rank() -> None:
    g = torch.Generator().manual_seed(0)
    adapter = Adapter(torch.randn(4, 5, generator=g), torch.randn(7, 4, generator=g), 1.5)
    update = product(adapter)
    np.testing.assert_allclose(update.numpy(), 1.5 * adapter.b.numpy() @ adapter.a.numpy(), atol=1e-5)
    np.testing.assert_allclose(adapter.scaled_b.numpy(), 1.5 * adapter.b.numpy())
    squares = np.linalg.svd(update.double().numpy(), compute_uv=False) ** 2
    for rank in range(6):
        assert energy_beyond(update, rank) == pytest.approx(squares[rank:].sum() / squares.sum(), abs=1e-9)
        assert energy_beyond(update.T, rank) == pytest.approx(energy_beyond(update, rank), abs=1e-12)
    assert energy_beyond(torch.zeros(3, 2), 1) == 0.0
