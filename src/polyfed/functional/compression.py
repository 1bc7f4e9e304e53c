"""Tensors in fewer bytes: half precision, or 8-bit integers with a scale for each column.

    precision   members of a packed matrix                         bytes of (L, R)
    float32     values float32 (L, R)                              4 L R
    float16     values float16 (L, R), scale float32 ()            2 L R + 4
    int8        values int8 (L, R), scale float32 (R,)             L R + 4 R

The matrix is scale * values. Rounding is to the nearest: in float16 an entry is off by at most 2^-11 of itself, or
2^-25 of the largest entry if that is more; in int8 by at most 1/254 of the largest entry of its column.

Shapes: L rows, R columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from polyfed.functional.centering import nonzero

Precision = Literal["float32", "float16", "int8"]

_STEPS = 127  # int8 on either side of 0; -128 is not used


@torch.no_grad()
def quantize_columns(matrix_LR: Tensor, precision: Precision) -> dict[str, Tensor]:
    """The members of the table above, new tensors on the matrix's device.

    float16 is divided by max|matrix| first, so that nothing overflows; int8 by each column's largest entry.

    Raises:
        ValueError: not a matrix of finite numbers with rows and columns.
    """
    if matrix_LR.dim() != 2 or matrix_LR.numel() == 0 or not matrix_LR.is_floating_point():
        found = f"{matrix_LR.dtype} of shape {tuple(matrix_LR.shape)}"
        raise ValueError(f"expected a matrix of floats with rows and columns, got {found}")
    wide = matrix_LR.to(torch.float32, copy=True)
    if not bool(wide.isfinite().all()):
        raise ValueError("expected finite float32 numbers to pack, got inf or nan")
    if precision == "float32":
        return {"values": wide}
    if precision == "float16":
        scale = wide.abs().amax()
        return {"values": (wide / nonzero(scale)).to(torch.float16), "scale": scale}
    scale_R = wide.abs().amax(dim=0) / _STEPS
    return {"values": (wide / nonzero(scale_R)).round().clamp(-_STEPS, _STEPS).to(torch.int8), "scale": scale_R}


@torch.no_grad()
def dequantize_columns(group: Mapping[str, Tensor]) -> Tensor:
    """What ``quantize_columns`` made, as float32 (L, R); its precision is read off its types.

    Raises:
        ValueError: what ``quantize_columns`` does not make: other names, types or shapes, inf or nan, a negative scale.
    """
    values_LR, scale = group.get("values"), group.get("scale")
    is_packed = group.keys() <= {"values", "scale"} and isinstance(values_LR, Tensor) and _fits(values_LR, scale)
    if values_LR is None or not is_packed:
        raise ValueError(
            "expected a matrix 'values' of float32, of float16 with a float32 'scale', or of int8 with one for each "
            f"column, got {', '.join(f'{name} {_kind(member)}' for name, member in group.items()) or 'nothing'}"
        )
    matrix_LR = values_LR.to(torch.float32, copy=True)
    if scale is not None:
        matrix_LR *= scale
    if not bool(matrix_LR.isfinite().all()) or (scale is not None and bool((scale < 0).any())):
        raise ValueError("expected a packed matrix of finite numbers and a 'scale' of at least 0, got others")
    return matrix_LR


def _fits(values_LR: Tensor, scale: Tensor | None) -> bool:
    """Whether this is a matrix with the scale of its type."""
    if values_LR.dim() != 2 or values_LR.numel() == 0:
        return False
    if scale is None:
        return values_LR.dtype == torch.float32
    shapes = {torch.float16: (), torch.int8: values_LR.shape[1:]}
    return scale.dtype == torch.float32 and shapes.get(values_LR.dtype) == scale.shape


def _kind(member: Any) -> str:
    return f"{member.dtype} {tuple(member.shape)}" if isinstance(member, Tensor) else type(member).__name__
