"""The losses of several clients as one function of their stacked weights, batches and contexts; also compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core.method import Batch
from polyfed.engine.executors.context_stacking import PartialContext, StackedContext, unpacked
from polyfed.engine.executors.stack_parts import LossOf, Tensors
from polyfed.errors import RunError, kind_and_line
from polyfed.functional.vmapped import FewerKernels, RowShares

Losses = tuple[Tensor, Tensors]  # of the clients, (K,), and their sums by name, (K, ...)
CompiledLosses = dict[Hashable, Callable[..., Losses]]  # what tells functions apart -> the compiled one


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
        # not the contexts, whose tensors a compiled function would keep
        self.context = functools.partial(_context, static.form, moving.form, tuple(names))
        drawn = "different" if drops else "error"
        one = functools.partial(_loss, loss, self.context)
        self._all = torch.func.vmap(one, in_dims=(0, 0, 0, *self.axes), randomness=drawn)

    def __call__(self, tensors: Tensors, batch: Batch, shares: Tensor) -> Losses:
        """Losses and sums of all. shares: each row's in the sum of its client's weights, and minus it, (K, 2, B)."""
        return self._all(tensors, batch, shares, *self.given)

    def compiled(self, tensors: Tensors, batch: Batch, shares: Tensor, known: CompiledLosses, key: Hashable) -> Losses:
        """The same by a function that `torch.compile` makes, once for each key.

        Raises:
            RunError: it cannot.
        """
        if key in known:
            return known[key](tensors, batch, shares, *self.given)
        try:
            known[key] = _compiled(self._all)
            return known[key](tensors, batch, shares, *self.given)
        except Exception as error:  # the compiler's own, of many kinds, as an uncompiled step has been tried
            why = kind_and_line(error)
            raise RunError(f"expected a loss that torch.compile takes (run.compile), got {why}") from error


def _compiled(function: Callable[..., Losses]) -> Callable[..., Losses]:
    """The function compiled for the shapes that it meets; one of its own, as PyTorch else keeps 8 of one code."""
    make: Any = torch.compile
    compiled: Callable[..., Losses] = make(function, fullgraph=True, dynamic=False, isolate_recompiles=True)
    return compiled


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
