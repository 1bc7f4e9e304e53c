"""Linear centered kernel alignment (CKA) in feature form (FedHeNN).

With Ac = A minus its column means, K = A A^T and H = I - 11^T/L:

    CKA(K_a, K_b) = HSIC(K_a, K_b) / sqrt(HSIC(K_a, K_a) HSIC(K_b, K_b)),   HSIC(K, M) = tr(K H M H) / (L - 1)^2
                  = ||Bc^T Ac||_F^2 / (||Ac^T Ac||_F ||Bc^T Bc||_F)                         (L x L is never formed)
    d_CKA = 1 - CKA,   and with F F^T ~ H K_bar H (`kernel_factor.py`)   CKA(K_a, K_bar) = cka(A, F)

Makhija et al., ICML 2022, sections 3.2 and 3.3; Kornblith et al., ICML 2019. The paper's eq. 4 leaves out the
centering, without which its two sides differ; here both sides are always centered. CKA does not change under rotation,
scaling (s != 0) or translation of a representation; it does change under a general invertible map.

Numbers: float32 or wider, autocast off. A is divided by max|A| first (CKA does not see it). If what centering leaves is
at most 32 machine epsilons of that, all rows are equal as far as the numbers can tell: CKA is 0 and so is its gradient.
(A fixed bound on ||Ac^T Ac||_F does not do: it grows with L and d, even when only rounding is left.)

Shapes: L rows (the same inputs for all), D and E feature widths, r columns of a factor, N representations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyfed.functional.centering import center, center_and_scale, max_abs, nonzero, same_rows

BLOCK = 512  # rows; a d x d or L x L product whose smaller side is above this is worked through in such blocks


# ---- CKA -----------------------------------------------------------------------------------------------------------


def hsic(k_LL: Tensor, m_LL: Tensor) -> Tensor:
    """HSIC(K, M) = tr(K H M H) / (L - 1)^2, biased, straight from the definition: for tests and small matrices.

    Raises:
        ValueError: not two square matrices of one size of at least 2.
    """
    if k_LL.shape != m_LL.shape or k_LL.dim() != 2 or k_LL.shape[0] != k_LL.shape[1] or k_LL.shape[0] < 2:
        raise ValueError(f"expected two (L, L) kernels, L > 1, got {tuple(k_LL.shape)} and {tuple(m_LL.shape)}")
    hkh_LL = center(center(k_LL).mT).mT
    return (hkh_LL * center(m_LL)).sum() / (k_LL.shape[0] - 1) ** 2


def cka(a_LD: Tensor, b_LE: Tensor) -> Tensor:
    """Linear CKA of two representations of the same L inputs (0-d); differentiable in both, not clamped to [0, 1].

    Args:
        a_LD: representation; D and E may differ, and be larger than L.
        b_LE: representation.

    Raises:
        ValueError: not two matrices with the same number of rows.

    Source: FedHeNN, eq. 4, with the centering it leaves out.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]])
    >>> bool((cka(a, -3 * a + 1) - 1).abs() < 1e-6)
    True
    """
    same_rows(a_LD, b_LE)
    value: Tensor = _Cka.apply(a_LD, b_LE)[0]  # type: ignore[no-untyped-call]
    return value


def cka_to_factor(a_LD: Tensor, factor_Lr: Tensor) -> Tensor:
    """CKA(K_a, F F^T), both centered anew on the rows given, so any common subset of rows (a RAD minibatch) will do.

    Args:
        a_LD: representation.
        factor_Lr: ``Factor.matrix``, or the same rows of it; a representation is a factor of its own kernel.

    Raises:
        ValueError: not two matrices with the same number of rows.
    """
    return cka(a_LD, factor_Lr)


def alignment(a_LD: Tensor, factor_Lr: Tensor) -> Tensor:
    """d_CKA = 1 - CKA(K_a, F F^T): FedHeNN's alignment loss in eq. 5 and 6 (0-d). As ``cka_to_factor``."""
    return 1 - cka_to_factor(a_LD, factor_Lr)


