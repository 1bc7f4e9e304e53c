"""Losses that methods share. Pure: they work under ``torch.func.grad`` and ``vmap``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits_NC: Tensor, y_N: Tensor, w_N: Tensor) -> Tensor:
    """sum_n w_n CE(logits_n, y_n) / sum_n w_n: with weights 1 the mean over the batch, with 0 and 1 that over the ones.

    Args:
        logits_NC: scores before the softmax.
        y_N: classes, integers in [0, C).
        w_N: row weights, not negative; 0 for padding rows, whose y may be any valid class. If all are 0, the loss and
            its gradient are 0.

    Returns:
        0-d tensor.

    Raises:
        ValueError: shapes do not fit.
    """
    if logits_NC.dim() != 2 or y_N.shape != logits_NC.shape[:1] or w_N.shape != y_N.shape:
        shapes = f"{tuple(logits_NC.shape)}, {tuple(y_N.shape)} and {tuple(w_N.shape)}"
        raise ValueError(f"expected logits (N, C), y (N,) and w (N,), got {shapes}")
    ce_N = F.cross_entropy(logits_NC, y_N.long(), reduction="none")
    total = w_N.sum()
    return (w_N * ce_N).sum() / torch.where(total > 0, total, torch.ones_like(total))


def squared_distance(params: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Tensor:
    """||w - w_ref||^2: the squared norm, summed over all elements of all tensors in ``params``.

    Hand in parameters only, no buffers. ``reference`` may hold more (a whole state dict); it is a constant for the
    gradient, which is 2 (w - w_ref).

    Args:
        params: w by name.
        reference: w_ref by name, with at least the names in ``params`` and the same shapes.

    Returns:
        0-d tensor; times mu / 2 it is the proximal term.

    Raises:
        ValueError: ``params`` is empty, a name is missing in ``reference``, or a shape differs.

    Source: Li et al. (FedProx), MLSys 2020, eq. 2; FedIN, eq. 3.

    >>> squared_distance({"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([2.0, 0.0])})
    tensor(5.)
    """
    if not params:
        raise ValueError("expected at least one parameter tensor, got none")
    terms = []
    for name, w in params.items():
        if name not in reference:
            raise ValueError(f"expected a reference for every parameter, got none for '{name}'")
        if reference[name].shape != w.shape:
            shapes = f"{tuple(w.shape)} and {tuple(reference[name].shape)}"
            raise ValueError(f"expected '{name}' and its reference in one shape, got {shapes}")
        terms.append((w - reference[name].detach()).square().sum())
    return torch.stack(terms).sum()
