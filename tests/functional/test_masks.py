"""Masks of entries against NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from polyfed.functional import masks


@pytest.mark.parametrize("shape", [(1,), (8,), (3, 3), (2, 3, 5), (0, 4)])
def test_bits(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    bits = masks.pack_bits(mask)
    assert bits.dtype == torch.uint8
    assert bits.tolist() == np.packbits(mask.numpy().ravel(), bitorder="little").tolist()
    assert torch.equal(masks.unpack_bits(bits, shape), mask)


def test_what_is_cut_is_put_back() -> None:
    whole = {"b": torch.tensor([1.0, -1.0]), "a": torch.arange(6.0).reshape(2, 3)}
    cut = {"a": torch.tensor([[True, False, False], [False, True, True]])}
    sent = masks.select_shared(whole, cut)
    assert sent["a"].tolist() == [1, 2, 3]
    assert sent["b"] is whole["b"]
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
