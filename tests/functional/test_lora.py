"""Adapters against NumPy by hand: their products, and what each rule makes of several."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed.functional import lora
from polyfed.functional.lora import Adapter

OUT, IN = 7, 5


def adapter(rank: int, seed: int, alpha: float = 8.0, scale: float | None = None) -> Adapter:
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, IN, generator=g), torch.randn(OUT, rank, generator=g)
    return Adapter(a, b, alpha / rank if scale is None else scale)


def by_hand(one: Adapter) -> np.ndarray:
    found: np.ndarray = one.scale * one.b.double().numpy() @ one.a.double().numpy()
    return found


UNEQUAL = [adapter(1, 1), adapter(2, 2), adapter(4, 3)]
EQUAL = [adapter(3, seed) for seed in (4, 5, 6)]
WEIGHTS = [3.0, 1.0, 4.0]
BASE = Adapter(torch.ones(4, IN), torch.ones(OUT, 4))


def mean_by_hand(adapters: list[Adapter], weights: list[float]) -> np.ndarray:
    parts = [w * by_hand(one) for w, one in zip(weights, adapters, strict=True)]
    found: np.ndarray = np.sum(parts, axis=0) / sum(weights)
    return found


def close(update: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-6) -> bool:
    return bool(np.abs(update.double().numpy() - expected).max() <= tolerance * np.abs(expected).max())


@pytest.mark.parametrize("adapters", [UNEQUAL, EQUAL])
def test_stacking_is_the_weighted_sum_of_products(adapters: list[Adapter]) -> None:
    expected = mean_by_hand(adapters, WEIGHTS)
    stacked = lora.stack(adapters, WEIGHTS)
    assert stacked.rank == sum(one.rank for one in adapters)
    assert close(lora.product(stacked), expected)


def test_the_closest_update_of_a_rank_errs_by_the_tail_of_singular_values() -> None:
    update = torch.from_numpy(mean_by_hand(UNEQUAL, WEIGHTS)).float()
    values = np.linalg.svd(update.numpy(), compute_uv=False)
    for rank in range(1, 6):
        found = lora.decompose(update, rank)
        error = float((lora.product(found) - update).norm())
        assert found.rank == rank
        assert error == pytest.approx(float(np.sqrt((values[rank:] ** 2).sum())), abs=1e-5)
    wide = lora.decompose(update, 6)
    assert wide.rank == 6
    assert not wide.a[5].any()
    assert not wide.b[:, 5].any()
    assert torch.equal(lora.decompose(update, 4).a[:2], lora.decompose(update, 2).a)


def test_with_equal_ranks_padding_and_slices_are_the_average_bit_for_bit() -> None:
    naive = lora.pad(EQUAL, WEIGHTS)
    other = lora.mean_components(EQUAL, WEIGHTS, lora.first_components(BASE, 3))
    assert torch.equal(naive.a, other.a)
    assert torch.equal(naive.b, other.b)
    shares = np.array(WEIGHTS) / sum(WEIGHTS)
    a = sum(w * one.a.double().numpy() for w, one in zip(shares, EQUAL, strict=True))
    b = sum(w * one.scale * one.b.double().numpy() for w, one in zip(shares, EQUAL, strict=True))
    assert close(naive.a, a)
    assert close(naive.b, b)


def test_padding_counts_missing_components_as_zeros_and_slices_leave_them_out() -> None:
    padded = lora.pad(UNEQUAL, WEIGHTS)
    sliced = lora.mean_components(UNEQUAL, WEIGHTS, BASE)
    shares = np.array(WEIGHTS) / sum(WEIGHTS)
    for j, holders in enumerate(([0, 1, 2], [1, 2], [2], [2])):
        a = sum(shares[k] * UNEQUAL[k].a[j].double().numpy() for k in holders)
        b = sum(shares[k] * UNEQUAL[k].scale * UNEQUAL[k].b[:, j].double().numpy() for k in holders)
        assert close(padded.a[j], a)
        assert close(padded.b[:, j], b)
        assert close(sliced.a[j], a / shares[holders].sum())
        assert close(sliced.b[:, j], b / shares[holders].sum())
    without_large = lora.mean_components(UNEQUAL[:2], WEIGHTS[:2], BASE)
    assert torch.equal(without_large.a[2:], BASE.a[2:])
    assert torch.equal(without_large.b[:, 2:], BASE.b[:, 2:])


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_with_one_client_every_rule_returns_its_adapter(rank: int) -> None:
    own = adapter(rank, 9)
    base = Adapter(torch.zeros(rank, IN), torch.zeros(OUT, rank))
    found = [
        lora.pad([own], [5.0]),
        lora.mean_components([own], [5.0], base),
        lora.stack([own], [5.0]),
        lora.decompose(lora.product(lora.stack([own], [5.0])), rank),
    ]
    for one in found:
        assert close(lora.product(one), by_hand(own))
    for one in found[:3]:
        back = lora.rescale(one, own.scale)
        assert torch.equal(back.a, own.a)
        assert torch.equal(back.b, own.b)  # s is a power of two here


def test_energy_beyond_a_rank() -> None:
    update = torch.from_numpy(mean_by_hand(UNEQUAL, WEIGHTS)).float()
    squares = np.linalg.svd(update.double().numpy(), compute_uv=False) ** 2
    for rank in range(6):
        assert lora.energy_beyond(update, rank) == pytest.approx(squares[rank:].sum() / squares.sum(), abs=1e-9)
        assert lora.energy_beyond(update.T, rank) == pytest.approx(lora.energy_beyond(update, rank), abs=1e-12)
    assert lora.energy_beyond(torch.zeros(3, 2), 1) == 0.0
