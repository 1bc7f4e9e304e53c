"""What every comparison of representations begins with: the same rows, a common scale, columns of mean 0.

Shapes: L rows (the same inputs for all), D and E feature widths.
"""

from __future__ import annotations

import torch
from torch import Tensor


def center(a_LD: Tensor) -> Tensor:
    """H A: ``a_LD`` minus its column means, in float32 at least.

    Raises:
        ValueError: not a matrix, or no rows.

    >>> center(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    tensor([[-1.,  0.],
            [ 1.,  0.]])
    """
    _matrix(a_LD)
    wide = widened(a_LD)
    return wide - wide.mean(dim=0)


def _matrix(a_LD: Tensor) -> None:
    if a_LD.dim() != 2 or a_LD.shape[0] == 0 or a_LD.shape[1] == 0:
        raise ValueError(f"expected a representation of shape (L, D) with rows and columns, got {tuple(a_LD.shape)}")


def center_and_scale(a_LD: Tensor, partner: torch.dtype = torch.float32) -> Tensor:
    """Centered A / max|A|, at least as wide as its partner; exactly 0 (and no gradient) if only rounding is left.

    Raises:
        ValueError: not a matrix, or no rows.
    """
    wide = a_LD.to(torch.promote_types(torch.promote_types(a_LD.dtype, partner), torch.float32))
    _matrix(wide)
    centered = wide / nonzero(max_abs(a_LD))
    centered -= centered.mean(dim=0)  # in place here and below: what takes time is memory
    centered *= _peak(centered) > 32 * torch.finfo(wide.dtype).eps
    return centered


def max_abs(a_LD: Tensor) -> Tensor:
    """max|A| (0-d), float32 at least, a constant for the gradient (no similarity here sees the scale)."""
    return widened(_peak(a_LD))


def _peak(a_LD: Tensor) -> Tensor:
    a_LD = a_LD.detach()
    return torch.maximum(a_LD.amax(), -a_LD.amin())


def widened(t: Tensor) -> Tensor:
    """``t`` in float32 at least: differences of rounded products would be noise."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def nonzero(t: Tensor) -> Tensor:
    """``t`` with 1 for every 0, to divide by."""
    return torch.where(t == 0, torch.ones_like(t), t)


def same_rows(a_LD: Tensor, b_LE: Tensor) -> None:
    """Refuse anything but two matrices of the same number of rows.

    Raises:
        ValueError: the two shapes.
    """
    if a_LD.dim() != 2 or b_LE.dim() != 2 or a_LD.shape[0] != b_LE.shape[0]:
        raise ValueError(
            f"expected representations (L, D) and (L, E) of the same L inputs, got {tuple(a_LD.shape)} and "
            f"{tuple(b_LE.shape)}"
        )


def smaller_gram(a_LD: Tensor) -> tuple[Tensor, Tensor]:
    """||A^T A||_F^2 = ||A A^T||_F^2 (0-d), and the smaller of A^T A and A A^T."""
    gram = a_LD.mT @ a_LD if a_LD.shape[1] <= a_LD.shape[0] else a_LD @ a_LD.mT
    return gram.square().sum(), gram
