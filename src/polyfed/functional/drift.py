"""How far a model has gone since it was received: that length near a bound, and the way as it is released (FedDPA)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from polyfed.functional.clipping import clip_by_global_norm
from polyfed.functional.secure_noise import on_grid

Normals = Callable[[torch.Size], Tensor]  # a shape -> N(0, 1), float64


def bound_gap_penalty(params: Mapping[str, Tensor], reference: Mapping[str, Tensor], bound: float) -> Tensor:
    """``(||w - w_ref|| - C)^2``, the norm over all entries.

    Args:
        params: w by name. reference: w_ref, a constant for the gradient, with at least these names. bound: C.

    Returns:
        0-d tensor. Where a tensor is equal to its reference its norm has the gradient 0.

    Source: Yang et al. (FedDPA), NeurIPS 2023.

    >>> w, w_ref = {"a": torch.tensor([3.0, 4.0]), "b": torch.ones(1)}, {"a": torch.zeros(2), "b": torch.ones(1)}
    >>> bound_gap_penalty(w, w_ref, 7.0)
    tensor(4.)
    """
    norms_L = torch.stack([torch.linalg.vector_norm(w - reference[name].detach()) for name, w in params.items()])
    gap: Tensor = torch.linalg.vector_norm(norms_L) - bound
    return gap.square()


def clip_and_noise(
    update: Mapping[str, Tensor], bound: float, std: float, source: torch.Generator | Normals
) -> dict[str, Tensor]:
    """The update, shortened to the norm `bound` if it is longer, plus N(0, std^2) on every entry; std 0 draws nothing.

    Args:
        source: of the normal numbers. With others than a generator's, the result lies on a grid (`keyed.on_grid`).

    >>> clip_and_noise({"a": torch.tensor([3.0, 4.0])}, 1.0, 0.0, torch.Generator())
    {'a': tensor([0.6000, 0.8000])}
    """
    short = {name: t for name, t in clip_by_global_norm(update, bound).items() if t is not None}
    if not std:
        return short
    if isinstance(source, torch.Generator):
        return {name: t + std * torch.randn(t.shape, generator=source).to(t) for name, t in short.items()}
    return {name: on_grid(t.double() + std * source(t.shape).to(t.device), std).to(t) for name, t in short.items()}
