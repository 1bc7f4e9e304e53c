"""Masks of entries and thresholds against NumPy; the gradient by its formula."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from polyfed.functional import masks
from polyfed.functional.masks import keep_large, magnitude_threshold


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1.0])
@pytest.mark.parametrize("limit", [0.0, 0.3, 1.0])
def test_growth_takes_what_moved_most(share: float, limit: float) -> None:
    draws = torch.Generator().manual_seed(0)
    mask, delta = torch.rand(7, 9, generator=draws) < 0.3, torch.rand(7, 9, generator=draws)
    found = masks.grow_mask(mask, delta, share, limit).numpy().ravel()
    expected, free = mask.numpy().ravel().copy(), np.flatnonzero(~mask.numpy().ravel())
    if expected.mean() < limit:
        expected[free[np.argsort(-delta.numpy().ravel()[free])[: round(share * len(free))]]] = True
    assert (found == expected).all()
    assert found[mask.numpy().ravel()].all()


@pytest.mark.parametrize("shape", [(1,), (8,), (3, 3), (2, 3, 5), (0, 4)])
def test_bits(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    bits = masks.pack_bits(mask)
    assert bits.dtype == torch.uint8
    assert bits.tolist() == np.packbits(mask.numpy().ravel(), bitorder="little").tolist()
    assert torch.equal(masks.unpack_bits(bits, shape), mask)


def test_what_is_cut_is_put_back() -> None:
    whole = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.0, -1.0])}
    cut = {"a": torch.tensor([[True, False, False], [False, True, True]])}
    sent = masks.select_shared(whole, cut)
    assert sent["a"].tolist() == [1, 2, 3]
    assert sent["b"] is whole["b"]
    assert masks.mask_matches(sent, cut, whole)
    assert not masks.mask_matches(whole, cut, whole)
    assert not masks.mask_matches(sent, {}, whole)
    back = masks.fill_personal(sent, cut, {"a": torch.full((2, 3), 9.0)})
    assert back["a"].tolist() == [[9, 1, 2], [3, 9, 9]]
    assert torch.equal(back["b"], whole["b"])


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.25, 3.0, 1.5)])
def test_the_mean_of_an_entry_is_over_those_who_share_it(weights: Sequence[float]) -> None:
    draws = torch.Generator().manual_seed(2)
    base = {"a": torch.randn(4, 3, generator=draws), "b": torch.randn(5, generator=draws), "c": torch.ones(2)}
    models = [{n: torch.randn(t.shape, generator=draws) for n, t in base.items() if n != "c"} for _ in range(3)]
    del models[1]["b"]
    held = [{"a": torch.rand(4, 3, generator=draws) < 0.5} for _ in range(2)] + [{}]
    held[0]["a"][0], held[1]["a"][0] = True, True
    held[2] = {"a": torch.zeros(4, 3, dtype=torch.bool)}
    held[2]["a"][0] = True
    mean = masks.entry_wise_mean(models, weights, held, base)
    for place in np.ndindex(4, 3):
        shown = [i for i, group in enumerate(held) if not group["a"][place]]
        values, shares = [float(models[i]["a"][place]) for i in shown], [weights[i] for i in shown]
        expected = np.average(values, weights=shares) if shown else float(base["a"][place])
        assert float(mean["a"][place]) == pytest.approx(expected, abs=1e-6)
    assert torch.equal(mean["a"][0], base["a"][0]), "what nobody shares keeps its value bit for bit"
    first, last = weights[0], weights[2]
    np.testing.assert_allclose(mean["b"], (first * models[0]["b"] + last * models[2]["b"]) / (first + last), atol=1e-6)
    assert torch.equal(mean["c"], base["c"])


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected 2 bytes for a mask of shape \(9,\)"):
        masks.unpack_bits(torch.zeros(1, dtype=torch.uint8), (9,))
    with pytest.raises(ValueError, match="expected 1 shared entries of 'a'"):
        masks.fill_personal({"a": torch.zeros(2)}, {"a": torch.tensor([True, False])}, {"a": torch.zeros(2)})


def test_of_equal_entries_the_first_are_taken() -> None:
    grown = masks.grow_mask(torch.zeros(200, dtype=torch.bool), torch.ones(200), 0.1, 1.0)
    assert grown.nonzero().flatten().tolist() == list(range(20))


def test_at_the_limit_nothing_grows() -> None:
    mask = torch.tensor([True, True, False, False])
    delta = torch.tensor([0.0, 0.0, 1.0, 2.0])
    assert torch.equal(masks.grow_mask(mask, delta, 0.5, 0.5), mask)
    assert masks.grow_mask(mask, delta, 0.5, 0.6).tolist() == [True, True, False, True]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.29, 0.07, 0.001])
def test_the_threshold_is_the_magnitude_of_the_last_entry_that_is_kept(share: float) -> None:
    tensors = [drawn(5, 8), drawn(60, seed=1)]
    sizes = np.sort(np.abs(np.concatenate([t.numpy().ravel() for t in tensors])))[::-1]
    kept = max(1, round(share * 100 - 0.49))
    theta = magnitude_threshold(tensors, share)
    assert float(theta) == sizes[kept - 1]
    assert sum(int((t.abs() >= theta).sum()) for t in tensors) == kept


def test_values_and_gradient_by_hand() -> None:
    x = drawn(200).requires_grad_()
    theta, weights = torch.tensor(0.7, dtype=torch.float64), drawn(200, seed=1)
    y = keep_large(x, theta)
    (weights * y).sum().backward()
    v, t, kept = x.detach().numpy(), 0.7, np.abs(x.detach().numpy()) >= 0.7
    np.testing.assert_array_equal(y.detach().numpy(), np.where(kept, v, 0.0))
    slope = np.where(kept, 1 + 2 * np.abs(v) * t / (np.abs(v) + t) ** 2, 0.0)
    np.testing.assert_allclose(x.grad.numpy(), weights.numpy() * slope, atol=1e-12)  # type: ignore[union-attr]
    assert 1 < slope[kept].min() < slope[kept].max() <= 1.5
    assert 0 < kept.sum() < 200


def test_threshold_0_is_the_tensor_itself_with_its_plain_gradient() -> None:
    x = torch.tensor([0.0, -2.0, 3.0], requires_grad=True)
    y = keep_large(x, torch.tensor(0.0))
    y.sum().backward()
    assert torch.equal(y, x)
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0, 1.0]
