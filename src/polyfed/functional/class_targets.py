"""One row per class, made by many and learnt from by many: merging, filling in, losses, the nearest row.

A class that nobody knows has no row. It is never a row of zeros: where rows are filled into (C, D), `known` says which
are meant, and nothing is learnt from the others.

Shapes: N samples, C classes, M rows received, S classes that have a row, D width of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.functional.losses import weighted_mean


def merge(rows_MD: Tensor, labels_M: Tensor, weights_M: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean of the rows of each class, in float64: sum w_m row_m / sum w_m over the rows m of the class.

    With means of samples and their counts this is the mean over all samples, however they lie among the owners.

    Args:
        rows_MD: at least one. labels_M: their classes. weights_M: positive.

    Returns:
        labels (S,) ascending, of the type of `labels_M`, and rows (S, D) of the type of `rows_MD`.

    Raises:
        ValueError: shapes do not fit, there is no row, or a weight is not positive.

    Source: Tan et al. (FedProto), AAAI 2022, eq. 6, without its second division by the number of owners.

    >>> merge(torch.tensor([[1.0], [4.0], [7.0]]), torch.tensor([2, 2, 0]), torch.tensor([2.0, 1.0, 5.0]))
    (tensor([0, 2]), tensor([[7.],
            [2.]]))
    """
    if rows_MD.dim() != 2 or not labels_M.shape == weights_M.shape == rows_MD.shape[:1] or not len(labels_M):
        shapes = f"{tuple(rows_MD.shape)}, {tuple(labels_M.shape)} and {tuple(weights_M.shape)}"
        raise ValueError(f"expected rows (M, D), labels (M,) and weights (M,) of M > 0, got {shapes}")
    if not bool((weights_M > 0).all()):
        raise ValueError(f"expected positive weights, got {float(weights_M.min())}")
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

    Returns:
        0-d tensor.

    Source: FedProto, its regularizer, as the mean over the batch and over the D features.

    >>> prototype_distance(torch.tensor([[3.0, 4.0], [9.0, 9.0]]), torch.tensor([0, 1]), torch.ones(2),
    ...      torch.zeros(2, 2), torch.tensor([True, False]))
    tensor(6.2500)
    """
    squared_N = (z_ND - prototypes_CD.detach()[y_N]).square().mean(dim=1)
    return _mean_of_known(squared_N, known_C[y_N], w_N)


def align(z_ND: Tensor, y_N: Tensor, w_N: Tensor, prototypes_CD: Tensor, known_C: Tensor) -> Tensor:
    """sum_n w_n (1 - cos(z_n, prototype of y_n)) / sum_n w_n; samples of a class without prototype count as 0.

    Args:
        z_ND: representations that are trained. y_N: classes. w_N: row weights, as in `losses.cross_entropy`.
        prototypes_CD, known_C: see `to_dense`; constants for the gradient.

    Returns:
        0-d tensor. The cosine with a row of zeros is 0.

    Source: Guo et al. (FedORGP), 2025, eq. 8.

    >>> align(torch.tensor([[3.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0]), torch.ones(2),
    ...       torch.tensor([[5.0, 0.0]]), torch.tensor([True]))
    tensor(0.5000)
    """
    cosine_N = F.cosine_similarity(z_ND, prototypes_CD.detach()[y_N], dim=1)
    return _mean_of_known(1 - cosine_N, known_C[y_N], w_N)


def soft_cross_entropy(logits_NC: Tensor, y_N: Tensor, w_N: Tensor, targets_CC: Tensor, known_C: Tensor) -> Tensor:
    """-sum_n w_n sum_c target(y_n)_c log softmax(logits_n)_c / sum_n w_n; samples without a target count as 0.

    Args:
        logits_NC: scores before the softmax, that are trained. y_N, w_N: as in `prototype_distance`.
        targets_CC: probabilities by class (`to_dense`); constants for the gradient.

    Returns:
        0-d tensor.

    Source: Jeong et al. (federated distillation), arXiv:1811.11479, algorithm 1.

    >>> one_hot, known = torch.eye(2), torch.tensor([True, True])
    >>> soft_cross_entropy(torch.zeros(1, 2), torch.tensor([1]), torch.ones(1), one_hot, known)  # log 2
    tensor(0.6931)
    """
    cross_N = -(targets_CC.detach()[y_N] * torch.log_softmax(logits_NC, dim=1)).sum(dim=1)
    return _mean_of_known(cross_N, known_C[y_N], w_N)


def _mean_of_known(values_N: Tensor, known_N: Tensor, w_N: Tensor) -> Tensor:
    return weighted_mean(torch.where(known_N, values_N, torch.zeros_like(values_N)), w_N)


def nearest_prototype_scores(z_ND: Tensor, prototypes_SD: Tensor, labels_S: Tensor, classes: int) -> Tensor:
    """Scores (N, C): minus the Euclidean distance to each class's prototype, minus infinity where there is none.

    >>> nearest_prototype_scores(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0]]), torch.tensor([1]), classes=2)
    tensor([[-inf, -5.]])
    """
    distances_NS = torch.cdist(z_ND, prototypes_SD, compute_mode="donot_use_mm_for_euclid_dist")
    scores_NC = torch.full((len(z_ND), classes), -torch.inf, dtype=z_ND.dtype, device=z_ND.device)
    scores_NC[:, labels_S.long()] = -distances_NS
    return scores_NC


def most_similar(z_ND: Tensor, prototypes_SD: Tensor, labels_S: Tensor, classes: int) -> Tensor:
    """Scores (N, C): the cosine with each class's prototype, minus infinity where there is none.

    >>> most_similar(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]]), torch.tensor([1]), classes=2)
    tensor([[  -inf, 0.8000]])
    """
    scores_NC = torch.full((len(z_ND), classes), -torch.inf, dtype=z_ND.dtype, device=z_ND.device)
    scores_NC[:, labels_S.long()] = F.normalize(z_ND, dim=1) @ F.normalize(prototypes_SD, dim=1).T
    return scores_NC
