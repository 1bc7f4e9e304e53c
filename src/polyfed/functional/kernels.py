"""Linear centred kernel alignment (CKA) in feature form, and a low-rank factor of a mean kernel (FedHeNN).

With Ac = A minus its column means, K = A A^T and H = I - 11^T/L:

    CKA(K_a, K_b) = HSIC(K_a, K_b) / sqrt(HSIC(K_a, K_a) HSIC(K_b, K_b)),   HSIC(K, M) = tr(K H M H) / (L - 1)^2
                  = ||Bc^T Ac||_F^2 / (||Ac^T Ac||_F ||Bc^T Bc||_F)                         (L x L is never formed)
    d_CKA = 1 - CKA,   K_bar = sum_j w_j K_j,   F F^T ~ H K_bar H,   CKA(K_a, K_bar) = cka(A, F)

Makhija et al., ICML 2022, sections 3.2 and 3.3; Kornblith et al., ICML 2019. The paper's eq. 4 leaves out the
centring, without which its two sides differ; here both sides are always centred. CKA does not change under rotation,
scaling (s != 0) or translation of a representation; it does change under a general invertible map.

Numbers: float32 or wider, autocast off. A is divided by max|A| first (CKA does not see it). If what centring leaves is
at most 32 machine epsilons of that, all rows are equal as far as the numbers can tell: CKA is 0 and so is its gradient.
(A fixed bound on ||Ac^T Ac||_F does not do: it grows with L and d, even when only rounding is left.)

Shapes: L rows (the same inputs for all), D and E feature widths, r columns of a factor, N representations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyfed.functional.averaging import normalise
from polyfed.functional.centring import centre, largest, nonzero, prepared, same_rows

BLOCK = 512  # rows; a d x d or L x L product whose smaller side is above this is worked through in such blocks


class Factor(NamedTuple):
    """F with F F^T ~ s H K_bar H for some s > 0.

    matrix: F, (L, rank), largest absolute entry 1 (so float16 cannot overflow); all 0 if K_bar is.
    tail: tau = ||F F^T / s - H K_bar H||_F / ||H K_bar H||_F; no CKA is off by more than sqrt(2 - 2 sqrt(1 - tau^2)).
    rank: number of columns.
    """

    matrix: Tensor
    tail: float
    rank: int


# ---- CKA -----------------------------------------------------------------------------------------------------------


def hsic(k_LL: Tensor, m_LL: Tensor) -> Tensor:
    """HSIC(K, M) = tr(K H M H) / (L - 1)^2, biased, straight from the definition: for tests and small matrices.

    Raises:
        ValueError: not two square matrices of one size of at least 2.
    """
    if k_LL.shape != m_LL.shape or k_LL.dim() != 2 or k_LL.shape[0] != k_LL.shape[1] or k_LL.shape[0] < 2:
        raise ValueError(f"expected two (L, L) kernels, L > 1, got {tuple(k_LL.shape)} and {tuple(m_LL.shape)}")
    hkh_LL = centre(centre(k_LL).mT).mT
    return (hkh_LL * centre(m_LL)).sum() / (k_LL.shape[0] - 1) ** 2


def cka(a_LD: Tensor, b_LE: Tensor) -> Tensor:
    """Linear CKA of two representations of the same L inputs (0-d); differentiable in both, not clamped to [0, 1].

    Args:
        a_LD: representation; D and E may differ, and be larger than L.
        b_LE: representation.

    Raises:
        ValueError: not two matrices with the same number of rows.

    Source: FedHeNN, eq. 4, with the centring it leaves out.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]])
    >>> bool((cka(a, -3 * a + 1) - 1).abs() < 1e-6)
    True
    """
    same_rows(a_LD, b_LE)
    # torch.func.grad under autocast runs the backward pass there too; the blocked products keep it in full precision
    plain = not torch.is_autocast_enabled(a_LD.device.type)
    with torch.autocast(a_LD.device.type, enabled=False):
        a_LD, b_LE = prepared(a_LD, b_LE.dtype), prepared(b_LE, a_LD.dtype)
        aa, bb, ab = _gram(a_LD, plain), _gram(b_LE, plain), _cross(a_LD, b_LE, plain)
        # a norm is 0 only for equal rows, and then so is ab: dividing by 1 leaves value and gradient 0
        return ab / (nonzero(aa).sqrt() * nonzero(bb).sqrt())


def cka_to_factor(a_LD: Tensor, factor_Lr: Tensor) -> Tensor:
    """CKA(K_a, F F^T), both centred anew on the rows given, so any common subset of rows (a RAD minibatch) will do.

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
    """The gradient of ``alignment`` in A by its closed form, at the cost of two products.

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
        scale = nonzero(largest(a_LD))
        a_LD, f_Lr = prepared(a_LD, factor_Lr.dtype), prepared(factor_Lr, a_LD.dtype)
        cross, b, c = _cross(a_LD, f_Lr), nonzero(_gram(a_LD)).sqrt(), nonzero(_gram(f_Lr)).sqrt()
        bracket_LD = _times_kernel(f_Lr, a_LD) - cross / b**2 * _times_kernel(a_LD, a_LD)
        return -2 / (b * c) * bracket_LD / scale


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
        ready = [prepared(a_LD) for a_LD in representations]
        norms = [nonzero(_gram(a_LD)).sqrt() for a_LD in ready]
        rows = [
            torch.stack([_cross(a, b) / (x * y) if j <= i else torch.zeros_like(x)])
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


# ---- the mean kernel -----------------------------------------------------------------------------------------------


@torch.no_grad()
def kernel_factor(
    representations: Callable[[], Iterable[Tensor]] | Sequence[Tensor],
    weights: Sequence[float],
    rank: int = 128,
    exact_rank: int = 256,
    norm: str = "none",
    generator: torch.Generator | None = None,
    oversampling: int = 16,
) -> Factor:
    """F with F F^T ~ sum_j w_j H K_j H up to scale, without any L x L array.

    With G_j = sqrt(w_j) Ac_j and D the sum of the widths: F = [G_1, ..., G_N], exact, if D <= ``exact_rank``; else
    randomised subspace iteration, Q = orth(K_bar Omega), twice Q = orth(K_bar Q), then the ``rank`` leading eigenpairs
    of Q^T K_bar Q. Products with K_bar are sums of G_j (G_j^T Q).

    Args:
        representations: A_1..A_N with the same L rows. A function is called anew for each pass (1 if exact, else
            5 + ceil(L / 512)) and may hand out one A_j at a time: memory is then L (rank + oversampling + 512) and
            a few copies of the largest A_j.
        weights: w_j, one each, normalised here to sum 1 (the paper: all equal).
        rank: r, columns of F at most (fewer if K_bar has no more).
        exact_rank: largest D for which F is exact.
        norm: "none" (the paper), or "fro": w_j / ||Ac_j^T Ac_j||_F instead of w_j, so that a wide network's large
            kernel does not drown the others. Representations with equal rows then count 0.
        generator: draws Omega; without one a generator with a fixed seed, never the global one.
        oversampling: columns of Omega beyond ``rank``.

    Returns:
        ``Factor``. Its tail is measured, not estimated: ||K_bar - F F^T||_F / ||K_bar||_F by row blocks of 512. That
        equals sqrt(1 - sum of the kept lambda^2 / ||K_bar||^2) without its cancellation (which in float32
        hides every tau below 3e-4), and needs L^2 D / 2 products where the pair sums need L D^2 / 2.

    Raises:
        ValueError: no representations; weights unusable or not one each; rows differ; a knob is out of range.

    Source: K_bar of FedHeNN, eq. 6; Halko, Martinsson and Tropp, SIAM Review 2011, algorithm 4.4.
    """
    if norm not in ("none", "fro"):
        raise ValueError(f"expected norm 'none' or 'fro', got '{norm}'")
    if rank < 1 or oversampling < 0:
        raise ValueError(f"expected rank of at least 1 and oversampling of at least 0, got {rank} and {oversampling}")
    shares = normalise(weights)

    def each() -> Iterator[Tensor]:
        return iter(representations() if callable(representations) else representations)

    # first pass: widths, column means, and the multiplier m_j of G_j = m_j (A_j - means)
    first: Tensor | None = None
    kept: list[Tensor] = []  # until they turn out too wide together
    peaks, norms, means, widths = [], [], [], []
    for a_LD in each():
        first = a_LD[:, :1].clone() if first is None else first
        same_rows(first, a_LD)
        prepared_LD = prepared(a_LD)
        peaks.append(largest(a_LD).double())
        norms.append((_gram(prepared_LD).sqrt() if norm == "fro" else prepared_LD.abs().amax()).double())
        means.append(a_LD.to(prepared_LD.dtype).mean(dim=0))
        widths.append(a_LD.shape[1])
        kept = [*kept, a_LD] if sum(widths) <= exact_rank else []
    if first is None or len(widths) != len(shares):
        raise ValueError(f"expected one weight per representation, got {len(shares)} weights for {len(widths)}")
    common = nonzero(torch.stack(peaks).amax())
    if not bool(common.isfinite()):
        bad = [j for j, peak in enumerate(peaks) if not bool(peak.isfinite())]
        raise ValueError(f"expected finite representations, got inf or nan in those at positions {bad}")
    dtype = torch.promote_types(first.dtype, torch.float32)
    multipliers = []
    for share, peak, size in zip(shares, peaks, norms, strict=True):
        square = share / (nonzero(size) * nonzero(peak) ** 2 if norm == "fro" else common**2)
        multipliers.append(torch.where(size > 0, square, torch.zeros_like(square)).sqrt().to(dtype))  # 0: equal rows

    def scaled(source: Iterable[Tensor]) -> Iterator[Tensor]:
        for a_LD, mean_D, m in zip(source, means, multipliers, strict=True):
            yield (a_LD.to(dtype) - mean_D.to(dtype)).mul_(m)

    def parts() -> Iterator[Tensor]:
        return scaled(each())

    with torch.autocast(first.device.type, enabled=False):
        if kept:
            f_Lr, tail = torch.cat(list(scaled(kept)), dim=1), 0.0
        else:
            f_Lr = _leading(parts, first.to(dtype), min(rank, sum(widths)), oversampling, generator)
            tail = _tail(parts, f_Lr)
        return Factor(f_Lr / nonzero(largest(f_Lr)), tail, f_Lr.shape[1])


def _leading(
    parts: Callable[[], Iterable[Tensor]], like: Tensor, rank: int, oversampling: int, generator: torch.Generator | None
) -> Tensor:
    """U_r diag(lambda_1..r)^(1/2) of K = sum_j G_j G_j^T by randomised subspace iteration."""
    generator = generator if generator is not None else torch.Generator().manual_seed(0)
    rows, columns = like.shape[0], min(rank + oversampling, like.shape[0])
    q_Lp = torch.randn(rows, columns, generator=generator, device=generator.device, dtype=like.dtype).to(like.device)
    for _ in range(3):
        image_Lp = torch.zeros_like(q_Lp)
        for g_LD in parts():
            image_Lp += g_LD @ (g_LD.mT @ q_Lp)
        q_Lp = torch.linalg.qr(image_Lp).Q
    small_pp = q_Lp.new_zeros(columns, columns)
    for g_LD in parts():
        projected_pD = q_Lp.mT @ g_LD
        small_pp += projected_pD @ projected_pD.mT
    values_p, vectors_pp = torch.linalg.eigh(small_pp.double().cpu())  # ascending; float64 is missing on some devices
    keep = values_p > values_p[-1] * 4 * torch.finfo(like.dtype).eps  # the rest is rounding
    values_r, vectors_pr = values_p[keep][-rank:].flip(0), vectors_pp[:, keep][:, -rank:].flip(1)
    if values_r.numel() == 0:
        return q_Lp.new_zeros(rows, 1)
    return centre(q_Lp @ (vectors_pr * values_r.sqrt()).to(q_Lp))


def _tail(parts: Callable[[], Iterable[Tensor]], f_Lr: Tensor) -> float:
    """||K - F F^T||_F / ||K||_F, K = sum_j G_j G_j^T, one block of rows at a time, its upper triangle only."""
    rest, whole = 0.0, 0.0
    for start in range(0, f_Lr.shape[0], BLOCK):
        rows = slice(start, start + BLOCK)
        k_BL = f_Lr.new_zeros(f_Lr[rows].shape[0], f_Lr.shape[0] - start)
        for g_LD in parts():
            k_BL += g_LD[rows] @ g_LD[start:].mT
        whole += _symmetric_square(k_BL)
        rest += _symmetric_square(k_BL - f_Lr[rows] @ f_Lr[start:].mT)
    return float((rest / whole) ** 0.5) if whole > 0 else 0.0


def _symmetric_square(k_BL: Tensor) -> float:
    """Squared norm of what a block of rows, cut off left of the diagonal, stands for in a symmetric matrix."""
    right = k_BL[:, k_BL.shape[0] :]
    return float(k_BL.square().sum() + right.square().sum())


# ---- products in blocks --------------------------------------------------------------------------------------------


def _gram(a_LD: Tensor, plain: bool = True) -> Tensor:
    """||A^T A||_F^2 = ||A A^T||_F^2, through the smaller of the two; ``plain``: by autograd where that is small."""
    tall = a_LD if a_LD.shape[1] <= a_LD.shape[0] else a_LD.mT
    if plain and tall.shape[1] <= BLOCK:
        return (tall.mT @ tall).square().sum()
    value: Tensor = _BlockedGram.apply(tall)  # type: ignore[no-untyped-call]
    return value


def _cross(a_LD: Tensor, b_LE: Tensor, plain: bool = True) -> Tensor:
    """||A^T B||_F^2 = <A A^T, B B^T>; ``plain``: by autograd where the products are small."""
    if plain and min(a_LD.shape[1], b_LE.shape[1]) <= BLOCK:
        return (a_LD.mT @ b_LE).square().sum()
    value: Tensor = _BlockedCross.apply(a_LD, b_LE)  # type: ignore[no-untyped-call]
    return value


def _by_rows(a_LD: Tensor, b_LE: Tensor) -> bool:
    """Whether L^2 (D + E) products, by row blocks of the kernels, are fewer than the 2 L D E by columns."""
    (rows, d), e = a_LD.shape, b_LE.shape[1]
    return rows * (d + e) < 2 * d * e


def _times_kernel(b_LE: Tensor, a_LD: Tensor) -> Tensor:
    """B B^T A with at most BLOCK rows of B B^T, or columns of B^T A, at a time."""
    if _by_rows(a_LD, b_LE):
        return torch.cat([(rows @ b_LE.mT) @ a_LD for rows in torch.split(b_LE, BLOCK)])
    return torch.cat([b_LE @ (b_LE.mT @ columns) for columns in torch.split(a_LD, BLOCK, dim=1)], dim=1)


class _BlockedGram(torch.autograd.Function):
    """||A^T A||_F^2 and its gradient 4 A (A^T A), in blocks both ways."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a_LD: Tensor) -> Tensor:
        blocks = []
        for start in range(0, a_LD.shape[1], BLOCK):
            upper = (
                a_LD[:, start : start + BLOCK].mT @ a_LD[:, start:]
            )  # A^T A is symmetric: count the right part twice
            blocks.append(upper.square().sum() + upper[:, upper.shape[0] :].square().sum())
        return torch.stack(blocks).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (a_LD,) = ctx.saved_tensors
        with torch.autocast(a_LD.device.type, enabled=False):
            return 4 * grad * _times_kernel(a_LD, a_LD)


class _BlockedCross(torch.autograd.Function):
    """||A^T B||_F^2 and its gradients 2 B (B^T A) and 2 A (A^T B), in blocks both ways."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a_LD: Tensor, b_LE: Tensor) -> Tensor:
        if _by_rows(a_LD, b_LE):
            pairs = zip(torch.split(a_LD, BLOCK), torch.split(b_LE, BLOCK), strict=True)
            return torch.stack([((a @ a_LD.mT) * (b @ b_LE.mT)).sum() for a, b in pairs]).sum()
        return torch.stack([(a.mT @ b_LE).square().sum() for a in torch.split(a_LD, BLOCK, dim=1)]).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a_LD, b_LE = ctx.saved_tensors
        need_a, need_b = ctx.needs_input_grad
        with torch.autocast(a_LD.device.type, enabled=False):
            return (
                2 * grad * _times_kernel(b_LE, a_LD) if need_a else None,
                2 * grad * _times_kernel(a_LD, b_LE) if need_b else None,
            )
