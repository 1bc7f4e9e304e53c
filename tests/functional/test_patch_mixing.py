"""Images mixed patch by patch: where, how much, and with whom."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed.functional.patch_mixing import mix, mixing_map, partners


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_small_images_are_mixed_in_a_regular_grid() -> None:
    """Where a quarter of a patch is no pixel, nothing is shifted: each cell of the grid has one share."""
    found = mixing_map(6, 9, 9, 1.0, draws())
    cells = found.reshape(3, 2, 3, 3)
    assert torch.equal(cells, cells[:, :1, :, :1].expand_as(cells))
    assert found.unique().numel() == 9
    assert found.min() >= 0
    assert found.max() <= 1


def test_a_size_that_the_grid_does_not_divide_is_covered() -> None:
    assert (mixing_map(7, 5, 4, 1.0, draws()) < 1).all()
    assert mixing_map(2, 2, 64, 1.0, draws()).shape == (2, 2)  # more patches than pixels


def test_patches_are_shifted_by_a_quarter_at_most() -> None:
    """32 x 32 in 16 patches of 8 x 8: shifts up to 2, so that the middle 4 x 4 of a patch stays its own."""
    starts = set()
    for seed in range(40):
        found = mixing_map(32, 32, 16, 1.0, draws(seed))
        own = found[1 * 8 + 2 : 1 * 8 + 6, 1 * 8 + 2 : 1 * 8 + 6]
        assert (found[8:16, 8:16] == own[0, 0]).float().mean() >= 16 / 64
        inside = (found == found[4, 4]).nonzero()  # the first patch, which lies over all others
        starts.add(int(inside[:, 0].max()))
        assert int(inside[:, 0].max()) - int(inside[:, 0].min()) <= 7
    assert starts == {5, 6, 7, 8, 9}


def test_the_shares_are_beta() -> None:
    for alpha in (0.1, 1.0):
        shares = torch.cat([mixing_map(8, 8, 64, alpha, draws(seed)).flatten() for seed in range(100)]).double().numpy()
        assert shares.mean() == pytest.approx(0.5, abs=0.03)
        assert shares.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), abs=0.02)


def test_mixing_against_numpy() -> None:
    x = torch.randn(4, 2, 3, 5, generator=draws())
    share, order = mixing_map(3, 5, 4, 1.0, draws(1)), torch.tensor([2, 0, 3, 1])
    a, m = x.double().numpy(), share.double().numpy()
    expected = np.stack([m * a[i] + (1 - m) * a[order[i]] for i in range(4)])
    np.testing.assert_allclose(mix(x, order, share).numpy(), expected, atol=1e-6)
    assert torch.equal(mix(x, order, torch.ones(3, 5)), x)
    assert torch.equal(mix(x, order, torch.zeros(3, 5)), x[order])


def test_rows_without_weight_are_nobodys_partner() -> None:
    order = torch.rand(6, generator=draws())
    some = partners(order[:4], torch.ones(4))
    padded = partners(order, torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))
    assert torch.equal(padded[:4], some)
    assert some.sort().values.tolist() == [0, 1, 2, 3]
    assert padded.sort().values.tolist() == list(range(6))


@pytest.mark.parametrize(("height", "width"), [(32, 32), (32, 16), (16, 32)])
def test_a_shift_moves_a_patch_and_does_not_stretch_it(height: int, width: int) -> None:
    sizes = set()
    for seed in range(20):
        found = mixing_map(height, width, 16, 1.0, draws(seed))
        for share in found[found < 1].unique():
            rows, columns = (found == share).nonzero(as_tuple=True)
            sizes.add((int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1))
    assert max(rows for rows, _ in sizes) == height // 4
    assert max(columns for _, columns in sizes) == width // 4
