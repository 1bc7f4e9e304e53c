"""Semantic anchors: one vector per class in the space of representations, drawn apart before any training (FedSA).

Shapes: N samples, C classes, S classes that have a row, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyfed.functional.losses import cross_entropy

_EPSILON = 1e-5  # BatchNorm's, added to variances


def draw_anchors(classes: int, features: int, draws: torch.Generator) -> Tensor:
    """Anchors (C, D) from `draws`: relu(norm(W_2 relu(norm(W_1 e_c)))), e_c standard normal (D,).

    W_1, W_2 (D, D) are uniform within 1 / sqrt(D); norm takes each feature to mean 0 and variance 1 over the classes,
    as BatchNorm does in training mode, which leaves biases without effect.

    Source: Zhou et al. (FedSA), AAAI 2025, the projection of class embeddings; its layers from the authors' code.

    >>> anchors = draw_anchors(3, 4, torch.Generator().manual_seed(0))
    >>> anchors.shape, bool((anchors >= 0).all())
    (torch.Size([3, 4]), True)
    """
    hidden_CD = torch.randn(classes, features, generator=draws)
    for _ in range(2):
        weight_DD = torch.empty(features, features).uniform_(-(features**-0.5), features**-0.5, generator=draws)
        hidden_CD = hidden_CD @ weight_DD.T
        variance_D, mean_D = torch.var_mean(hidden_CD, dim=0, correction=0)
        hidden_CD = torch.relu((hidden_CD - mean_D) / (variance_D + _EPSILON).sqrt())
    return hidden_CD


def mean_nearest_distance(rows_SD: Tensor) -> Tensor:
    """The mean over the rows of the Euclidean distance to the nearest other one, 0-d.

    Raises:
        ValueError: fewer than two rows.

    Source: FedSA, the margin between classes.

    >>> mean_nearest_distance(torch.tensor([[0.0], [1.0], [6.0]]))  # (1 + 1 + 5) / 3
    tensor(2.3333)
    """
    if rows_SD.dim() != 2 or len(rows_SD) < 2:
        raise ValueError(f"expected at least two rows (S, D), got {tuple(rows_SD.shape)}")
    distances_SS = torch.cdist(rows_SD, rows_SD, compute_mode="donot_use_mm_for_euclid_dist")
    distances_SS.fill_diagonal_(torch.inf)
    return distances_SS.min(dim=1).values.mean()


def margin_contrastive_loss(z_ND: Tensor, y_N: Tensor, w_N: Tensor, anchors_CD: Tensor, margin: Tensor) -> Tensor:
    """CE(-(d(n, c) + margin [c = y_n]) over all c, y_n), weighted mean over the rows.

    d(n, c) is the Euclidean distance of row n and anchor c; its gradient at distance 0 is 0.

    Args:
        z_ND: representations that are trained. y_N: classes. w_N: row weights, as in `losses.cross_entropy`.
        anchors_CD: constants for the gradient. margin: 0-d, by how much the own class's anchor must be nearer.

    Returns:
        0-d tensor.

    Source: FedSA, margin-enhanced contrastive learning.

    >>> rows, anchors = torch.tensor([[0.0]]), torch.tensor([[0.0], [2.0]])
    >>> margin_contrastive_loss(rows, torch.tensor([0]), torch.ones(1), anchors, torch.tensor(2.0))  # log 2
    tensor(0.6931)
    """
    distances_NC = torch.linalg.vector_norm(z_ND[:, None] - anchors_CD.detach()[None], dim=2)
    is_own_NC = y_N[:, None] == torch.arange(len(anchors_CD), device=y_N.device)
    return cross_entropy(-(distances_NC + margin * is_own_NC), y_N, w_N)
