"""Passes over many inputs without gradient, in chunks, so that a method file holds no loop over batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyfed.core.client import Prepare
from polyfed.functional.modes import evaluating

CHUNK = 500  # rows per pass: fits the caches better than one large batch


def apply(function: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, prepare: Prepare) -> Tensor:
    """`function` over all rows of `x` (N, ...), stored as they are; eval mode, no gradient, nothing else changed.

    Returns:
        (N, ...) outputs on the model's device.
    """
    device = next(iter(model.parameters()), x).device
    with torch.inference_mode(), evaluating(model):
        outputs = [function(prepare(rows.to(device))) for rows in x.split(CHUNK)]
    return torch.cat(outputs).clone()


def represent(model: nn.Module, x: Tensor, prepare: Prepare) -> Tensor:
    """Representations (N, D) of all rows of `x`."""
    function: Callable[[Tensor], Tensor] = model.represent  # type: ignore[assignment]
    return apply(function, model, x, prepare)
