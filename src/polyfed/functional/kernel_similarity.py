"""The ways to compare representations of the same inputs (FedHeNN), behind `kernel_distance`.

    similarity    distance to a target                        a factor as the target
    linear        1 - CKA of linear kernels                   yes, of any mean of kernels
    rbf           1 - CKA of RBF kernels                      yes, of a mean of RBF kernels
    procrustes    orthogonal Procrustes distance              no: it compares no kernels

Linear centered kernel alignment (CKA). With Ac = A minus its column means, K = A A^T and H = I - 1 1^T / L:

    CKA(K_a, K_b) = HSIC(K_a, K_b) / sqrt(HSIC(K_a, K_a) HSIC(K_b, K_b)),   HSIC(K, M) = tr(K H M H) / (L - 1)^2
                  = ||Bc^T Ac||_F^2 / (||Ac^T Ac||_F ||Bc^T Bc||_F)                         (L x L is never formed)

Makhija et al., ICML 2022, section 3.4; Kornblith et al., ICML 2019. The paper's eq. 4 leaves out the centering, without
which its two sides differ; here both sides are always centered. CKA does not change under rotation, scaling (s != 0) or
translation of a representation; it does change under a general invertible map. If what centering leaves is at most 32
machine epsilons of max|A|, all rows are equal as far as the numbers can tell: CKA is 0 and so is its gradient. (A fixed
bound on ||Ac^T Ac||_F does not do: it grows with L and d, even when only rounding is left.)

RBF kernels, exact on the rows given, and Nystroem features for their mean:

    k(u, v) = exp(-||u - v||^2 / (2 s^2)),   s = f * median ||u - v|| over the pairs of rows of the same matrix
    CKA(K, M) = <H K H, H M H> / (||H K H||_F ||H M H||_F),   H K H by means of rows and columns
    K_nm = k(A, S) for landmarks S,   Z = K_nm K_mm^(-1/2),   Z Z^T ~ K

Makhija et al., ICML 2022, section 3.4 and table 3; the median rule and f = 0.5 are Kornblith et al., ICML 2019. As f
grows CKA tends to the linear one. s is a constant for the gradient, which therefore may change the scale.

Orthogonal Procrustes distance (the paper's section 3.4, homogeneous clients only; Schoenemann, 1966):

    d(A, M) = min over orthogonal R of ||A / ||A||_F - M / ||M||_F R||_F^2 = 2 - 2 ||M^T A||_* / (||A||_F ||M||_F)

with A and M centered, ||.||_* the sum of the singular values; in [0, 2]. It does not change under rotation, scaling
(s != 0) or translation. With M^T A = U S V^T the gradient of ||M^T A||_* in A is M U V^T: only vectors of singular
values above rounding enter, so it is finite for repeated values and for zeros, where it is the smallest subgradient. U
and V are never differentiated. Where all rows of A, or of M, are equal, d is 2, the largest,
and has no gradient.

Numbers: float32 or wider, autocast off. A is centered and divided by max|A| first. Squared distances
come from one product; those that are only rounding count as 0, so equal rows have k = 1 exactly and no gradient
between them. Alignments use K - 1, which H does not tell from K: 1 would drown a kernel with a large f.

Shapes: L rows (the same inputs for all), D and E feature widths, m landmarks.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from polyfed.functional.centering import center, center_and_scale, max_abs, nonzero, same_rows, smaller_gram

Similarity = Literal["linear", "rbf", "procrustes"]
WIDE = 512  # features; of wider representations of fewer rows the L x L kernels are formed in place of B^T A
_BLOCK = 512  # rows of K_nm at a time
_MEDIAN_ROWS = 1000  # with more rows, as many evenly spaced ones stand for all: nothing is drawn


def kernel_distance(
    similarity: Similarity, a_LD: Tensor, target_LE: Tensor, *, factor: bool, width: float = 0.5
) -> Tensor:
    """How far A is from the target (0-d): in [0, 1], with "procrustes" in [0, 2]; differentiable in A.

    Args:
        similarity: a row of the table above.
        factor: whether the target is a factor; "linear" does not need to know.
        width: f of "rbf"; the others do not look at it.

    Raises:
        ValueError: rows differ; "procrustes" with another width than A's.
    """
    with torch.autocast(a_LD.device.type, enabled=False):  # a network may compute in bfloat16, kernels may not
        a_LD = a_LD.float() if a_LD.dtype == torch.bfloat16 else a_LD
        if similarity == "linear":
            return alignment(a_LD, target_LE)
        if similarity == "rbf":
            return rbf_alignment(a_LD, target_LE, width, factor)
        return procrustes(a_LD, target_LE)


# ---- linear kernels -------------------------------------------------------------------------------------------------


def cka(a_LD: Tensor, b_LE: Tensor) -> Tensor:
    """Linear CKA of two representations of the same L inputs (0-d), not clamped to [0, 1]; B is a constant.

    A factor F stands for the kernel F F^T. Both sides are centered anew on the rows given, so that any common subset
    of rows (a RAD minibatch) will do; D and E may differ, and be larger than L.

    Raises:
        ValueError: not two matrices with the same number of rows.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]])
    >>> bool((cka(a, -3 * a + 1) - 1).abs() < 1e-6)
    True
    """
    same_rows(a_LD, b_LE)
    with torch.autocast(a_LD.device.type, enabled=False):
        a_LD, b_LE = center_and_scale(a_LD, b_LE.dtype), center_and_scale(b_LE.detach(), a_LD.dtype)
        aa, gram_a = smaller_gram(a_LD)
        bb, gram_b = smaller_gram(b_LE)
        if min(a_LD.shape[1], b_LE.shape[1]) <= max(len(a_LD), WIDE):
            ab = (b_LE.mT @ a_LD).square().sum()
        else:  # both grams are L x L
            ab = (gram_a * gram_b).sum()
        # a norm is 0 only for equal rows, and then so is ab: dividing by 1 leaves value and gradient 0
        return ab / (nonzero(aa).sqrt() * nonzero(bb).sqrt())


def alignment(a_LD: Tensor, factor_Lr: Tensor) -> Tensor:
    """d_CKA = 1 - CKA(K_a, F F^T): FedHeNN's alignment loss in eq. 5 and 6 (0-d)."""
    return 1 - cka(a_LD, factor_Lr)


