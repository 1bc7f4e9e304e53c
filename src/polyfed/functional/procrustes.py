"""Orthogonal Procrustes distance of two representations of one width, each centered and of norm 1.

    d(A, M) = min over orthogonal R of ||A / ||A||_F - M / ||M||_F R||_F^2 = 2 - 2 ||M^T A||_* / (||A||_F ||M||_F)

with A and M centered, ||.||_* the sum of the singular values; in [0, 2]. It does not change under rotation, scaling
(s != 0) or translation. With M^T A = U S V^T the gradient of ||M^T A||_* in A is M U V^T, in M it is A V U^T: only
vectors of singular values above rounding enter, so it is finite for repeated values and for zeros, where it is the
smallest subgradient. U and V are never differentiated.

Makhija et al., ICML 2022, section 3.2 (the alternative to CKA; homogeneous clients only); Schoenemann, 1966.

Numbers: as in `kernels.py`. Where all rows of A, or of M, are equal, d is 2, the largest, and has no gradient.

Shapes: L rows (the same inputs for both), D the common feature width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyfed.functional.centering import center_and_scale, nonzero


def procrustes(a_LD: Tensor, m_LD: Tensor) -> Tensor:
    """d(A, M) in [0, 2] (0-d); differentiable in both, not clamped.

    Raises:
        ValueError: not two matrices of one shape.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]])
    >>> bool(procrustes(a, -3 * a.flip(1) + 1).abs() < 1e-6)
    True
    """
    if a_LD.dim() != 2 or a_LD.shape != m_LD.shape:
        raise ValueError(
            "expected two representations of one shape (L, D), which the Procrustes distance needs, got "
            f"{tuple(a_LD.shape)} and {tuple(m_LD.shape)}"
        )
    with torch.autocast(a_LD.device.type, enabled=False):
        a_LD, m_LD = center_and_scale(a_LD, m_LD.dtype), center_and_scale(m_LD, a_LD.dtype)
        nuclear: Tensor = _Nuclear.apply(a_LD, m_LD)[0]  # type: ignore[no-untyped-call]
        aa = nonzero(a_LD.square().sum())
        mm = nonzero(m_LD.square().sum())
        return 2 - 2 * nuclear / (aa.sqrt() * mm.sqrt())


def _decomposed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """||X||_* and U V^T over the singular values above rounding. nan, where the SVD would raise, gives nan."""
    finite = matrix.isfinite().all()
    u, singular, vh = torch.linalg.svd(torch.where(finite, matrix, torch.zeros_like(matrix)), full_matrices=False)
    above = singular > singular[0] * max(matrix.shape) * torch.finfo(matrix.dtype).eps
    value = singular.sum()
    return torch.where(finite, value, torch.full_like(value, torch.nan)), (u * above) @ vh


class _Nuclear(torch.autograd.Function):
    """||M^T A||_*, with its gradients M U V^T and A V U^T as two more, constant, outputs.

    Where D > L, A^T = Q R turns the D x D matrix M^T A into an L x L one.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a_LD: Tensor, m_LD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if a_LD.shape[1] <= a_LD.shape[0]:
            value, direction_DD = _decomposed(m_LD.mT @ a_LD)
            return value, m_LD @ direction_DD, a_LD @ direction_DD.mT
        (qa_DL, ra_LL) = torch.linalg.qr(a_LD.mT)
        (qm_DL, rm_LL) = torch.linalg.qr(m_LD.mT)
        value, direction_LL = _decomposed(rm_LL @ ra_LL.mT)
        return value, rm_LL.mT @ direction_LL @ qa_DL.mT, ra_LL.mT @ direction_LL.mT @ qm_DL.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        to_a_LD, to_m_LD = ctx.saved_tensors
        return grad * to_a_LD, grad * to_m_LD
