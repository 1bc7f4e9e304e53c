"""A low-rank factor of a mean of centered linear kernels, from one representation after the other (FedHeNN).

    K_j = A_j A_j^T,   K_bar = sum_j w_j K_j,   F F^T ~ H K_bar H up to scale,   CKA(K_a, K_bar) = cka(A, F)

with H = I - 11^T/L; an L x L array is formed only beside representations that are as wide, of few rows. Makhija et al.,
ICML 2022, eq. 6. Numbers: as in `kernels.py`.

Shapes: L rows (the same inputs for all), D feature width, W columns gathered, r columns of the factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyfed.functional.averaging import normalize
from polyfed.functional.centering import center, center_and_scale, max_abs, nonzero, same_rows
from polyfed.functional.kernels import kernel_squared_norm

_SPARE = 16  # columns that a factor being gathered has beyond its rank
KERNEL_ROWS = 1024  # most rows for which an L x L kernel is added up: its eigenvectors take some tenths of a second


class Factor(NamedTuple):
    """F with F F^T ~ s H K_bar H for some s > 0.

    matrix: F, (L, rank), largest absolute entry 1 (so float16 cannot overflow); all 0 if K_bar is.
    tail: at least tau = ||F F^T / s - H K_bar H||_F / ||H K_bar H||_F, and 0 where F is exact; no CKA is off by more
        than sqrt(2 - 2 sqrt(1 - tail^2)).
    rank: number of columns.
    """

    matrix: Tensor
    truncation_error: float
    rank: int


class MeanKernelFactor:
    """F with F F^T ~ sum_j w_j H K_j H up to scale, from one representation after the other.

    With G_j = sqrt(w_j) Ac_j: F = [G_1, ..., G_N], exact, while the sum of the widths is at most ``exact_rank``. Beyond
    that columns are gathered, and what is too wide gives way to its leading part, half as wide: U S of G = U S V^T, by
    the eigenvectors V of the small G^T G. From the first A_j with as many columns as rows on, of at most 1024 rows, the
    kernel itself is added up instead, which takes less time, and nothing more gives way. In the end ``rank`` columns
    are left. Memory is at most L x 2 (rank + 16), L x L, or the kept A_j while it is exact, and a few copies of one
    A_j, however many there are.

    Args:
        rank: r, columns of F at most (fewer if K_bar has no more), where it is not exact.
        exact_rank: largest sum of widths for which F is exact.
        norm: "none" (the paper), or "fro": w_j / ||Ac_j^T Ac_j||_F instead of w_j, so that a wide network's large
            kernel does not drown the others. Representations with equal rows then count 0.

    Raises:
        ValueError: a hyperparameter is out of range.

    Source: K_bar of FedHeNN, eq. 6.
    """

    def __init__(self, rank: int = 128, exact_rank: int = 256, norm: str = "none") -> None:
        if norm not in ("none", "fro"):
            raise ValueError(f"expected norm 'none' or 'fro', got '{norm}'")
        if rank < 1:
            raise ValueError(f"expected rank of at least 1, got {rank}")
        self._rank = rank
        self._exact_rank = exact_rank
        self._fro = norm == "fro"
        self._weights: list[float] = []
        self._width = 0  # sum of the widths
        self._first: Tensor | None = None  # column of the first
        self._peak = torch.zeros((), dtype=torch.float64)  # max|A_j| of all, the common unit
        self._parts: list[_Part] = []  # all of them, while they are exact
        self._columns: Tensor | None = None  # G, once they were not
        self._kernel: Tensor | None = None  # G G^T in place of G, once an A_j was wide
        self._left_out = 0.0  # sum of the norms of what gave way

    @property
    def total(self) -> float:
        """Sum of the weights so far: without one above 0 there is no mean kernel."""
        return sum(self._weights)

    @torch.no_grad()
    def add(self, a_LD: Tensor, weight: float = 1.0) -> None:
        """Take in A_j with its weight w_j, relative to those of the others.

        Raises:
            ValueError: other rows than the first has, inf or nan.
        """
        self._first = a_LD[:, :1].clone() if self._first is None else self._first
        same_rows(self._first, a_LD)
        peak = max_abs(a_LD).double().cpu()
        if not bool(peak.isfinite()):
            place = len(self._weights)
            raise ValueError(f"expected finite representations, got inf or nan in those at positions [{place}]")
        with torch.autocast(a_LD.device.type, enabled=False):
            ready_LD = center_and_scale(a_LD)
            size = kernel_squared_norm(ready_LD).sqrt() if self._fro else max_abs(ready_LD)
            mean_D = a_LD.to(ready_LD.dtype).mean(dim=0)
            self._weights.append(float(weight))
            self._width += a_LD.shape[1]
            self._parts.append(_Part(a_LD, mean_D, size.double().cpu(), peak, float(weight)))
            self._raise_peak(peak)
            if self._width > self._exact_rank:
                for part in self._parts:
                    self._gather(self._scaled(part, part.weight))
                self._parts = []

    @torch.no_grad()
    def result(self) -> Factor:
        """The factor of what came so far.

        Its tail is an upper bound, and close to tau where tau is not tiny. What gave way is positive semidefinite, so
        that with e, the sum of its norms, tau <= e / sqrt(||F F^T||_F^2 + e^2).

        Raises:
            ValueError: nothing came, or the weights are unusable.
        """
        shares = normalize(self._weights)
        with torch.autocast(self._like.device.type, enabled=False):
            if self._columns is None and self._kernel is None:
                scaled = [self._scaled(part, share) for part, share in zip(self._parts, shares, strict=True)]
                f_Lr = torch.cat(scaled, dim=1)
                tail = 0.0
            else:
                f_Lr, norm, rest = self._leading_columns()
                rest += self._left_out
                tail = rest / math.hypot(norm, rest) if rest else 0.0
            return Factor(f_Lr / nonzero(max_abs(f_Lr)), tail, f_Lr.shape[1])

    def _leading_columns(self) -> tuple[Tensor, float, float]:
        if self._kernel is None:
            assert self._columns is not None
            return _leading(self._columns, self._rank)
        values_r, vectors_Lr, norm, rest = _leading_eigenvectors(self._kernel, self._rank)
        return center((vectors_Lr * values_r.sqrt()).to(self._kernel)), norm, rest

    @property
    def _like(self) -> Tensor:
        assert self._first is not None
        return self._first

    def _scaled(self, part: _Part, share: float) -> Tensor:
        """G_j = sqrt(w_j) Ac_j, over the common unit or that of its kernel."""
        dtype = torch.promote_types(self._like.dtype, torch.float32)
        unit = nonzero(part.size) * nonzero(part.peak) ** 2 if self._fro else nonzero(self._peak) ** 2
        square = torch.where(part.size > 0, share / unit, torch.zeros_like(unit))  # 0: equal rows
        return (part.a_LD.to(dtype) - part.mean_D.to(dtype)).mul_(square.sqrt().to(dtype))

    def _raise_peak(self, peak: Tensor) -> None:
        before = self._peak
        self._peak = torch.maximum(self._peak, peak)
        if not self._fro and self._peak > before:
            shrunk = float(nonzero(before) / self._peak)
            self._columns = None if self._columns is None else self._columns * shrunk
            self._kernel = None if self._kernel is None else self._kernel * shrunk**2
            self._left_out = self._left_out * shrunk**2

    def _gather(self, g_LD: Tensor) -> None:
        if self._kernel is None and len(g_LD) <= min(g_LD.shape[1], KERNEL_ROWS):
            held = g_LD[:, :0] if self._columns is None else self._columns
            self._kernel = held @ held.mT
            self._columns = None
        if self._kernel is not None:
            self._kernel.addmm_(g_LD, g_LD.mT)
            return
        half = self._rank + _SPARE
        for piece in g_LD.split(half, dim=1):
            held = g_LD[:, :0] if self._columns is None else self._columns
            if held.shape[1] + piece.shape[1] > 2 * half:
                held, _, rest = _leading(held, half)
                self._left_out += rest
            self._columns = torch.cat([held, piece], dim=1)


class _Part(NamedTuple):
    """A_j, its column means, the size and the peak by which it is scaled (0-d float64; size 0: equal rows), w_j."""

    a_LD: Tensor
    mean_D: Tensor
    size: Tensor
    peak: Tensor
    weight: float


def kernel_factor(
    representations: Iterable[Tensor],
    weights: Sequence[float],
    rank: int = 128,
    exact_rank: int = 256,
    norm: str = "none",
) -> Factor:
    """F with F F^T ~ sum_j w_j H K_j H up to scale: `MeanKernelFactor` of all of them.

    Args:
        representations: A_1..A_N with the same L rows; gone through once, so that one at a time need exist.
        weights: w_j, one each, normalized here to sum 1 (the paper: all equal).
        rank, exact_rank, norm: as in `MeanKernelFactor`.

    Raises:
        ValueError: no representations; weights unusable or not one each; rows differ; a hyperparameter is out of range.
    """
    shares = normalize(weights)
    stream = MeanKernelFactor(rank, exact_rank, norm)
    count = 0
    for count, a_LD in enumerate(representations, 1):
        if count <= len(shares):
            stream.add(a_LD, weights[count - 1])
    if count != len(shares):
        raise ValueError(f"expected one weight per representation, got {len(shares)} weights for {count}")
    return stream.result()


def _leading(g_LW: Tensor, most: int) -> tuple[Tensor, float, float]:
    """At most so many leading columns of U S, where G = U S V^T; the norms of their kernel and of what is left out."""
    _, vectors_Wr, norm, rest = _leading_eigenvectors(g_LW.mT @ g_LW, most)
    return center(g_LW @ vectors_Wr.to(g_LW)), norm, rest


def _leading_eigenvectors(gram_WW: Tensor, most: int) -> tuple[Tensor, Tensor, float, float]:
    """At most so many leading eigenvalues (r,) and eigenvectors (W, r), float64 on the CPU, beginning with the largest.

    Returns:
        Also the norm of these values, and of those that are left out. Where all are 0, one vector of zeros.
    """
    values_W, vectors_WW = torch.linalg.eigh(gram_WW.cpu().double())  # ascending; some devices have no float64
    values_W = values_W.clamp(min=0)
    keep_W = values_W > values_W[-1] * 4 * torch.finfo(gram_WW.dtype).eps  # the rest is rounding
    keep_W[:-most] = False
    norm = float(values_W[keep_W].norm())
    rest = float(values_W[~keep_W].norm())
    if not bool(keep_W.any()):
        return values_W[:1], torch.zeros_like(vectors_WW[:, :1]), norm, rest
    return values_W[keep_W].flip(0), vectors_WW[:, keep_W].flip(1), norm, rest
