"""What each rule makes of the adapters of one layer, against NumPy by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed.core.adapters import Adapter, product
from polyfed.methods.fedlora import first_components, pad, slices, stack, svd

OUT, IN = 7, 5


def adapter(rank: int, seed: int, alpha: float = 8.0) -> Adapter:
    g = torch.Generator().manual_seed(seed)
    return Adapter(torch.randn(rank, IN, generator=g), torch.randn(OUT, rank, generator=g), alpha / rank)


def by_hand(one: Adapter) -> np.ndarray:
    return np.asarray(one.scale * one.b.double().numpy() @ one.a.double().numpy())


UNEQUAL = [adapter(1, 1), adapter(2, 2), adapter(4, 3)]
EQUAL = [adapter(3, seed) for seed in (4, 5, 6)]
WEIGHTS = [3.0, 1.0, 4.0]


def base(rank: int) -> Adapter:
    return Adapter(torch.ones(rank, IN), torch.ones(OUT, rank))


def mean_by_hand(adapters: list[Adapter]) -> np.ndarray:
    parts = [w * by_hand(one) for w, one in zip(WEIGHTS, adapters, strict=True)]
    return np.asarray(np.sum(parts, axis=0) / sum(WEIGHTS))


def close(update: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-6) -> bool:
    return bool(np.abs(update.double().numpy() - expected).max() <= tolerance * np.abs(expected).max())


@pytest.mark.parametrize("adapters", [UNEQUAL, EQUAL])
def test_stacking_is_the_weighted_sum_of_products(adapters: list[Adapter]) -> None:
    stacked = stack(adapters, WEIGHTS)
    assert stacked.rank == sum(one.rank for one in adapters)
    assert close(product(stacked), mean_by_hand(adapters))


def test_the_closest_update_of_a_rank_errs_by_the_tail_of_singular_values() -> None:
    update = torch.from_numpy(mean_by_hand(UNEQUAL)).float()
    values = np.linalg.svd(update.numpy(), compute_uv=False)
    for rank in range(1, 6):
        found = svd(UNEQUAL, WEIGHTS, base(rank))
        assert found.rank == rank
        error = float((product(found) - update).norm())
        assert error == pytest.approx(float(np.sqrt((values[rank:] ** 2).sum())), abs=1e-5)
    assert torch.equal(svd(UNEQUAL, WEIGHTS, base(4)).a[:2], svd(UNEQUAL, WEIGHTS, base(2)).a)


def test_with_equal_ranks_padding_and_slices_are_the_average_bit_for_bit() -> None:
    naive = pad(EQUAL, WEIGHTS, base(3))
    other = slices(EQUAL, WEIGHTS, base(3))
    assert torch.equal(naive.a, other.a)
    assert torch.equal(naive.b, other.b)
    shares = np.array(WEIGHTS) / sum(WEIGHTS)
    assert close(naive.a, sum(w * one.a.double().numpy() for w, one in zip(shares, EQUAL, strict=True)))
    assert close(naive.b, sum(w * one.scale * one.b.double().numpy() for w, one in zip(shares, EQUAL, strict=True)))


def test_padding_counts_missing_components_as_zeros_and_slices_leave_them_out() -> None:
    padded = pad(UNEQUAL, WEIGHTS, base(4))
    sliced = slices(UNEQUAL, WEIGHTS, base(4))
    shares = np.array(WEIGHTS) / sum(WEIGHTS)
    for j, holders in enumerate(([0, 1, 2], [1, 2], [2], [2])):
        a = sum(shares[k] * UNEQUAL[k].a[j].double().numpy() for k in holders)
        b = sum(shares[k] * UNEQUAL[k].scale * UNEQUAL[k].b[:, j].double().numpy() for k in holders)
        assert close(padded.a[j], a)
        assert close(padded.b[:, j], b)
        assert close(sliced.a[j], a / shares[holders].sum())
        assert close(sliced.b[:, j], b / shares[holders].sum())
    without_large = slices(UNEQUAL[:2], WEIGHTS[:2], base(4))
    assert torch.equal(without_large.a[2:], base(2).a)
    assert torch.equal(without_large.b[:, 2:], base(2).b)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_with_one_client_every_rule_returns_its_adapter(rank: int) -> None:
    own = adapter(rank, 9)
    exact = [pad([own], [5.0], base(rank)), slices([own], [5.0], base(rank)), stack([own], [5.0])]
    for one in [*exact, svd([own], [5.0], base(rank))]:
        assert close(product(one), by_hand(own))
    for one in exact:
        back = first_components(one, 4, 8.0)
        assert torch.equal(back.a, own.a)
        assert torch.equal(back.b, own.b)  # s is a power of two here
        assert close(product(back), by_hand(own))
    assert close(product(first_components(exact[0], 1, 2.0)), own.scale * np.outer(own.b[:, 0], own.a[0]))