def alignment_gradient(a_LD: Tensor, factor_Lr: Tensor) -> Tensor:
    """The gradient of ``alignment`` in A by its closed form, which autograd takes, too.

    With a = ||F^T Ac||_F^2, b = ||Ac^T Ac||_F, c = ||F^T F||_F:
    d d_CKA / dA = -(2 / (b c)) [ F (F^T Ac) - (a / b^2) Ac (Ac^T Ac) ].
    Its columns sum to 0 and it is orthogonal to A: aligning never changes ||A||.

    Returns:
        (L, D), float32 at least.

    Raises:
        ValueError: not two matrices with the same number of rows.

    Source: derived from the formula above; `tests/functional/test_kernels.py` compares it with finite differences.
    """
    same_rows(a_LD, factor_Lr)
    with torch.no_grad(), torch.autocast(a_LD.device.type, enabled=False):
        return -_slope(centered_parts(a_LD, factor_Lr), max_abs(a_LD))


def cka_matrix(representations: Sequence[Tensor]) -> Tensor:
    """Linear CKA of every pair, for analysis: (N, N), symmetric, clamped to [0, 1], no gradient.

    Args:
        representations: matrices with the same L rows; widths may differ.

    Raises:
        ValueError: none given, or the numbers of rows differ.
    """
    if not representations:
        raise ValueError("expected at least one representation, got none")
    for a_LD in representations:
        same_rows(representations[0], a_LD)
    with torch.no_grad(), torch.autocast(representations[0].device.type, enabled=False):
        ready = [center_and_scale(a_LD) for a_LD in representations]
        norms = [nonzero(_gram(a_LD)[0]).sqrt() for a_LD in ready]
        rows = [
            torch.stack([_cross(a, b)[0] / (x * y) if j <= i else torch.zeros_like(x)])
            for i, (a, x) in enumerate(zip(ready, norms, strict=True))
            for j, (b, y) in enumerate(zip(ready, norms, strict=True))
        ]
        lower = torch.cat(rows).reshape(len(ready), len(ready))
        return (lower + lower.tril(-1).mT).clamp(0, 1)


def mean_pairwise_cka(representations: Sequence[Tensor]) -> Tensor:
    """Mean of ``cka_matrix`` off its diagonal (0-d): how alike N networks see the same inputs.

    Raises:
        ValueError: fewer than two representations, or the numbers of rows differ.
    """
    n = len(representations)
    if n < 2:
        raise ValueError(f"expected at least two representations to compare, got {n}")
    matrix = cka_matrix(representations)
    return (matrix.sum() - matrix.diagonal().sum()) / (n * (n - 1))


# ---- value and gradient --------------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """What CKA and its gradients are made of.

    a_LD, b_LE: prepared. norm_a, norm_b: ||A^T A||_F, ||B^T B||_F, never 0; ab: ||A^T B||_F^2.
    gram_a, gram_b, cross_DE: the products behind them, as `_gram` and `_cross` have formed them.
    """

    a_LD: Tensor
    b_LE: Tensor
    norm_a: Tensor
    norm_b: Tensor
    ab: Tensor
    gram_a: Tensor
    gram_b: Tensor
    cross_DE: Tensor

    def swapped(self) -> _Parts:
        """With A and B in each other's place."""
        return _Parts(
            self.b_LE, self.a_LD, self.norm_b, self.norm_a, self.ab, self.gram_b, self.gram_a, self.cross_DE.mT
        )


def centered_parts(a_LD: Tensor, b_LE: Tensor) -> _Parts:
    a_LD, b_LE = center_and_scale(a_LD, b_LE.dtype), center_and_scale(b_LE, a_LD.dtype)
    (aa, gram_a) = _gram(a_LD)
    (bb, gram_b) = _gram(b_LE)
    (ab, cross_DE) = _cross(a_LD, b_LE)
    # a norm is 0 only for equal rows, and then so is ab: dividing by 1 leaves value and gradient 0
    return _Parts(a_LD, b_LE, nonzero(aa).sqrt(), nonzero(bb).sqrt(), ab, gram_a, gram_b, cross_DE)


def _slope(parts: _Parts, peak: Tensor) -> Tensor:
    """The gradient of CKA in A, by the closed form of `alignment_gradient`; peak: what A was divided by."""
    a_LD, b_LE = parts.a_LD, parts.b_LE
    pull = 2 / (parts.norm_a * parts.norm_b) / nonzero(peak)
    keep = pull * parts.ab / parts.norm_a.square()
    formed = parts.cross_DE.numel() > 0
    towards_LD = b_LE @ (pull * parts.cross_DE.mT) if formed else pull * _times_kernel(b_LE, a_LD)
    if parts.gram_a.numel():
        gram = keep * parts.gram_a
        slope_LD = towards_LD - (a_LD @ gram if a_LD.shape[1] <= a_LD.shape[0] else gram @ a_LD)
    else:
        slope_LD = towards_LD - keep * _times_kernel(a_LD, a_LD)
    return slope_LD - slope_LD.mean(dim=0)  # 0 but for rounding, which would add up in a bias


