"""Fewer bytes: against NumPy, with entries of both signs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.functional.sparsification import (
    densify,
    dequantize,
    index_nbytes,
    quantize,
    quantized_nbytes,
    top_k_count,
    top_k_sparsify,
)

SHAPES = [(7,), (1,), (3, 5), (2, 3, 2, 2), (4, 1)]


def drawn(shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_has_a_scale_per_row_and_errs_by_half_a_step(shape: tuple[int, ...]) -> None:
    x = drawn(shape, 3.0)
    values, scale = quantize(x, "int8")
    assert (values.dtype, tuple(values.shape)) == (torch.int8, shape)
    rows = x.double().numpy().reshape((shape[0], -1) if len(shape) > 1 else (1, -1))
    steps = np.abs(rows).max(axis=1) / 127
    np.testing.assert_allclose(scale.numpy(), steps, rtol=1e-6)
    levels = np.rint(rows / np.float32(steps)[:, None])
    assert np.abs(values.numpy().reshape(rows.shape) - levels).max() <= 1  # a tie may go either way
    error = np.abs(dequantize(values, scale).double().numpy().reshape(rows.shape) - rows)
    assert (error <= 0.5 * steps[:, None] * (1 + 1e-5)).all()


def test_int8_rows_do_not_share_a_scale() -> None:
    x = torch.tensor([[1e-4, -5e-5], [1000.0, 3.0]])
    found = dequantize(*quantize(x, "int8"))
    assert found[0, 1].item() == pytest.approx(-5e-5, rel=0.01)
    assert dequantize(*quantize(torch.zeros(2, 3), "int8")).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e9])  # float16 alone ends at 65504, and at 6e-8
def test_float16_is_taken_of_a_share_of_the_largest(shape: tuple[int, ...], size: float) -> None:
    x = drawn(shape, size)
    values, scale = quantize(x, "float16")
    largest = np.abs(x.numpy()).max()
    np.testing.assert_array_equal(values.numpy(), (x.numpy() / largest).astype(np.float16))
    assert scale.item() == largest
    np.testing.assert_allclose(dequantize(values, scale).numpy(), x.numpy(), rtol=1e-3, atol=1e-7 * size)


@pytest.mark.parametrize("precision", ["float16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_of_quantized(shape: tuple[int, ...], precision: str) -> None:
    values, scale = quantize(drawn(shape), precision)  # type: ignore[arg-type]
    assert values.nbytes + scale.nbytes == quantized_nbytes(shape, precision)  # type: ignore[arg-type]
    assert quantized_nbytes(shape, "float32") == 4 * math.prod(shape)


@pytest.mark.parametrize("share", [0.001, 0.03, 0.1, 0.5, 0.97, 1.0])
def test_the_largest_of_both_signs_go_up(share: float) -> None:
    x = drawn((9, 41))
    values, places = top_k_sparsify(x, share)
    flat = x.numpy().ravel()
    count = max(1, math.ceil(share * flat.size))
    largest = np.sort(np.argsort(-np.abs(flat), kind="stable")[:count])
    np.testing.assert_array_equal(values.numpy(), flat[largest])
    assert (values < 0).any() or count < 5
    whole = densify(values, places, (9, 41)).numpy().ravel()
    np.testing.assert_array_equal(whole.nonzero()[0], largest)
    np.testing.assert_array_equal(whole[largest], flat[largest])
    assert top_k_count(flat.size, share) == count
    assert places.nbytes == index_nbytes(flat.size, count) == min(4 * count, 47)
    assert places.dtype == (torch.int32 if count < 12 else torch.uint8)


def test_a_share_is_not_rounded_up_by_how_numbers_are_stored() -> None:
    assert [top_k_count(100, share) for share in (0.07, 0.29, 0.071, 1e-9, 1.0)] == [7, 29, 8, 1, 100]


BYTES = torch.tensor([6], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("values", "places", "what"),
    [
        (torch.ones(2), torch.tensor([0, 4], dtype=torch.int32), "places from 0 to 3, got 0 to 4"),
        (torch.ones(2), torch.tensor([-1, 2], dtype=torch.int32), "places from 0 to 3, got -1 to 2"),
        (torch.ones(2), torch.tensor([0, 1]), "as torch.int32 or as bits, got torch.int64"),
        (torch.ones(3), BYTES, r"as many values as places, got \(3,\) and 2"),
        (torch.ones(2, 1), BYTES, "as many values as places"),
        (torch.ones(2), torch.tensor([6, 0], dtype=torch.uint8), "places among 4 entries"),
        (torch.ones(2), torch.tensor([[0, 1]], dtype=torch.int32), "places among 4 entries"),
    ],
)
def test_places_that_are_none(values: Tensor, places: Tensor, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        densify(values, places, (2, 2))


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        (torch.ones(2, 3, dtype=torch.int8), torch.ones(3)),  # a scale per column
        (torch.ones(2, 3, dtype=torch.int8), torch.ones(())),
        (torch.ones(2, 3, dtype=torch.int8), torch.tensor([1.0, math.nan])),
        (torch.ones(2, 3, dtype=torch.int8), torch.tensor([1.0, -1.0])),
        (torch.ones(3, dtype=torch.float16), torch.ones(1)),
        (torch.ones(3), torch.ones(())),
        (torch.ones((), dtype=torch.int8), torch.ones(1)),
        (torch.ones(0, dtype=torch.int8), torch.ones(1)),
        (torch.ones(3, dtype=torch.int64), torch.ones(1)),
    ],
)
def test_what_was_not_quantized_is_not_restored(values: Tensor, scale: Tensor) -> None:
    with pytest.raises(ValueError, match="expected"):
        dequantize(values, scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("share", [0.01, 0.9])  # places as numbers, and as bits
def test_what_comes_back_has_the_values_type(dtype: torch.dtype, share: float) -> None:
    tensor = drawn((10, 30)).to(dtype)
    values, places = top_k_sparsify(tensor, share)
    back = densify(values, places, (10, 30))
    assert back.dtype == dtype
    assert torch.equal(back[back != 0], values)
    assert torch.equal(back[back != 0], tensor[back != 0])
