"""Whether clients' steps may be taken as one: a step of two clients, one after the other and as one, is compared.

Tried once for each network, phase and set of entries in the context: a loss that vectorizes wrongly is never wrong in
silence.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence

import torch
from torch import nn

from polyfed.core.method import Batch, Context, NotVectorizable, StepResult
from polyfed.core.modules import load_state
from polyfed.core.randomness import drawn_of_others, seeded_global_rng
from polyfed.engine.executors.stacked_loss import StackedContext, StackedLoss, Tensors, own_tensors
from polyfed.functional.modes import has_batchnorm, without_dropout

_CLOSE = {"cpu": 1e-4}  # of the largest entry: how far a gradient may be off, by type of device
_ELSEWHERE = 1e-2  # where products may be taken in reduced precision

_Outcome = list[tuple[Tensors, float]]  # of a client's step: what is compared together, and how far it may be off


def padding_changes_nothing(
    loss: StackedLoss,
    template: nn.Module,
    tensors: Tensors,
    batch: Batch,
    sizes: Sequence[int],
    contexts: Sequence[Context],
) -> bool:
    """Take a step with two clients one after the other, and as one, with and without further rows of weight 0.

    Args:
        template: the network. tensors: (2, ...) by name; those that train take a gradient. They stay as they are.
        batch: (2, B, ...), filled up. sizes: how many rows of it each has. contexts: of the loss, of each.

    Returns:
        Whether batches may be filled up with rows of weight 0.

    Raises:
        NotVectorizable: the results differ also without such rows.
    """
    count = min(sizes)
    can_fill = max(sizes) > 1 and not has_batchnorm(template)
    if can_fill:  # some of the rows count, others are there with weight 0
        count = min(count, max(sizes) // 2)
    plain = Batch(*(t[:, :count] for t in batch if t is not None))
    filled = batch._replace(w=batch.w * (torch.arange(batch.w.shape[1], device=batch.w.device) < count))
    with seeded_global_rng(0), without_dropout(template), without_dropout(loss.network):
        expected = _one_by_one(loss, template, tensors, plain, contexts)
        # copies of rows that count would change no mean
        if can_fill and bool((batch.x[:, count:] != batch.x[:, count - 1 : count]).any()):
            with contextlib.suppress(Exception):  # of a loss that wants batches of one size
                if _is_same(loss, tensors, filled, contexts, expected):
                    return True
        if not _is_same(loss, tensors, plain, contexts, expected):
            raise NotVectorizable("the steps of two clients as one are not those of one after the other")
    return False


def _one_by_one(
    loss: StackedLoss, template: nn.Module, tensors: Tensors, batch: Batch, contexts: Sequence[Context]
) -> list[_Outcome]:
    found = []
    before = drawn_of_others()
    for row, context in enumerate(contexts):
        load_state(template, {name: t[row].detach() for name, t in tensors.items()})
        step = loss.method.gradients(template, Batch(*(t[row] for t in batch if t is not None)), context)
        left = {name: t.clone() for name, t in own_tensors(template).items() if not tensors[name].requires_grad}
        found.append(_outcome(step, left))
    if drawn_of_others() != before:
        raise NotVectorizable("its network draws from Python's or NumPy's generator, once for all clients as one")
    return found


def _is_same(
    loss: StackedLoss, tensors: Tensors, batch: Batch, contexts: Sequence[Context], expected: Sequence[_Outcome]
) -> bool:
    """Whether a step as one gives each client what it has alone, and leaves such buffers."""
    own = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop")  # client by client in truth
        found = loss.gradients(own, batch, StackedContext(contexts))
    for row, alone in enumerate(expected):
        grads, sums, raw = ({n: t[row] for n, t in part.items() if t is not None} for part in (found.grads, *found[2:]))
        left = {name: t[row] for name, t in own.items() if not t.requires_grad}
        if not _are_near(_outcome(StepResult(grads, found.loss[row], sums, raw), left), alone):
            return False
    return True


def _outcome(step: StepResult, buffers: Tensors) -> _Outcome:
    """Gradients together; loss, sums and buffers each by itself."""
    grads = {name: grad for name, grad in step.grads.items() if grad is not None}
    others = {"loss": step.loss}
    for kind, values in (("sum", step.sums), ("raw", step.raw), ("buffer", buffers)):
        others |= {f"{kind} {name}": t for name, t in values.items()}
    return [(grads, 1e-9), *(({name: t}, 1e-6) for name, t in others.items())]


def _are_near(found: _Outcome, expected: _Outcome) -> bool:
    """Whether all agree up to a share of the largest entry of what is compared together; overflows tell nothing."""
    grads, loss = expected[0][0], expected[1][0]
    if not all(bool(t.isfinite().all()) for t in (*grads.values(), *loss.values())):
        return True
    return len(found) == len(expected) and all(
        _is_near(some, others, least) for (some, _), (others, least) in zip(found, expected, strict=True)
    )


def _is_near(found: Tensors, expected: Tensors, least: float) -> bool:
    """NaN agrees with NaN."""
    sizes = [t.float().abs().nan_to_num(0.0, 0.0).amax() for t in expected.values() if t.numel()]
    if not sizes:
        return found.keys() == expected.keys()
    largest = torch.stack(sizes).max()
    most = float(largest) * _CLOSE.get(largest.device.type, _ELSEWHERE) + least
    return found.keys() == expected.keys() and all(
        found[name].shape == t.shape and torch.allclose(found[name].to(t), t, rtol=0.0, atol=most, equal_nan=True)
        for name, t in expected.items()
    )
