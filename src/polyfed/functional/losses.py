"""Losses that methods share. Pure: they work under ``torch.func.grad`` and ``vmap``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic


def weighted_mean(values_N: Tensor, w_N: Tensor) -> Tensor:
    """sum_n w_n values_n / sum_n w_n, 0-d; 0 where all weights are 0.

    Args:
        values_N: one per row, finite. w_N: row weights, not negative; 0 for padding rows.
    """
    total = w_N.sum().clamp(min=torch.finfo(w_N.dtype).tiny)  # where all are 0, so is the numerator
    return (w_N * values_N).sum() / total


def _wide(scores: Tensor) -> Tensor:
    """Scores of a network that computes in bfloat16 as float32; others as they are. Sums of rounded terms drift."""
    return scores.float() if scores.dtype == torch.bfloat16 else scores


def task_loss(outputs_NC: Tensor, y_N: Tensor, w_N: Tensor) -> Tensor:
    """The loss of a task: cross entropy where y are classes, squared error where they are numbers.

    Args:
        outputs_NC: scores before the softmax; for numbers (N, 1). y_N: classes, or float targets. w_N: row weights.
    """
    if y_N.is_floating_point():
        return mse_loss(_wide(outputs_NC), y_N[:, None], w_N)
    return cross_entropy(outputs_NC, y_N, w_N)


def cross_entropy(logits_NC: Tensor, y_N: Tensor, w_N: Tensor) -> Tensor:
    """sum_n w_n CE(logits_n, y_n) / sum_n w_n: with weights 1 the mean over the batch, with 0 and 1 that over the ones.

    Args:
        logits_NC: scores before the softmax.
        y_N: classes, integers in [0, C).
        w_N: row weights, not negative; 0 for padding rows, whose y may be any valid class. If all are 0, the loss and
            its gradient are 0.

    Raises:
        ValueError: shapes do not fit, or y are no whole numbers.
    """
    if logits_NC.dim() != 2 or y_N.shape != logits_NC.shape[:1] or w_N.shape != y_N.shape:
        shapes = f"{tuple(logits_NC.shape)}, {tuple(y_N.shape)} and {tuple(w_N.shape)}"
        raise ValueError(f"expected logits (N, C), y (N,) and w (N,), got {shapes}")
    if y_N.is_floating_point():
        raise ValueError(f"expected whole numbers as classes, got {y_N.dtype}; task_loss takes float targets, too")
    return mean_cross_entropy(_wide(logits_NC), y_N.long(), w_N)


def mean_cross_entropy(logits_NC: Tensor, y_N: Tensor, w_N: Tensor) -> Tensor:
    """`cross_entropy` of what fits, classes as int64. A `TorchFunctionMode` may compute it in its own way.

    >>> mean_cross_entropy(torch.zeros(1, 2), torch.tensor([0]), torch.ones(1))  # log 2
    tensor(0.6931)
    """
    if has_torch_function_variadic(logits_NC, y_N, w_N):
        given = (logits_NC, y_N, w_N)
        own: Tensor = handle_torch_function(mean_cross_entropy, given, *given)
        return own
    return weighted_mean(F.cross_entropy(logits_NC, y_N, reduction="none"), w_N)


def kl_divergence(logits_NC: Tensor, teacher_NC: Tensor, w_N: Tensor) -> Tensor:
    """KL(softmax(teacher) || softmax(logits)): summed over classes, weighted mean over the rows.

    The teacher is a constant for the gradient.
    """
    _check_shapes(logits_NC, teacher_NC, w_N)
    log_p, log_q = (torch.log_softmax(_wide(one), dim=1) for one in (teacher_NC.detach(), logits_NC))
    kl_N = (log_p.exp() * (log_p - log_q)).sum(dim=1)
    return weighted_mean(kl_N, w_N)


def mse_loss(found_ND: Tensor, target_ND: Tensor, w_N: Tensor) -> Tensor:
    """mean_d (found - target)^2, weighted mean over the rows; the target is a constant for the gradient."""
    _check_shapes(found_ND, target_ND, w_N)
    return weighted_mean((found_ND - target_ND.detach()).square().mean(dim=1), w_N)


def _check_shapes(found_NK: Tensor, target_NK: Tensor, w_N: Tensor) -> None:
    if found_NK.dim() != 2 or target_NK.shape != found_NK.shape or w_N.shape != found_NK.shape[:1]:
        shapes = f"{tuple(found_NK.shape)}, {tuple(target_NK.shape)} and {tuple(w_N.shape)}"
        raise ValueError(f"expected found and target (N, C) and w (N,), got {shapes}")
