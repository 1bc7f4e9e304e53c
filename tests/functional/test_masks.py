"""Masks of entries against NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from polyfed.functional import masks
from polyfed.functional.averaging import layer_wise_mean


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


def test_what_has_not_moved_is_not_taken_whole() -> None:
    for delta in (torch.zeros(4, 5), torch.full((4, 5), 0.3)):
        more = masks.grow_mask(torch.zeros(4, 5, dtype=torch.bool), delta, 0.25, 0.8)
        assert more.flatten().nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def test_it_stops_at_the_limit_or_one_step_beyond() -> None:
    mask, shares = torch.zeros(10, 10, dtype=torch.bool), []
    for step in range(12):
        draws = torch.Generator().manual_seed(step)
        mask = masks.grow_mask(mask, torch.rand(10, 10, generator=draws), 0.25, 0.5)
        shares.append(float(mask.float().mean()))
    assert shares[:4] == pytest.approx([0.25, 0.44, 0.58, 0.58])
    assert len(set(shares[2:])) == 1


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


def test_without_masks_it_is_the_layer_wise_mean() -> None:
    draws = torch.Generator().manual_seed(3)
    base = {"a": torch.zeros(50), "b": torch.zeros(2)}
    models = [{"a": torch.randn(50, generator=draws)} for _ in range(7)]
    weights = [1.0, 2.0, 0.5, 3.0, 1.0, 7.0, 4.0]
    found, plain = masks.entry_wise_mean(models, weights, [{}] * 7, base), layer_wise_mean(models, weights, base)
    assert all(torch.equal(found[name], plain[name]) for name in base)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="in one shape"):
        masks.grow_mask(torch.zeros(2, dtype=torch.bool), torch.zeros(3), 0.5, 1.0)
    with pytest.raises(ValueError, match=r"expected 2 bytes for a mask of shape \(9,\)"):
        masks.unpack_bits(torch.zeros(1, dtype=torch.uint8), (9,))
    with pytest.raises(ValueError, match="expected 1 shared entries of 'a'"):
        masks.fill_personal({"a": torch.zeros(2)}, {"a": torch.tensor([True, False])}, {"a": torch.zeros(2)})


def test_at_the_limit_nothing_grows() -> None:
    mask = torch.tensor([True, True, False, False])
    delta = torch.tensor([0.0, 0.0, 1.0, 2.0])
    assert torch.equal(masks.grow_mask(mask, delta, 0.5, 0.5), mask)
    assert masks.grow_mask(mask, delta, 0.5, 0.6).tolist() == [True, True, False, True]


def test_tensors_without_a_mask_come_first_or_last() -> None:
    values, own = {"a": torch.ones(2), "b": torch.ones(1)}, {"b": torch.zeros(2)}
    cut = {"b": torch.tensor([True, False])}
    for order in (("a", "b"), ("b", "a")):
        found = masks.fill_personal({name: values[name] for name in order}, cut, own)
        assert list(found) == list(order)
        assert found["a"] is values["a"]
        assert found["b"].tolist() == [0, 1]
