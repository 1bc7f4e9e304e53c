"""Passes over many inputs without gradient, in chunks, so that a method file holds no loop over batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyfed.core.client import Prepare
from polyfed.core.networks import trainable
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


def represent_gradients(
    model: nn.Module, x: Tensor, value: Callable[[Tensor], Tensor], chunk: int
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """``value(model.represent(x))`` and its gradient in the model's parameters, with the graph of one chunk at a time.

    First all representations without gradient, and the gradient of `value` in them; then chunk by chunk the product of
    that with the representations' own derivative. The same numbers as one pass, up to rounding: in eval mode no row
    depends on another. Costs one forward pass more, and memory for `chunk` rows instead of all.

    Args:
        model: has `represent`. x: (N, ...) as the model takes it. value: representations (N, D) to a 0-d tensor.
        chunk: rows at a time.
    """
    names, parameters = trainable(model)
    total: list[Tensor | None] = [None] * len(names)
    with evaluating(model):
        represent_: Callable[[Tensor], Tensor] = model.represent  # type: ignore[assignment]
        with torch.no_grad():
            z = torch.cat([represent_(rows) for rows in x.split(chunk)])
        z.requires_grad_()
        outcome = value(z)
        (dz,) = torch.autograd.grad(outcome, z)
        for rows, direction in zip(x.split(chunk), dz.split(chunk), strict=True):
            z_rows = represent_(rows)
            if not z_rows.requires_grad:  # all that trains is the head
                break
            grads = torch.autograd.grad(z_rows, parameters, direction, allow_unused=True)
            total = [b if a is None else a if b is None else a + b for a, b in zip(total, grads, strict=True)]
    return outcome.detach(), dict(zip(names, total, strict=True))
