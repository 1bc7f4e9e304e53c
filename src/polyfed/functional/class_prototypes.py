"""Class means: the rows of several clients merged, losses towards them, distances between them.

Rows stand beside the labels that they belong to (S of each, S <= C), or in a dense table of all C classes beside a mask
of those that are known.

Shapes: N samples, D feature width, C classes, S distinct classes, M pairs (prototype or representation, label).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.functional.centering import widened
from polyfed.functional.losses import weighted_mean


def class_means(
    z_ND: Tensor, y_N: Tensor, classes: int, there_N: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean representation per class: Rbar^s = (1/|D^s|) sum over D^s of F(phi; x).

    The sums are float64: a class with one sample gives that sample's float32 representation bit for bit, and the order
    of the samples does not show. On a device they are a product of matrices, which adds in the same order each time,
    and nothing waits for it; one without float64 adds in float32.

    Args:
        z_ND: representations; no gradient is kept. y_N: their classes, in [0, classes), in main memory.
        there_N: the classes where the representations lie, if they are known there.

    Returns:
        labels (S,) int32 ascending, without absent classes; means (S, D) float32, where ``z_ND`` lies; counts (S,)
        int64. Labels and counts are in main memory.

    Raises:
        ValueError: a class is out of range.

    Source: FedGH (Yi et al., ACM MM 2023), eq. 3.

    >>> class_means(torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([2, 2, 0]), classes=3)[:2]
    (tensor([0, 2], dtype=torch.int32), tensor([[7.],
            [2.]]))
    """
    y_N = y_N.to(torch.int64)
    if y_N.numel() and not bool(((y_N >= 0) & (y_N < classes)).all()):
        raise ValueError(f"expected classes in [0, {classes}), got {int(y_N.min())} to {int(y_N.max())}")
    labels_S, place_N, counts_S = y_N.unique(return_inverse=True, return_counts=True)
    z_ND = z_ND.detach()
    if z_ND.is_cpu:
        sums_SD = torch.zeros(len(labels_S), z_ND.shape[1], dtype=torch.float64)
        sums_SD.index_add_(0, place_N, z_ND.double())
        means_SD = sums_SD / counts_S.unsqueeze(1)
    else:
        wide = _widest_float(z_ND.device)
        every_C = torch.arange(classes, device=z_ND.device)
        present_S = torch.stack([every_C[label] for label in labels_S.tolist()]) if len(labels_S) else every_C[:0]
        known_N = y_N if there_N is None else there_N
        is_member_SN = (present_S.unsqueeze(1) == known_N.to(z_ND.device)).to(wide)
        means_SD = is_member_SN @ z_ND.to(wide) / is_member_SN.sum(dim=1, keepdim=True)
    return labels_S.to(torch.int32), means_SD.float(), counts_S


def _widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device without it, as Apple's GPUs and many of Intel's are."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def merge(rows_MD: Tensor, labels_M: Tensor, weights_M: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean of the rows of each class, in float64: sum w_m row_m / sum w_m over the rows m of the class.

    With means of samples and their counts this is the mean over all samples, however they lie among the owners.

    Args:
        rows_MD: at least one. labels_M: their classes. weights_M: positive.

    Returns:
        labels (S,) ascending, of the type of `labels_M`, and rows (S, D) of the type of `rows_MD`.

    Source: Tan et al. (FedProto), AAAI 2022, eq. 6, without its second division by the number of owners.

    >>> merge(torch.tensor([[1.0], [4.0], [7.0]]), torch.tensor([2, 2, 0]), torch.tensor([2.0, 1.0, 5.0]))
    (tensor([0, 2]), tensor([[7.],
            [2.]]))
    """
    labels_S, place_M = labels_M.unique(return_inverse=True)
    weights_M1 = weights_M.double().unsqueeze(1)
    sums_SD = rows_MD.new_zeros(len(labels_S), rows_MD.shape[1], dtype=torch.float64)
    sums_SD.index_add_(0, place_M, weights_M1 * rows_MD.double())
    totals_S1 = torch.zeros_like(sums_SD[:, :1]).index_add_(0, place_M, weights_M1)
    return labels_S, (sums_SD / totals_S1).to(rows_MD.dtype)


def update_rows(old_SD: Tensor, old_labels_S: Tensor, new_SD: Tensor, new_labels_S: Tensor) -> tuple[Tensor, Tensor]:
    """The new rows, and of the classes that have none the old ones: (labels, rows), in the order of the labels.

    >>> update_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), torch.tensor([[9.0]]), torch.tensor([1]))
    (tensor([0, 1]), tensor([[1.],
            [9.]]))
    """
    kept_S = ~torch.isin(old_labels_S, new_labels_S)
    labels = torch.cat([old_labels_S[kept_S], new_labels_S])
    order = labels.argsort()
    return labels[order], torch.cat([old_SD[kept_S], new_SD])[order]


def to_dense(rows_SD: Tensor, labels_S: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Rows by class number, (C, D), and which of them are known, (C,) bool; the others are filled up to be skipped.

    >>> to_dense(torch.tensor([[5.0]]), torch.tensor([1]), classes=2)
    (tensor([[0.],
            [5.]]), tensor([False,  True]))
    """
    filled_CD = rows_SD.new_zeros(classes, rows_SD.shape[1])
    known_C = torch.zeros(classes, dtype=torch.bool)
    filled_CD[labels_S.long()], known_C[labels_S.long().cpu()] = rows_SD, True
    return filled_CD, known_C.to(rows_SD.device)


