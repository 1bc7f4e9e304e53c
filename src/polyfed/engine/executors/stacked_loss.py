"""The losses of several clients as one function of their stacked weights, batches and contexts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core.method import Batch
from polyfed.engine.executors.context_stacking import PartialContext, StackedContext, unpacked
from polyfed.engine.executors.stack_parts import LossOf, Tensors
from polyfed.functional.vmapped import FewerKernels, RowShares

Losses = tuple[Tensor, Tensors]  # of the clients, (K,), and their sums by name, (K, ...)


class StackedLoss:
    """A step's loss of several clients.

    Args:
        loss: of one. static, moving: what it reads of their contexts, in a phase and in this step alone.
        names: of all entries of such a context. drops: dropout layers draw a mask for each client.

    Attributes:
        given, axes: the contexts' tensors as `context` takes them, and as `torch.vmap` wants them.
    """

    def __init__(
        self, loss: LossOf, static: StackedContext, moving: StackedContext, names: Collection[str], drops: bool
    ) -> None:
        self.given = (tuple(static.tensors), tuple(moving.tensors))
        self.axes = (tuple(static.axes), tuple(moving.axes))
        self.context = functools.partial(_context, static.form, moving.form, tuple(names))
        drawn = "different" if drops else "error"
        one = functools.partial(_loss, loss, self.context)
        self._all = torch.func.vmap(one, in_dims=(0, 0, 0, *self.axes), randomness=drawn)

    def __call__(self, tensors: Tensors, batch: Batch, shares: Tensor) -> Losses:
        """Losses and sums of all. shares: each row's in the sum of its client's weights, and minus it, (K, 2, B)."""
        return self._all(tensors, batch, shares, *self.given)


def _context(
    static: Any, moving: Any, names: Sequence[str], static_tensors: Sequence[Tensor], moving_tensors: Sequence[Tensor]
) -> PartialContext:
    """One client's context."""
    held = {**unpacked(static, static_tensors), **unpacked(moving, moving_tensors)}
    return PartialContext(held, dict.fromkeys(names))


def _loss(
    loss: LossOf,
    context: Callable[..., PartialContext],
    tensors: Tensors,
    batch: Batch,
    shares: Tensor,
    *given: Sequence[Tensor],
) -> Losses:
    """One client's loss and sums."""
    with FewerKernels(RowShares(batch.w, *shares.unbind())):
        outcome: Any = torch.func.functional_call(
            loss, loss.named(tensors), (batch, context(*given)), tie_weights=False
        )
    return outcome if isinstance(outcome, tuple) else (outcome, {})