# ---- RBF kernels ----------------------------------------------------------------------------------------------------


def rbf_alignment(a_LD: Tensor, target_LE: Tensor, width_factor: float, target_is_factor: bool) -> Tensor:
    """d_CKA = 1 - CKA(K_a, target), K_a the RBF kernel of A with its own median width (0-d).

    The target is a factor F, for F F^T, or else a representation, for its RBF kernel with a median width of its own.
    With a minibatch of the common inputs, widths and centering are the minibatch's.
    """
    same_rows(a_LD, target_LE)
    with torch.autocast(a_LD.device.type, enabled=False):
        own_LL = _kernel_minus_one(a_LD, width_factor)
        if target_is_factor:
            f_Lr = center_and_scale(target_LE, own_LL.dtype)
            return 1 - _kernel_cka(own_LL, f_Lr @ f_Lr.mT)
        return 1 - _kernel_cka(own_LL, _kernel_minus_one(target_LE, width_factor))


def _kernel_cka(k_LL: Tensor, m_LL: Tensor) -> Tensor:
    """CKA of two kernels (0-d); where centering leaves only rounding of one (all rows equal), 0 without a gradient."""
    k_LL, m_LL = _centered_kernel(k_LL, m_LL.dtype), _centered_kernel(m_LL, k_LL.dtype)
    kk = nonzero(k_LL.square().sum())
    mm = nonzero(m_LL.square().sum())
    return (k_LL * m_LL).sum() / (kk.sqrt() * mm.sqrt())


def _centered_kernel(k_LL: Tensor, partner: torch.dtype) -> Tensor:
    """H K H / max|K|, as `center_and_scale` does it for a representation."""
    wide = k_LL.to(torch.promote_types(torch.promote_types(k_LL.dtype, partner), torch.float32))
    centered = center(center(wide / nonzero(max_abs(wide))).mT).mT
    dead = centered.detach().abs().amax() <= 32 * torch.finfo(wide.dtype).eps
    return torch.where(dead, torch.zeros_like(centered), centered)


