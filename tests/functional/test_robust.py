"""Robust centers against NumPy, and what robust means: a few vectors, wherever they are, do not lead them away."""

import numpy as np
import pytest
import torch

from polyfed.functional import robust
from polyfed.functional.robust import (
    clip_to_median_norm,
    geometric_median,
    krum,
    median,
    median_norm_factors,
    num_byzantine,
    squared_distances,
    trimmed_mean,
)

CENTERS = {
    "median": median,
    "trimmed_mean": lambda x: trimmed_mean(x, num_byzantine(len(x), 0.4)),
    "geometric_median": geometric_median,
}


def draws(count: int, width: int = 7, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 2, 3, 6, 9])
def test_the_median_is_numpys(count):
    x = draws(count)
    np.testing.assert_array_equal(median(x), np.median(x.numpy().astype(np.float64), axis=0).astype(np.float32))


@pytest.mark.parametrize(("count", "cut"), [(1, 0), (5, 0), (5, 1), (5, 2), (8, 3)])
def test_the_trimmed_mean_is_that_of_what_is_left(count, cut):
    x = draws(count)
    left = np.sort(x.numpy().astype(np.float64), axis=0)[cut : count - cut]
    np.testing.assert_allclose(trimmed_mean(x, cut), left.mean(axis=0), rtol=1e-6)


def test_nothing_left_is_an_error():
    with pytest.raises(ValueError, match="expected a cut of less than half of 4 vectors, got 2"):
        trimmed_mean(draws(4), 2)
    with pytest.raises(ValueError, match="expected fewer hostile ones than the 3 there are, got 3"):
        krum(squared_distances(draws(3)), 3)


@pytest.mark.parametrize("count", [3, 4, 7, 10])
def test_no_point_has_a_smaller_sum_of_distances_than_the_geometric_median(count):
    x = draws(count, 3, seed=count).double()
    center = geometric_median(x)

    def total(point):
        return np.linalg.norm(x.numpy() - point, axis=1).sum()

    rng = np.random.default_rng(0)
    for step in (1e-1, 1e-2, 1e-3):
        for way in rng.normal(size=(20, 3)):
            assert total(center.numpy()) <= total(center.numpy() + step * way) + 1e-9


def test_krum_by_hand():
    x = np.array([[0.0, 1.0], [0.5, 0.5], [-0.5, 0.0], [8.0, -9.0], [0.0, 0.2], [7.0, 7.0], [0.1, 0.1]])
    squares = ((x[:, None] - x[None]) ** 2).sum(axis=-1)
    np.testing.assert_allclose(squared_distances(torch.from_numpy(x)), squares)
    for hostile in (1, 2, 3):
        near = max(1, len(x) - hostile - 2)
        scores = [np.sort(np.delete(row, i))[:near].sum() for i, row in enumerate(squares)]
        expected = sorted(np.argsort(scores, kind="stable")[: len(x) - hostile].tolist())
        assert krum(torch.from_numpy(squares), hostile) == expected
    assert krum(torch.from_numpy(squares), 0) == list(range(7))
    assert krum(torch.from_numpy(squares), 2) == [0, 1, 2, 4, 6]


def test_lengths_come_down_to_their_median_and_directions_stay():
    x = draws(6) * torch.tensor([0.1, 1.0, 2.0, 5.0, 50.0, 0.5])[:, None]
    norms = np.linalg.norm(x.double().numpy(), axis=1)
    bound = np.median(norms)
    expected = x.numpy() * np.minimum(1, bound / norms)[:, None]
    found = clip_to_median_norm(x)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert torch.equal(found[norms <= bound], x[norms <= bound]), "the others bit for bit"
    assert median_norm_factors(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", CENTERS)
@pytest.mark.parametrize("count", [3, 5, 8])
@pytest.mark.parametrize("sign", [1, -1])
def test_one_that_goes_anywhere_leaves_the_center_among_the_others(name, count, sign):
    honest = draws(count - 1)
    x = torch.cat([honest, torch.full((1, 7), sign * 1e20)])
    center = CENTERS[name](x)
    if name == "geometric_median":  # no box holds it, as it turns with the vectors: within the honest ones' own spread
        spread = (honest - honest.mean(0)).norm(dim=1).max()
        assert (center - honest.mean(0)).norm() <= 2 * spread
    else:
        assert bool(((center >= honest.min(0).values) & (center <= honest.max(0).values)).all())
    assert float(x.mean(0).abs().min()) > 1e18, "as the mean is not"


@pytest.mark.parametrize("name", [*CENTERS, "shortened"])
def test_order_and_what_is_looked_at_together_are_nothing(name, monkeypatch):
    rule = {**CENTERS, "shortened": clip_to_median_norm}[name]
    x, order = draws(7, 11), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    whole, turned = rule(x), rule(x[order])
    torch.testing.assert_close(turned, whole[order] if name == "shortened" else whole, rtol=0, atol=1e-6)
    if name in ("median", "trimmed_mean"):
        assert torch.equal(turned, whole)
    monkeypatch.setattr(robust, "ENTRIES_AT_ONCE", 4)
    torch.testing.assert_close(rule(x), whole, rtol=0, atol=1e-6)


def test_fewer_are_supposed_hostile_than_half():
    for count in range(1, 12):
        for share in (0.01, 0.2, 0.49):
            found = num_byzantine(count, share)
            assert 2 * found < count
            assert found == min(int(np.ceil(round(share * count, 9))), (count - 1) // 2)


def test_krum_compares_means_where_some_have_fewer_to_be_compared_with():
    squares = torch.full((5, 5), float("nan"))
    squares[:4, :4] = 2.0
    squares[4, 0] = squares[0, 4] = 3.0
    assert krum(squares, 1) == [0, 1, 2, 3]  # the sum of one 3 is less than that of two 2
    assert krum(torch.zeros(0, 0), 0) == []
    with pytest.raises(ValueError, match="fewer hostile ones than the 1 there are"):
        krum(torch.zeros(1, 1), 1)
