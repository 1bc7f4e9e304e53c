"""Fewer bytes: what they weigh, how far off they are, what of the outside is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed.functional.compression import dequantize_columns, quantize_columns


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wide_range(rows=200, columns=17, seed=0):
    """Both signs, columns of very different sizes, one of zeros."""
    matrix = draw(rows, columns, seed=seed) * torch.logspace(-6, 3, columns)
    matrix[:, 4] = 0
    return matrix


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_members_and_error_bounds(scale):
    matrix = scale * wide_range()
    exact = matrix.double().numpy()

    group = quantize_columns(matrix, "float32")
    assert list(group) == ["values"]
    assert torch.equal(dequantize_columns(group), matrix)
    assert group["values"].data_ptr() != matrix.data_ptr()
    assert dequantize_columns(group).data_ptr() != group["values"].data_ptr()

    group = quantize_columns(matrix, "float16")
    assert {name: (t.dtype, tuple(t.shape)) for name, t in group.items()} == {
        "values": (torch.float16, (200, 17)),
        "scale": (torch.float32, ()),
    }
    off = np.abs(dequantize_columns(group).double().numpy() - exact)
    assert (off <= (1 + 1e-3) * np.maximum(np.abs(exact) * 2.0**-11, np.abs(exact).max() * 2.0**-25)).all()
    assert off.max() > 0

    group = quantize_columns(matrix, "int8")
    assert {name: (t.dtype, tuple(t.shape)) for name, t in group.items()} == {
        "values": (torch.int8, (200, 17)),
        "scale": (torch.float32, (17,)),
    }
    off = np.abs(dequantize_columns(group).double().numpy() - exact)
    assert (off <= (1 + 1e-4) * np.abs(exact).max(0) / 254).all()
    assert dequantize_columns(group)[:, 4].eq(0).all()
    assert group["values"].abs().amax(0).tolist() == [127] * 4 + [0] + [127] * 12
    assert dequantize_columns(group).dtype == torch.float32


def test_unusable_matrices():
    for bad in (torch.ones(3), torch.ones(2, 2, 2), torch.ones(0, 3), torch.ones(2, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="matrix of floats with rows and columns"):
            quantize_columns(bad, "int8")
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite"):
            quantize_columns(torch.tensor([[1.0, value]]), "float16")
    with pytest.raises(ValueError, match="finite float32"):
        quantize_columns(torch.tensor([[1e300]], dtype=torch.float64), "float32")


F16, I8 = torch.ones(3, 2, dtype=torch.float16), torch.ones(3, 2, dtype=torch.int8)


@pytest.mark.parametrize(
    ("group", "line"),
    [
        ({}, "got nothing"),
        ({"values": I8, "scale": torch.ones(2), "x": I8}, r"x torch.int8 \(3, 2\)"),
        ({"values": [[1.0]]}, "got values list"),
        ({"values": torch.ones(3)}, r"float32 \(3,\)"),
        ({"values": torch.ones(3, 2, dtype=torch.float64)}, "got values torch.float64"),
        ({"values": torch.ones(3, 2), "scale": torch.ones(())}, r"scale torch.float32 \(\)"),
        ({"values": F16}, "got values torch.float16"),
        ({"values": I8}, "got values torch.int8"),
        ({"values": F16, "scale": torch.ones(2)}, r"scale torch.float32 \(2,\)"),
        ({"values": I8, "scale": torch.ones(2, dtype=torch.float64)}, "scale torch.float64"),
        ({"values": I8, "scale": torch.ones(3)}, r"scale torch.float32 \(3,\)"),
        ({"values": I8, "scale": torch.tensor([1.0, -1.0])}, "'scale' of at least 0"),
        ({"values": I8, "scale": torch.tensor([1.0, float("nan")])}, "finite numbers"),
        ({"values": torch.ones(3, 2) / 0}, "finite numbers"),
    ],
)
def test_what_comes_from_outside_is_checked(group, line):
    with pytest.raises(ValueError, match=line) as error:
        dequantize_columns(group)
    assert "\n" not in str(error.value)
