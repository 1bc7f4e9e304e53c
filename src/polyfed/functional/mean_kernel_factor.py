"""A low-rank factor of the mean kernel of many representations (FedHeNN, Makhija et al., ICML 2022, eq. 6).

With Ac = A minus its column means, K = A A^T and H = I - 1 1^T / L:

    K_bar = sum_j w_j K_j,   H K_bar H = sum_j w_j Ac_j Ac_j^T,   F F^T ~ H K_bar H up to scale

so that CKA(K_a, K_bar) is that of A and F (`kernel_similarity.cka`), and K_bar, L x L, is sent as L x r.

Shapes: L rows (the same inputs for all), D feature width, W columns gathered, r columns of a factor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from polyfed.functional.centering import center, center_and_scale, max_abs, nonzero, same_rows, smaller_gram

KERNEL_ROWS = 1024  # most rows for which an L x L kernel is added up: its eigenvectors take some tenths of a second
_SPARE = 16  # columns that a factor being gathered has beyond its rank


class Factor(NamedTuple):
    """F with F F^T ~ s H K_bar H for some s > 0.

    matrix: F, (L, rank), largest absolute entry 1 (so float16 cannot overflow); all 0 if K_bar is.
    truncation_error: e, at least ||F F^T / s - H K_bar H||_F / ||H K_bar H||_F, and 0 where F is exact; no CKA is off
        by more than sqrt(2 - 2 sqrt(1 - e^2)).
    rank: number of columns.
    """

    matrix: Tensor
    truncation_error: float
    rank: int


class MeanKernelFactor:
    """F with F F^T = sum_j H K_j H up to scale.

    It is exact while the sum of the widths is at most ``exact_rank``: F = [G_1, ..., G_N], G_j = Ac_j. Beyond that it
    is compressed to ``rank`` columns. Columns are gathered, and what is too wide gives way to its leading part, half as
    wide: U S of G = U S V^T, by the eigenvectors V of the small G^T G. From the first A_j with as many columns as rows
    on, of at most 1024 rows, the kernel itself is added up instead, which takes less time, and nothing more gives way.
    Memory is at most L x 2 (rank + 16), L x L, or the kept A_j while it is exact, and a few copies of one A_j, however
    many there are.

    Args:
        rank: r, columns of F at most (fewer if K_bar has no more), where it is not exact.
        exact_rank: largest sum of widths for which F is exact.
        norm: "none" (the paper), or "fro": K_j / ||Ac_j^T Ac_j||_F, so that a wide network's large kernel does not
            drown the others. Representations with equal rows then count 0.

    Source: K_bar of FedHeNN, eq. 6.
    """

    def __init__(self, rank: int = 128, exact_rank: int = 256, norm: str = "none") -> None:
        self.count = 0  # representations so far
        self._rank = rank
        self._exact_rank = exact_rank
        self._fro = norm == "fro"
        self._first: Tensor | None = None  # column of the first
        self._peak = torch.zeros((), dtype=torch.float64)  # max|A_j| of all, the common unit
        self._kept: list[_Representation] = []
        self._width = 0  # sum of the widths
        self._columns: Tensor | None = None  # G, once it was too wide
        self._kernel: Tensor | None = None  # G G^T in place of G, once an A_j was wide
        self._left_out = 0.0  # sum of the norms of what gave way

    @torch.no_grad()
    def add(self, a_LD: Tensor) -> None:
        """Take in A_j, of finite numbers and as many rows as the others have."""
        self._first = a_LD[:, :1].clone() if self._first is None else self._first
        same_rows(self._first, a_LD)
        before = self._peak
        self.count += 1
        self._width += a_LD.shape[1]
        with torch.autocast(a_LD.device.type, enabled=False):
            ready_LD = center_and_scale(a_LD)
            size = smaller_gram(ready_LD)[0].sqrt() if self._fro else max_abs(ready_LD)
            mean_D = a_LD.to(ready_LD.dtype).mean(dim=0)
            peak, size = torch.stack([max_abs(a_LD).double(), size.double()]).cpu()  # at once, as a GPU waits for it
            self._kept.append(_Representation(a_LD, mean_D, size, peak))
            self._peak = torch.maximum(before, peak)
            if not self._fro and self._peak > before:
                self._shrink(float(nonzero(before) / self._peak))
            if self._width > self._exact_rank:
                for one in self._kept:
                    self._gather(self._scaled(one, 1.0))  # 1/N left out: CKA does not see the scale
                self._kept = []

    @torch.no_grad()
    def result(self) -> Factor:
        """The factor of what was added so far, one at least.

        Its truncation error is an upper bound, and close where it is not tiny. What gave way is positive semidefinite,
        so that with e, the sum of its norms, tau <= e / sqrt(||F F^T||_F^2 + e^2).
        """
        with torch.autocast(self._like.device.type, enabled=False):
            if self._columns is None and self._kernel is None:
                f_Lr = torch.cat([self._scaled(one, 1 / self.count) for one in self._kept], dim=1)
                return Factor(f_Lr / nonzero(max_abs(f_Lr)), 0.0, f_Lr.shape[1])
            f_Lr, norm, rest = self._leading_columns()
            rest += self._left_out
            tail = rest / math.hypot(norm, rest) if rest else 0.0
            return Factor(f_Lr / nonzero(max_abs(f_Lr)), tail, f_Lr.shape[1])

    @property
    def _like(self) -> Tensor:
        assert self._first is not None
        return self._first

    def _scaled(self, one: _Representation, share: float) -> Tensor:
        """G_j = sqrt(share) Ac_j, over the common unit or that of its kernel."""
        dtype = torch.promote_types(self._like.dtype, torch.float32)
        unit = nonzero(one.size) * nonzero(one.peak) ** 2 if self._fro else nonzero(self._peak) ** 2
        square = torch.where(one.size > 0, share / unit, torch.zeros_like(unit))  # 0: equal rows
        return (one.a_LD.to(dtype) - one.mean_D.to(dtype)).mul_(square.sqrt().to(dtype))

    def _leading_columns(self) -> tuple[Tensor, float, float]:
        if self._kernel is None:
            assert self._columns is not None
            return _leading(self._columns, self._rank)
        values_r, vectors_Lr, norm, rest = _leading_eigenvectors(self._kernel, self._rank)
        return center((vectors_Lr * values_r.sqrt()).to(self._kernel)), norm, rest

    def _shrink(self, factor: float) -> None:
        """Express what is gathered in a unit that has become larger."""
        self._columns = None if self._columns is None else self._columns * factor
        self._kernel = None if self._kernel is None else self._kernel * factor**2
        self._left_out = self._left_out * factor**2

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


class _Representation(NamedTuple):
    """A_j, its column means, the size and the peak by which it is scaled (0-d float64; size 0: equal rows)."""

    a_LD: Tensor
    mean_D: Tensor
    size: Tensor
    peak: Tensor


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
