"""Gradients, and rows of features, of bounded length."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def clip_factors(norms: Tensor, most: float) -> Tensor:
    """The factors, of the norms' shape, that bring them down to `most`; exactly 1 where they are not above it.

    PyTorch divides a number by a tensor as number * (1 / tensor), which would miss that 1 by a rounding.

    >>> clip_factors(torch.tensor([0.7, 1.4]), 0.7)
    tensor([1.0000, 0.5000])
    """
    return torch.full_like(norms, most) / norms.clamp(min=most)


def clip_by_global_norm(grads: Mapping[str, Tensor | None], most: float) -> dict[str, Tensor | None]:
    """The gradients shrunk together, so that their common norm is at most `most`; 0 is no limit.

    >>> clip_by_global_norm({"w": torch.tensor([3.0]), "b": torch.tensor([4.0]), "unused": None}, 1.0)["b"]
    tensor([0.8000])
    """
    present = [g for g in grads.values() if g is not None]
    if not most or not present:
        return dict(grads)
    norm = torch.stack([g.square().sum() for g in present]).sum().sqrt()
    shrink = clip_factors(norm, most)
    return {name: None if g is None else g * shrink for name, g in grads.items()}


def clip_rows(s: Tensor, most: float) -> Tensor:
    """Rows (N, ...), each shrunk to the L2 norm `most` over all its entries where it is longer; in their own type.

    >>> clip_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    norms: Tensor = torch.linalg.vector_norm(s.flatten(1).float(), dim=1)
    return s * clip_factors(norms, most).to(s.dtype).view(-1, *[1] * (s.dim() - 1))
