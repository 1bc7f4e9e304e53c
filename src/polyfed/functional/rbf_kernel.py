"""Centered kernel alignment with RBF kernels, exact on the rows given, and Nystroem features for their mean.

    k(u, v) = exp(-||u - v||^2 / (2 s^2)),   s = f * median ||u - v|| over the pairs of rows of the same matrix
    CKA(K, M) = <H K H, H M H> / (||H K H||_F ||H M H||_F),   H K H by means of rows and columns
    K_nm = k(A, S) for landmarks S,   Z = K_nm K_mm^(-1/2),   Z Z^T ~ K

Makhija et al., ICML 2022, section 3.2 and table 3; the median rule and f = 0.5 are Kornblith et al., ICML 2019. With it
CKA does not see the scale of a representation; as f grows it tends to the linear CKA. s is a constant for the
gradient, which therefore may change the scale, where that of the linear alignment never does.

Numbers: float32 or wider, autocast off, backward as well. A is centered and divided by max|A| first. Squared distances
come from one product; those that are only rounding count as 0, so equal rows have k = 1 exactly and no gradient
between them. Alignments use K - 1, which H does not tell from K: 1 would drown a kernel with a large f.

Shapes: L rows (the same inputs for all), D and E feature widths, m landmarks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from polyfed.functional.centering import center, center_and_scale, max_abs, nonzero

BLOCK = 512  # rows of K_nm at a time


@torch.no_grad()
def median_width(a_LD: Tensor, factor: float = 0.5, most: int = 1000) -> Tensor:
    """s: ``factor`` times the median distance between two rows of A (0-d, float32 at least, no gradient).

    Over the pairs i < j; of an even number of pairs the lower of the two middle ones. If more than half of the pairs
    are equal rows, the root mean square distance takes the median's place; if all are, max|A|, or 1 if that is 0.

    Args:
        a_LD: representation.
        factor: f, above 0.
        most: with more rows than this, as many evenly spaced ones stand for all: nothing is drawn.

    Raises:
        ValueError: not a matrix with rows; factor or most out of range.

    >>> median_width(torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 4.0], [3.0, 4.0]]), factor=2.0)
    tensor(7.0711)
    """
    if not 0 < factor < math.inf or most < 2:
        raise ValueError(f"expected a finite factor above 0 and at least 2 rows, got {factor} and {most}")
    with torch.autocast(a_LD.device.type, enabled=False):
        width: Tensor = factor * _median(center_and_scale(a_LD), most) * nonzero(max_abs(a_LD))
        return width


def rbf_kernel(a_LD: Tensor, width: Tensor | float) -> Tensor:
    """K with k(u, v) = exp(-||u - v||^2 / (2 s^2)): (L, L), float32 at least, differentiable in A.

    Args:
        a_LD: representation.
        width: s, above 0, in the units of A; 0-d where it is a tensor.

    Raises:
        ValueError: not a matrix with rows; a width that is a number, but none above 0.
    """
    if not isinstance(width, Tensor) and not 0 < width < math.inf:
        raise ValueError(f"expected a finite width above 0, got {width}")
    with torch.autocast(a_LD.device.type, enabled=False):
        return 1 + _kernel_minus_one(center_and_scale(a_LD), width / nonzero(max_abs(a_LD)))


def center_kernel(k_LL: Tensor) -> Tensor:
    """H K H by the means of its columns and then of its rows, in float32 at least.

    Raises:
        ValueError: not a square matrix with rows.
    """
    if k_LL.dim() != 2 or k_LL.shape[0] != k_LL.shape[1]:
        raise ValueError(f"expected a kernel of shape (L, L), got {tuple(k_LL.shape)}")
    return center(center(k_LL).mT).mT


def kernel_cka(k_LL: Tensor, m_LL: Tensor) -> Tensor:
    """CKA of two kernels of the same L inputs (0-d); differentiable in both, not clamped to [0, 1].

    Where centering leaves only rounding of a kernel (all rows equal), CKA is 0 and so is its gradient.

    Raises:
        ValueError: not two square matrices of one size.
    """
    if k_LL.shape != m_LL.shape:
        raise ValueError(f"expected two kernels of one size, got {tuple(k_LL.shape)} and {tuple(m_LL.shape)}")
    with torch.autocast(k_LL.device.type, enabled=False):
        k_LL, m_LL = _prepared_kernel(k_LL, m_LL.dtype), _prepared_kernel(m_LL, k_LL.dtype)
        kk = nonzero(k_LL.square().sum())
        mm = nonzero(m_LL.square().sum())
        return (k_LL * m_LL).sum() / (kk.sqrt() * mm.sqrt())


def rbf_alignment(a_LD: Tensor, target_LE: Tensor, width_factor: float, target_is_factor: bool) -> Tensor:
    """d_CKA = 1 - CKA(K_a, target), K_a the RBF kernel of A with its own median width (0-d).

    Exact on the rows given: with a minibatch of the common inputs, widths and centering are the minibatch's.

    Args:
        a_LD: representation; the gradient takes s as a constant.
        target_LE: the same rows of a factor F or of a representation.
        width_factor: f of A's width and, where it has one, the target's.
        target_is_factor: True: the target is F F^T (the mean kernel's factor). False: the RBF kernel of the target
            with the target's own median width.

    Raises:
        ValueError: not two matrices with the same number of rows; the factor of the width out of range.

    Source: FedHeNN, eq. 5 and 6 with the RBF kernel.
    """
    with torch.autocast(a_LD.device.type, enabled=False):
        own_LL = _with_own_width(a_LD, width_factor)
        if target_is_factor:
            f_Lr = center_and_scale(target_LE, own_LL.dtype)
            return 1 - kernel_cka(own_LL, f_Lr @ f_Lr.mT)
        return 1 - kernel_cka(own_LL, _with_own_width(target_LE, width_factor))


@torch.no_grad()
def nystroem_features(
    a_LD: Tensor, width_factor: float, landmarks: int, generator: torch.Generator | None = None
) -> Tensor:
    """Z with Z Z^T ~ K, the RBF kernel of A with its median width: (L, m), m = min(landmarks, L).

    Z = K_nm V diag(lambda)^(-1/2) with K_mm = V diag(lambda) V^T in float64; eigenvalues that are only rounding give
    columns of zeros. Memory: L x m and 512 x m. With as many landmarks as rows Z Z^T is K up to rounding.

    Args:
        a_LD: representation.
        width_factor: f.
        landmarks: rows drawn without replacement; all rows, and nothing drawn, if there are no more.
        generator: draws them; without one a generator with a fixed seed, never the global one.

    Raises:
        ValueError: not a matrix with rows; landmarks or width out of range; inf or nan in A.

    Source: Williams and Seeger, NIPS 2000.
    """
    if landmarks < 1:
        raise ValueError(f"expected at least 1 landmark, got {landmarks}")
    if not bool(a_LD.isfinite().all()):
        raise ValueError("expected a finite representation, got inf or nan")
    with torch.autocast(a_LD.device.type, enabled=False):
        width = median_width(a_LD, width_factor) / nonzero(max_abs(a_LD))
        a_LD = center_and_scale(a_LD)
        chosen_mD = a_LD
        if landmarks < a_LD.shape[0]:
            generator = generator if generator is not None else torch.Generator().manual_seed(0)
            drawn = torch.randperm(a_LD.shape[0], generator=generator, device=generator.device)[:landmarks]
            chosen_mD = a_LD[drawn.to(a_LD.device)]

        def kernel(rows_BD: Tensor) -> Tensor:
            return torch.exp(-_squared_distances(rows_BD, chosen_mD) / (2 * width**2))

        k_mm = torch.cat([kernel(rows) for rows in chosen_mD.split(BLOCK)])
        values_m, vectors_mm = torch.linalg.eigh(k_mm.double().cpu())  # float64 is missing on some devices
        keep = values_m > values_m[-1] * 4 * torch.finfo(a_LD.dtype).eps  # the rest is rounding
        root_mm = vectors_mm * torch.where(keep, values_m, math.inf).rsqrt()
        root_mm = root_mm.to(a_LD.device, a_LD.dtype)
        return torch.cat([kernel(rows) @ root_mm for rows in a_LD.split(BLOCK)])


# ---- distances -----------------------------------------------------------------------------------------------------


def _with_own_width(a_LD: Tensor, factor: float) -> Tensor:
    """K - 1 of A with its own width. The scale is taken out of both, so that no square over- or underflows."""
    return _kernel_minus_one(center_and_scale(a_LD), median_width(a_LD, factor) / nonzero(max_abs(a_LD)))


def _kernel_minus_one(a_LD: Tensor, width: Tensor | float) -> Tensor:
    distances: Tensor = _Distances.apply(a_LD)  # type: ignore[no-untyped-call]
    return torch.expm1(-distances / (2 * width**2))


def _prepared_kernel(k_LL: Tensor, partner: torch.dtype) -> Tensor:
    """H K H / max|K|, as ``prepared`` does it for a representation."""
    wide = k_LL.to(torch.promote_types(torch.promote_types(k_LL.dtype, partner), torch.float32))
    centered = center_kernel(wide / nonzero(max_abs(wide)))
    dead = centered.detach().abs().amax() <= 32 * torch.finfo(wide.dtype).eps
    return torch.where(dead, torch.zeros_like(centered), centered)


def _median(a_LD: Tensor, most: int) -> Tensor:
    """Median distance between rows of a prepared A; see ``median_width`` for ties."""
    rows = a_LD.shape[0]
    if rows > most:
        a_LD = a_LD[torch.arange(most, device=a_LD.device) * rows // most]
        rows = most
    if rows < 2:
        return a_LD.new_ones(())
    i, j = torch.triu_indices(rows, rows, offset=1, device=a_LD.device)
    squares_P = _squared_distances(a_LD, a_LD)[i, j]
    median = squares_P.median()
    return nonzero(torch.where(median == 0, squares_P.mean(), median).sqrt())


def _squared_distances(a_LD: Tensor, b_ME: Tensor) -> Tensor:
    """||a - b||^2 for every row of A and of B: (L, M); 0 where it is within the rounding of ||a||^2 + ||b||^2."""
    norms = a_LD.square().sum(1)[:, None] + b_ME.square().sum(1)
    squares = norms - 2 * a_LD @ b_ME.mT
    return torch.where(squares <= 32 * torch.finfo(a_LD.dtype).eps * norms, torch.zeros_like(squares), squares)


class _Distances(torch.autograd.Function):
    """``_squared_distances`` of A with itself; with S = G + G^T the gradient is 2 (diag(S 1) A - S A)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a_LD: Tensor) -> Tensor:
        return _squared_distances(a_LD, a_LD)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_LL: Tensor) -> Tensor:
        (a_LD,) = ctx.saved_tensors
        with torch.autocast(a_LD.device.type, enabled=False):
            both_LL = grad_LL + grad_LL.mT
            grad_LD: Tensor = 2 * (both_LL.sum(1)[:, None] * a_LD - both_LL @ a_LD)
            return grad_LD
