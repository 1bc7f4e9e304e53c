"""The structure among class means: how they lie to one another, wherever the whole of them lies (FedSAF).

Structures do not change under rotation and translation of the representations, CKA not under scaling either.
Shapes: N samples, C classes, D features.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from polyfed.functional.centering import widened
from polyfed.functional.kernels import cka

Measure = Literal["cka", "gram", "distance"]


def batch_class_means(z_ND: Tensor, y_N: Tensor, w_N: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Weighted mean of the rows of each class (C, D), 0 for absent ones, and which are present, (C,) bool.

    A row of weight 0 does not make its class present. Differentiable in z.

    >>> rows, weights = torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([1.0, 1.0, 0.0])
    >>> batch_class_means(rows, torch.tensor([1, 1, 0]), weights, classes=2)
    (tensor([[0.],
            [2.]]), tensor([False,  True]))
    """
    z_ND = widened(z_ND)
    of_class_CN = ((torch.arange(classes, device=y_N.device)[:, None] == y_N) * w_N).to(z_ND)
    totals_C = of_class_CN.sum(dim=1)
    present_C = totals_C > 0
    divisors_C = torch.where(present_C, totals_C, torch.ones_like(totals_C))
    with torch.autocast(z_ND.device.type, enabled=False):
        return of_class_CN @ z_ND / divisors_C[:, None], present_C


def structure_loss(means_CD: Tensor, targets_CD: Tensor, common_C: Tensor, measure: Measure) -> Tensor:
    """How much the structure among the rows in `common_C` differs from that among the same rows of the target.

    With ~ for rows centered over the n common classes, <a, b> = a . b / D and d(a, b) = sqrt(<a - b, a - b>):

        cka:       1 - CKA(means, targets), linear                              0 where n < 3: any two pairs are alike
        gram:      mean over all (a, b) of (<m~_a, m~_b> - <t~_a, t~_b>)^2      0 where n < 2
        distance:  mean over a != b of (d(m_a, m_b) - d(t_a, t_b))^2            0 where n < 2

    Args:
        means_CD: rows that are trained. targets_CD: constants for the gradient.
        common_C: bool, the classes of which both have a row.

    Returns:
        0-d tensor; its gradient is finite, also where rows coincide.

    Source: Wu et al. (FedSAF), arXiv:2605.05959, for the idea; the three measures are the plain ones.

    >>> rows, both = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([True, True])
    >>> structure_loss(rows, torch.tensor([[7.0, 7.0], [7.0, 2.0]]), both, "distance")  # lengths 5 and 5
    tensor(0.)
    """
    count = common_C.sum()
    own_CD = _centered(widened(means_CD), common_C)
    other_CD = _centered(widened(targets_CD.detach()), common_C)
    if measure == "cka":
        gap = 1 - cka(own_CD, other_CD)
        return torch.where(count > 2, gap, torch.zeros_like(gap))
    with torch.autocast(own_CD.device.type, enabled=False):
        own_CC = own_CD @ own_CD.T / own_CD.shape[1]
        other_CC = other_CD @ other_CD.T / other_CD.shape[1]
    if measure == "gram":
        pairs = count**2
    else:
        own_CC, other_CC = _distances(own_CC), _distances(other_CC)
        pairs = count * (count - 1)
    total = (own_CC - other_CC).square().mul(common_C[:, None] & common_C).sum()
    return total / pairs.clamp(min=1)


def _centered(rows_CD: Tensor, common_C: Tensor) -> Tensor:
    """The common rows minus their mean; the others as 0."""
    kept_CD = torch.where(common_C[:, None], rows_CD, torch.zeros_like(rows_CD))
    mean_D = kept_CD.sum(dim=0) / common_C.sum().clamp(min=1)
    return torch.where(common_C[:, None], kept_CD - mean_D, torch.zeros_like(rows_CD))


def _distances(gram_CC: Tensor) -> Tensor:
    """sqrt(g_aa + g_bb - 2 g_ab), 0 with gradient 0 for rows that are equal as far as the numbers can tell."""
    own_C = gram_CC.diagonal()
    sizes_CC = own_C[:, None] + own_C
    squared_CC = sizes_CC - 2 * gram_CC
    differ_CC = squared_CC > 4 * torch.finfo(gram_CC.dtype).eps * sizes_CC
    roots_CC = torch.where(differ_CC, squared_CC, torch.ones_like(squared_CC)).sqrt()
    return torch.where(differ_CC, roots_CC, torch.zeros_like(roots_CC))