def prototype_distance(z_ND: Tensor, y_N: Tensor, w_N: Tensor, prototypes_CD: Tensor, known_C: Tensor) -> Tensor:
    """sum_n w_n mean_d (z_n - prototype of y_n)^2 / sum_n w_n; samples of a class without prototype count as 0.

    Args:
        z_ND: representations that are trained. y_N: classes. w_N: row weights, as in `losses.cross_entropy`.
        prototypes_CD, known_C: see `to_dense`; constants for the gradient.

    Source: FedProto, its regularizer, as the mean over the batch and over the D features.

    >>> prototype_distance(torch.tensor([[3.0, 4.0], [9.0, 9.0]]), torch.tensor([0, 1]), torch.ones(2),
    ...      torch.zeros(2, 2), torch.tensor([True, False]))
    tensor(6.2500)
    """
    squared_N = F.mse_loss(z_ND, prototypes_CD.detach()[y_N], reduction="none").mean(dim=1)
    return mean_of_known(squared_N, known_C[y_N], w_N)


def soft_cross_entropy(logits_NC: Tensor, y_N: Tensor, w_N: Tensor, targets_CC: Tensor, known_C: Tensor) -> Tensor:
    """-sum_n w_n sum_c target(y_n)_c log softmax(logits_n)_c / sum_n w_n; samples without a target count as 0.

    Args:
        logits_NC: scores before the softmax, that are trained. y_N, w_N: as in `prototype_distance`.
        targets_CC: probabilities by class (`to_dense`); constants for the gradient.

    Source: Jeong et al. (federated distillation), arXiv:1811.11479, algorithm 1.

    >>> one_hot, known = torch.eye(2), torch.tensor([True, True])
    >>> soft_cross_entropy(torch.zeros(1, 2), torch.tensor([1]), torch.ones(1), one_hot, known)  # log 2
    tensor(0.6931)
    """
    cross_N = -(targets_CC.detach()[y_N] * torch.log_softmax(logits_NC, dim=1)).sum(dim=1)
    return mean_of_known(cross_N, known_C[y_N], w_N)


def mean_of_known(values_N: Tensor, known_N: Tensor, w_N: Tensor) -> Tensor:
    """The weighted mean over the rows, of which those of a class that is not known count as 0."""
    return weighted_mean(torch.where(known_N, values_N, 0.0), w_N)


def distances(a_ND: Tensor, b_SD: Tensor) -> Tensor:
    """Euclidean distances (N, S); not by products of rows, whose rounding would drown small ones."""
    return torch.cdist(a_ND, b_SD, compute_mode="donot_use_mm_for_euclid_dist")


def nearest_distances(rows_SD: Tensor) -> Tensor:
    """The Euclidean distance (S,) of each row to the nearest other one; infinite for a single row."""
    return distances(rows_SD, rows_SD).fill_diagonal_(torch.inf).min(dim=1).values


def batch_class_sums(z_ND: Tensor, y_N: Tensor, w_N: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The weighted sum of the rows of each class (C, D), and of their weights (C,). Differentiable in z."""
    z_ND = widened(z_ND)
    of_class_CN = ((torch.arange(classes, device=y_N.device)[:, None] == y_N) * w_N).to(z_ND)
    with torch.autocast(z_ND.device.type, enabled=False):
        return of_class_CN @ z_ND, of_class_CN.sum(dim=1)