class _Cka(torch.autograd.Function):
    """CKA, followed by its parts, which are no outputs to anybody else; gradients in closed form from these.

    Where a derivative of the gradient may be asked for (``create_graph``, ``torch.func.grad``), the parts are made
    anew by operations that have one.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a_LD: Tensor, b_LE: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(a_LD.device.type, enabled=False):
            parts = centered_parts(a_LD, b_LE)
            return parts.ab / (parts.norm_a * parts.norm_b), *parts

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if grad is None:
            return None, None
        a_LD, b_LE, *made = ctx.saved_tensors
        with torch.autocast(a_LD.device.type, enabled=False):
            parts = centered_parts(a_LD, b_LE) if torch.is_grad_enabled() else _Parts(*made)
            in_a, in_b = ctx.needs_input_grad
            return (
                (grad * _slope(parts, max_abs(a_LD))).to(a_LD.dtype) if in_a else None,
                (grad * _slope(parts.swapped(), max_abs(b_LE))).to(b_LE.dtype) if in_b else None,
            )


# ---- products in blocks --------------------------------------------------------------------------------------------


def kernel_squared_norm(a_LD: Tensor) -> Tensor:
    """||A A^T||_F^2 (0-d), of A as it is, by the smaller of the two products."""
    return _gram(a_LD)[0]


def _gram(a_LD: Tensor) -> tuple[Tensor, Tensor]:
    """||A^T A||_F^2 = ||A A^T||_F^2, and the smaller of the two products; that is empty where above ``BLOCK``."""
    tall = a_LD if a_LD.shape[1] <= a_LD.shape[0] else a_LD.mT
    if tall.shape[1] <= BLOCK:
        gram = tall.mT @ tall
        return gram.square().sum(), gram
    squares = []
    for start in range(0, tall.shape[1], BLOCK):
        upper = (
            tall[:, start : start + BLOCK].mT @ tall[:, start:]
        )  # symmetric: what is right of the block counts twice
        squares.append(upper.square().sum() + upper[:, upper.shape[0] :].square().sum())
    return torch.stack(squares).sum(), a_LD.new_empty(0)


def _cross(a_LD: Tensor, b_LE: Tensor) -> tuple[Tensor, Tensor]:
    """||A^T B||_F^2 = <A A^T, B B^T>, and A^T B; that is empty where both of its sides are above ``BLOCK``."""
    if min(a_LD.shape[1], b_LE.shape[1]) <= BLOCK:
        cross_DE = a_LD.mT @ b_LE
        return cross_DE.square().sum(), cross_DE
    if _by_rows(a_LD, b_LE):
        pairs = zip(torch.split(a_LD, BLOCK), torch.split(b_LE, BLOCK), strict=True)
        squares = [((a @ a_LD.mT) * (b @ b_LE.mT)).sum() for a, b in pairs]
    else:
        squares = [(a.mT @ b_LE).square().sum() for a in torch.split(a_LD, BLOCK, dim=1)]
    return torch.stack(squares).sum(), a_LD.new_empty(0, 0)


def _by_rows(a_LD: Tensor, b_LE: Tensor) -> bool:
    """Whether L^2 (D + E) products, by row blocks of the kernels, are fewer than the 2 L D E by columns."""
    (rows, d) = a_LD.shape
    e = b_LE.shape[1]
    return rows * (d + e) < 2 * d * e


def _times_kernel(b_LE: Tensor, a_LD: Tensor) -> Tensor:
    """B B^T A with at most BLOCK rows of B B^T, or columns of B^T A, at a time."""
    if _by_rows(a_LD, b_LE):
        return torch.cat([(rows @ b_LE.mT) @ a_LD for rows in torch.split(b_LE, BLOCK)])
    return torch.cat([b_LE @ (b_LE.mT @ columns) for columns in torch.split(a_LD, BLOCK, dim=1)], dim=1)
