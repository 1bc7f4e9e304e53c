"""Losses that methods share. Pure: they work under ``torch.func.grad`` and ``vmap``."""

from __future__ import annotations

from collections.abc import Sequence

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


def multi_exit_loss(exits_NC: Sequence[Tensor], y_N: Tensor, w_N: Tensor, gamma: float, temperature: float) -> Tensor:
    """sum_j j L_j / (m (m + 1) / 2) over the exits j = 1..m of a network, all of which learn from the labels.

    L_j = CE(o_j, y) + gamma T^2 KL(softmax(o_m / T) || softmax(o_j / T)) for j < m, the last exit being a constant in
    the latter; L_m = CE(o_m, y).

    Source: Ilhan, Su and Liu (ScaleFL), CVPR 2023.
    """
    m = len(exits_NC)
    last_NC = exits_NC[-1]
    losses = [cross_entropy(logits_NC, y_N, w_N) for logits_NC in exits_NC]
    for j, logits_NC in enumerate(exits_NC[:-1] if gamma else ()):
        taught = kl_divergence(logits_NC / temperature, last_NC / temperature, w_N)
        losses[j] = losses[j] + gamma * temperature**2 * taught
    total = torch.stack([j * loss for j, loss in enumerate(losses, 1)]).sum()
    return total / (m * (m + 1) / 2)


def mutual_exits_loss(exits_NC: Sequence[Tensor], y_N: Tensor, w_N: Tensor, weight: Tensor | float) -> Tensor:
    """sum_i CE(o_i, y) + weight / (m - 1) sum_i sum_{j != i} KL(softmax o_j || softmax o_i) over the exits i = 1..m.

    o_j is a constant in KL; the number 0 as weight leaves the distillation out.

    Source: Kim et al. (DepthFL), ICLR 2023.
    """
    total = torch.stack([cross_entropy(logits_NC, y_N, w_N) for logits_NC in exits_NC]).sum()
    if len(exits_NC) == 1 or (isinstance(weight, float) and not weight):
        return total
    pairs = [
        kl_divergence(logits_NC, teacher_NC, w_N)
        for i, logits_NC in enumerate(exits_NC)
        for j, teacher_NC in enumerate(exits_NC)
        if i != j
    ]
    return total + weight / (len(exits_NC) - 1) * torch.stack(pairs).sum()


def mse_loss(found_ND: Tensor, target_ND: Tensor, w_N: Tensor) -> Tensor:
    """mean_d (found - target)^2, weighted mean over the rows; the target is a constant for the gradient."""
    _check_shapes(found_ND, target_ND, w_N)
    return weighted_mean((found_ND - target_ND.detach()).square().mean(dim=1), w_N)


def _check_shapes(found_NK: Tensor, target_NK: Tensor, w_N: Tensor) -> None:
    if found_NK.dim() != 2 or target_NK.shape != found_NK.shape or w_N.shape != found_NK.shape[:1]:
        shapes = f"{tuple(found_NK.shape)}, {tuple(target_NK.shape)} and {tuple(w_N.shape)}"
        raise ValueError(f"expected found and target (N, C) and w (N,), got {shapes}")


def model_contrastive_loss(z_ND: Tensor, near_ND: Tensor, far_ND: Tensor, temperature: float, w_N: Tensor) -> Tensor:
    """-log[e^(cos(z, near) / T) / (e^(cos(z, near) / T) + e^(cos(z, far) / T))], weighted mean over the rows.

    near and far are constants for the gradient.

    Source: Li, He and Song (MOON), CVPR 2021, eq. 3.
    """
    others = (near_ND.detach(), far_ND.detach())
    logits_N2 = torch.stack([F.cosine_similarity(z_ND, other, dim=1) for other in others], dim=1) / temperature
    return cross_entropy(logits_N2, torch.zeros_like(w_N, dtype=torch.int64), w_N)


def mask_absent_classes(logits_NC: Tensor, present_C: Tensor) -> Tensor:
    """Logits with 0 in the place of every class that is not present: such a class neither gains nor loses.

    0, not minus infinity: an absent class keeps its share of the softmax, and its row gets no gradient.

    Args:
        logits_NC: scores before the softmax. present_C: bool; classes beyond its end count as absent.

    Source: HeteroFL (Diao et al., ICLR 2021), section 3, masked cross entropy.
    """
    rest = logits_NC.shape[1] - len(present_C)
    return torch.where(F.pad(present_C, (0, rest)), logits_NC, torch.zeros_like(logits_NC))
