"""Packed matrices: what they weigh, how far off they are, what of the outside is refused."""

import numpy as np
import pytest
import torch

from polyfed.functional.kernel_factor import kernel_factor
from polyfed.functional.kernels import cka_to_factor
from polyfed.functional.quantization import PRECISIONS, dequantize_columns, packed_nbytes, quantize_columns


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wide_range(rows=200, columns=17, seed=0):
    """Both signs, columns of very different sizes, one of zeros."""
    matrix = draw(rows, columns, seed=seed) * torch.logspace(-6, 3, columns)
    matrix[:, 4] = 0
    return matrix


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("rows", "columns"), [(5000, 128), (1, 1), (7, 300)])
def test_bytes_are_those_of_the_members(precision, rows, columns):
    group = quantize_columns(draw(rows, columns), precision)
    assert packed_nbytes(rows, columns, precision) == sum(t.numel() * t.element_size() for t in group.values())
    expected = {"float32": 2_560_000, "float16": 1_280_004, "int8": 640_000 + 512}
    assert packed_nbytes(5000, 128, precision) == expected[precision]


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


@pytest.mark.parametrize("precision", PRECISIONS)
def test_signs_zeros_and_extremes(precision):
    matrix = torch.tensor([[-3.0, 0.0, 3e38], [1.0, 0.0, -3e38], [3.0, -0.0, 0.0]])
    back = dequantize_columns(quantize_columns(matrix, precision))
    torch.testing.assert_close(back, matrix, rtol=0.02, atol=0 if precision != "float16" else 2e31)
    assert torch.equal(dequantize_columns(quantize_columns(-matrix, precision)), -back)
    assert dequantize_columns(quantize_columns(torch.zeros(3, 2), precision)).eq(0).all()
    tiny = torch.full((2, 2), 1e-45)
    assert dequantize_columns(quantize_columns(tiny, precision)).isfinite().all()


def test_rounding_is_to_the_nearest():
    group = quantize_columns(torch.tensor([[127.0], [2.4], [2.6], [-2.4], [-2.6]]), "int8")
    assert group["values"].flatten().tolist() == [127, 2, 3, -2, -3]


def test_packed_again_nothing_changes():
    for precision in PRECISIONS:
        once = dequantize_columns(quantize_columns(wide_range(), precision))
        torch.testing.assert_close(dequantize_columns(quantize_columns(once, precision)), once, rtol=1e-6, atol=0)


def test_no_gradient_and_half_input():
    matrix = draw(4, 3).requires_grad_()
    assert not any(t.requires_grad for p in PRECISIONS for t in quantize_columns(matrix, p).values())
    torch.testing.assert_close(
        dequantize_columns(quantize_columns(matrix.detach().half(), "float16")), matrix.detach(), rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize(("precision", "most"), [("float16", 1e-5), ("int8", 2e-4)])
def test_alignment_hardly_notices(precision, most):
    """Five representations of decaying spectrum, and a mean kernel's factor of them, of rank 32."""
    common = draw(500, 40) * torch.logspace(1, -1, 40)
    many = [torch.relu(common @ draw(40, 64, seed=s) + draw(500, 64, seed=10 + s)) for s in range(5)]
    factor = kernel_factor(many, [1.0] * 5, rank=32, exact_rank=0).matrix
    packed = dequantize_columns(quantize_columns(factor, precision))
    changes = [abs(float(cka_to_factor(a, packed) - cka_to_factor(a, factor))) for a in many]
    assert 0 < max(changes) < most


def test_unusable_matrices():
    for bad in (torch.ones(3), torch.ones(2, 2, 2), torch.ones(0, 3), torch.ones(2, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="matrix of floats with rows and columns"):
            quantize_columns(bad, "int8")
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite"):
            quantize_columns(torch.tensor([[1.0, value]]), "float16")
    with pytest.raises(ValueError, match="finite float32"):
        quantize_columns(torch.tensor([[1e300]], dtype=torch.float64), "float32")
    with pytest.raises(ValueError, match="float32, float16, int8, got 'int4'"):
        quantize_columns(torch.ones(2, 2), "int4")
    with pytest.raises(ValueError, match="got 'int4'"):
        packed_nbytes(2, 2, "int4")


F16, I8 = torch.ones(3, 2, dtype=torch.float16), torch.ones(3, 2, dtype=torch.int8)


@pytest.mark.parametrize(
    ("group", "line"),
    [
        ({}, "tensors 'values' and 'scale', got nothing"),
        ({"scale": torch.ones(2)}, "got 'scale'"),
        ({"values": I8, "scale": torch.ones(2), "x": I8}, "got 'scale', 'values', 'x'"),
        ({"values": [[1.0]]}, "expected a packed matrix of tensors"),
        ({"values": torch.ones(3)}, r"float32 of shape \(3,\)"),
        ({"values": torch.ones(3, 0)}, r"shape \(3, 0\)"),
        ({"values": torch.ones(3, 2, dtype=torch.float64)}, "got torch.float64"),
        ({"values": torch.ones(3, 2), "scale": torch.ones(())}, "expected no 'scale' beside 'values' of float32"),
        ({"values": F16}, "expected a 'scale' beside 'values' of float16"),
        ({"values": I8}, "expected a 'scale' beside 'values' of int8"),
        (
            {"values": F16, "scale": torch.ones(2)},
            r"float16 as float32 of shape \(\), got torch.float32 of shape \(2,\)",
        ),
        ({"values": I8, "scale": torch.ones(3)}, r"shape \(2,\), got torch.float32 of shape \(3,\)"),
        ({"values": I8, "scale": torch.ones(2, dtype=torch.float64)}, "got torch.float64"),
        ({"values": I8, "scale": torch.tensor([1.0, -1.0])}, "at least 0, got -1.0"),
        ({"values": I8, "scale": torch.tensor([1.0, float("nan")])}, "inf or nan"),
        ({"values": 4 * F16, "scale": torch.tensor(3e38)}, "inf or nan"),
        ({"values": F16 / 0, "scale": torch.tensor(1.0)}, "inf or nan"),
        ({"values": torch.ones(3, 2) / 0}, "inf or nan"),
    ],
)
def test_what_comes_from_outside_is_checked(group, line):
    with pytest.raises(ValueError, match=line) as error:
        dequantize_columns(group)
    assert "\n" not in str(error.value)