@torch.no_grad()
def nystroem_features(a_LD: Tensor, width_factor: float, landmarks: int, generator: torch.Generator) -> Tensor:
    """Z with Z Z^T ~ K, the RBF kernel of A with its median width: (L, m), m = min(landmarks, L).

    Z = K_nm V diag(lambda)^(-1/2) with K_mm = V diag(lambda) V^T in float64; eigenvalues that are only rounding give
    columns of zeros. Memory: L x m and 512 x m. With as many landmarks as rows Z Z^T is K up to rounding.

    Args:
        a_LD: finite. width_factor: f.
        landmarks: rows drawn without replacement from `generator`; all rows, and nothing drawn, if there are no more.

    Source: Williams and Seeger, NIPS 2000.
    """
    with torch.autocast(a_LD.device.type, enabled=False):
        a_LD = center_and_scale(a_LD)
        width = width_factor * _median(a_LD)
        chosen_mD = a_LD
        if landmarks < a_LD.shape[0]:
            drawn = torch.randperm(a_LD.shape[0], generator=generator, device=generator.device)[:landmarks]
            chosen_mD = a_LD[drawn.to(a_LD.device)]

        def kernel(rows_BD: Tensor) -> Tensor:
            return torch.exp(-_squared_distances(rows_BD, chosen_mD) / (2 * width**2))

        k_mm = torch.cat([kernel(rows) for rows in chosen_mD.split(_BLOCK)])
        values_m, vectors_mm = torch.linalg.eigh(k_mm.double().cpu())  # float64 is missing on some devices
        keep = values_m > values_m[-1] * 4 * torch.finfo(a_LD.dtype).eps  # the rest is rounding
        root_mm = vectors_mm * torch.where(keep, values_m, math.inf).rsqrt()
        root_mm = root_mm.to(a_LD.device, a_LD.dtype)
        return torch.cat([kernel(rows) @ root_mm for rows in a_LD.split(_BLOCK)])


def _kernel_minus_one(a_LD: Tensor, factor: float) -> Tensor:
    """K - 1 of A with its own median width. The scale is taken out of both, so that no square over- or underflows."""
    ready_LD = center_and_scale(a_LD)
    distances = _squared_distances(ready_LD, ready_LD)
    return torch.expm1(-distances / (2 * (factor * _median(ready_LD)) ** 2))


@torch.no_grad()
def _median(a_LD: Tensor) -> Tensor:
    """Median distance between two rows (0-d): of an even number of pairs the lower of the two middle ones.

    If more than half of the pairs are equal rows, the root mean square distance takes its place; if all are, 1.
    """
    rows = a_LD.shape[0]
    if rows > _MEDIAN_ROWS:
        a_LD = a_LD[torch.arange(_MEDIAN_ROWS, device=a_LD.device) * rows // _MEDIAN_ROWS]
        rows = _MEDIAN_ROWS
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


# ---- Procrustes -----------------------------------------------------------------------------------------------------


def procrustes(a_LD: Tensor, m_LD: Tensor) -> Tensor:
    """d(A, M) in [0, 2] (0-d), not clamped; differentiable in A, M is a constant.

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
        a_LD, m_LD = center_and_scale(a_LD, m_LD.dtype), center_and_scale(m_LD.detach(), a_LD.dtype)
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
    """||M^T A||_*, with its gradient in A, M U V^T, as one more, constant, output.

    Where D > L, A^T = Q R turns the D x D matrix M^T A into an L x L one.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a_LD: Tensor, m_LD: Tensor) -> tuple[Tensor, Tensor]:
        if a_LD.shape[1] <= a_LD.shape[0]:
            value, direction_DD = _decomposed(m_LD.mT @ a_LD)
            return value, m_LD @ direction_DD
        (qa_DL, ra_LL) = torch.linalg.qr(a_LD.mT)
        rm_LL = torch.linalg.qr(m_LD.mT).R
        value, direction_LL = _decomposed(rm_LL @ ra_LL.mT)
        return value, rm_LL.mT @ direction_LL @ qa_DL.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        (to_a_LD,) = ctx.saved_tensors
        return grad * to_a_LD, None
