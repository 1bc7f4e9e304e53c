"""Gradients, rows of features and updates of bounded length, and noise on what is released."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from polyfed.functional.noise import on_grid


def clip_factors(norms: Tensor, most: float) -> Tensor:
    """The factors, of the norms' shape, that bring them down to `most`; exactly 1 where they are not above it.

    PyTorch divides a number by a tensor as number * (1 / tensor), which would miss that 1 by a rounding.
    """
    return torch.full_like(norms, most) / norms.clamp(min=most)


def clip_by_global_norm(grads: Mapping[str, Tensor | None], most: float) -> dict[str, Tensor | None]:
    """The gradients shrunk together, so that their common norm is at most `most`; 0 is no limit."""
    present = [g for g in grads.values() if g is not None]
    if not most or not present:
        return dict(grads)
    norm = torch.stack([g.square().sum() for g in present]).sum().sqrt()
    shrink = clip_factors(norm, most)
    return {name: None if g is None else g * shrink for name, g in grads.items()}


def clip_rows(s: Tensor, most: float) -> Tensor:
    """Rows (N, ...), each shrunk to the L2 norm `most` over all its entries where it is longer; in their own type.

    A row that is not finite, or whose norm is not, becomes zeros: nothing else would bound it.
    """
    norms: Tensor = torch.linalg.vector_norm(s.flatten(1).float(), dim=1)
    shape = (-1, *[1] * (s.dim() - 1))
    return torch.where(norms.isfinite().view(shape), s * clip_factors(norms, most).to(s.dtype).view(shape), 0.0)


Normals = Callable[[torch.Size], Tensor]  # a shape -> N(0, 1), float64


def clip_and_noise(
    update: Mapping[str, Tensor], bound: float, std: float, source: torch.Generator | Normals
) -> dict[str, Tensor]:
    """The update, shortened to the norm `bound` if it is longer, plus N(0, std^2) on every entry; std 0 draws nothing.

    Args:
        source: of the normal numbers. With others than a generator's, the result lies on a grid (`noise.on_grid`).
    """
    short = {name: t for name, t in clip_by_global_norm(update, bound).items() if t is not None}
    if not std:
        return short
    if isinstance(source, torch.Generator):
        return {name: t + std * torch.randn(t.shape, generator=source).to(t) for name, t in short.items()}
    return {name: on_grid(t.double() + std * source(t.shape).to(t.device), std).to(t) for name, t in short.items()}
