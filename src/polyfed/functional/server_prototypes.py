"""Prototypes that the server makes: trained as a network's outputs (FedTGP, FedORGP), drawn apart as anchors (FedSA),
or pushed apart on the sphere (ProtoNorm).

The trained network: P = W_2 relu(W_1 E + b_1) + b_2, row by row; E has one row per class and is trained, too. FedTGP's
loss keeps other classes' prototypes away by distance, FedORGP's by angle. Weights are named tensors.

Shapes: C classes, D features, H hidden units, M rows received, S classes among them, N samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.functional.losses import cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # prototypes (C, D), rows (M, D), labels (M,) int64 -> 0-d
_EPSILON = 1e-5  # BatchNorm's, added to variances of anchors
_LR = 0.1  # learning rate of spreading
_DECAY = 0.95  # factor of that rate, after step 1, 11, 21, ...
_MOMENTUM = 0.9
_NEAREST = 1e-10  # the least squared distance, where two rows coincide


def init_network(classes: int, hidden: int, features: int, draws: torch.Generator) -> dict[str, Tensor]:
    """Initial weights, drawn from `draws`: E standard normal, layers uniform within 1 / sqrt(inputs)."""
    made = {"embedding": torch.randn(classes, features, generator=draws)}
    for layer, inputs, outputs in (("hidden", features, hidden), ("output", hidden, features)):
        for name, shape in (("weight", (outputs, inputs)), ("bias", (outputs,))):
            made[f"{layer}.{name}"] = torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=draws)
    return made


def prototypes(weights: Mapping[str, Tensor]) -> Tensor:
    """P (C, D)."""
    return F.linear(_hidden(weights), weights["output.weight"], weights["output.bias"])


def _hidden(weights: Mapping[str, Tensor]) -> Tensor:
    return F.relu(F.linear(weights["embedding"], weights["hidden.weight"], weights["hidden.bias"]))


def margin(centers_SD: Tensor, most: float) -> float:
    """The largest distance of any class's center to the nearest other one, at most `most`; `most` for a single class.

    Source: Zhang et al. (FedTGP), AAAI 2024, the adaptive margin.
    """
    distances_SS = torch.cdist(centers_SD, centers_SD, compute_mode="donot_use_mm_for_euclid_dist")
    distances_SS.fill_diagonal_(torch.inf)
    return min(float(distances_SS.min(dim=1).values.max()), most)


def margin_loss(prototypes_CD: Tensor, rows_MD: Tensor, labels_M: Tensor, margin: float) -> Tensor:
    """mean_m -log[e^-(d(m, y_m) + margin) / (e^-(d(m, y_m) + margin) + sum over c != y_m of e^-d(m, c))].

    d(m, c) is the Euclidean distance of row m and prototype c; its gradient at distance 0 is 0.

    Source: FedTGP, the margin-enhanced contrastive loss.
    """
    distances_MC = torch.cdist(rows_MD, prototypes_CD, compute_mode="donot_use_mm_for_euclid_dist")
    is_own_MC = labels_M[:, None] == torch.arange(len(prototypes_CD), device=labels_M.device)
    return F.cross_entropy(-(distances_MC + margin * is_own_MC), labels_M)


def orthogonality(prototypes_CD: Tensor, rows_MD: Tensor, labels_M: Tensor, gamma: float) -> Tensor:
    """mean_m [1 - cos(row m, prototype of y_m)] + gamma mean over m and c != y_m of |cos(row m, prototype of c)|.

    Source: Guo et al. (FedORGP), 2025, eq. 3 to 5 with lambda_s = 1.
    """
    cosines_MC = F.normalize(rows_MD, dim=1) @ F.normalize(prototypes_CD, dim=1).T
    own_MC = F.one_hot(labels_M, len(prototypes_CD)).to(cosines_MC)
    similarity = (own_MC * cosines_MC).sum(dim=1).mean()
    others = max(len(prototypes_CD) - 1, 1)
    overlap = ((1 - own_MC) * cosines_MC.abs()).sum(dim=1).mean() / others
    return 1 - similarity + gamma * overlap


def train_network(
    weights: Mapping[str, Tensor],
    rows_MD: Tensor,
    labels_M: Tensor,
    loss: Loss,
    epochs: int,
    batch: int,
    lr: float,
    draws: torch.Generator,
) -> tuple[dict[str, Tensor], float]:
    """SGD on a loss of the prototypes, in shuffled batches of the rows.

    The new weights, and the loss of the last epoch, a mean over its batches by their sizes.
    """
    now = {name: t.detach().clone() for name, t in weights.items()}
    labels_M = labels_M.long()
    losses: list[tuple[Tensor, int]] = []  # losses of an epoch's batches, and the rows of each
    for _ in range(epochs):
        order = torch.randperm(len(labels_M), generator=draws)
        losses.clear()
        for some_BD, own_B in zip(rows_MD[order].split(batch), labels_M[order].split(batch), strict=True):
            hidden_CH = _hidden(now)
            p_CD = F.linear(hidden_CH, now["output.weight"], now["output.bias"]).requires_grad_()
            value = loss(p_CD, some_BD, own_B)
            (of_p_CD,) = torch.autograd.grad(value, [p_CD])
            _step(now, hidden_CH, of_p_CD, lr)
            losses.append((value.detach(), len(own_B)))
    return now, sum(float(value) * count for value, count in losses) / len(labels_M)


def _step(weights: dict[str, Tensor], hidden_CH: Tensor, of_p_CD: Tensor, lr: float) -> None:
    """One step down the loss's gradient in P, by the chain rule through the network.

    Products are subtracted from the weights as they are taken: autograd writes each gradient out first.
    """
    of_hidden_CH = (of_p_CD @ weights["output.weight"]) * (hidden_CH > 0)
    of_embedding = of_hidden_CH @ weights["hidden.weight"]
    weights["output.weight"].addmm_(of_p_CD.T, hidden_CH, alpha=-lr)
    weights["output.bias"].sub_(of_p_CD.sum(dim=0), alpha=lr)
    weights["hidden.weight"].addmm_(of_hidden_CH.T, weights["embedding"], alpha=-lr)
    weights["hidden.bias"].sub_(of_hidden_CH.sum(dim=0), alpha=lr)
    weights["embedding"].sub_(of_embedding, alpha=lr)


def draw_anchors(classes: int, features: int, draws: torch.Generator) -> Tensor:
    """Anchors (C, D) from `draws`: relu(norm(W_2 relu(norm(W_1 e_c)))), e_c standard normal (D,).

    W_1, W_2 (D, D) are uniform within 1 / sqrt(D); norm takes each feature to mean 0 and variance 1 over the classes,
    as BatchNorm does in training mode, which leaves biases without effect.

    Source: Zhou et al. (FedSA), AAAI 2025, the projection of class embeddings; its layers from the authors' code.
    """
    hidden_CD = torch.randn(classes, features, generator=draws)
    for _ in range(2):
        weight_DD = torch.empty(features, features).uniform_(-(features**-0.5), features**-0.5, generator=draws)
        hidden_CD = hidden_CD @ weight_DD.T
        variance_D, mean_D = torch.var_mean(hidden_CD, dim=0, correction=0)
        hidden_CD = torch.relu((hidden_CD - mean_D) / (variance_D + _EPSILON).sqrt())
    return hidden_CD


def mean_nearest_distance(rows_SD: Tensor) -> Tensor:
    """The mean over the rows, of two or more, of the Euclidean distance to the nearest other one, 0-d.

    Source: FedSA, the margin between classes.
    """
    distances_SS = torch.cdist(rows_SD, rows_SD, compute_mode="donot_use_mm_for_euclid_dist")
    distances_SS.fill_diagonal_(torch.inf)
    return distances_SS.min(dim=1).values.mean()


def margin_contrastive_loss(z_ND: Tensor, y_N: Tensor, w_N: Tensor, anchors_CD: Tensor, margin: Tensor) -> Tensor:
    """CE(-(d(n, c) + margin [c = y_n]) over all c, y_n), weighted mean over the rows.

    d(n, c) is the Euclidean distance of row n and anchor c, a constant for the gradient, which is 0 at distance 0.

    Source: FedSA, margin-enhanced contrastive learning.
    """
    distances_NC = torch.linalg.vector_norm(z_ND[:, None] - anchors_CD.detach()[None], dim=2)
    is_own_NC = y_N[:, None] == torch.arange(len(anchors_CD), device=y_N.device)
    return cross_entropy(-(distances_NC + margin * is_own_NC), y_N, w_N)


def spread(rows_SD: Tensor, steps: int) -> Tensor:
    """Rows of length 1, pushed apart in so many steps of gradient descent with momentum, in float64.

    With p = row / ||row||, the force on p_i is sum over j != i of (p_i - p_j) / ||p_i - p_j||^2, which lowers the
    energy -sum over pairs of log ||p_i - p_j||;  v <- 0.9 v + lr force,  p <- (p + v) / ||p + v||.  lr is 0.1, times
    0.95 after every tenth step. Up to D + 1 rows end at equal angles, all cosines -1 / (S - 1).

    Source: Lee, Shin and Choi (ProtoNorm), arXiv:2507.04310, prototype alignment; the step sizes are the authors'
    code's.
    """
    p_SD = F.normalize(rows_SD.double(), dim=1)
    v_SD = torch.zeros_like(p_SD)
    lr = _LR
    for step in range(steps):
        v_SD = _MOMENTUM * v_SD + lr * _force(p_SD)
        p_SD = F.normalize(p_SD + v_SD, dim=1)
        if step % 10 == 0:
            lr *= _DECAY
    return p_SD.to(rows_SD.dtype)


def _force(p_SD: Tensor) -> Tensor:
    """Sum over j != i of (p_i - p_j) / ||p_i - p_j||^2, for each i."""
    squared_SS = (2 - 2 * p_SD @ p_SD.T).clamp(min=_NEAREST)
    inverse_SS = (1 / squared_SS).fill_diagonal_(0)
    return inverse_SS.sum(dim=1, keepdim=True) * p_SD - inverse_SS @ p_SD
