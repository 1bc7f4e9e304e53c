"""A small network whose outputs are the classes' prototypes, trained so that those of other classes keep away.

FedTGP's loss keeps them away by distance, FedORGP's by angle.

P = W_2 relu(W_1 E + b_1) + b_2, row by row; E has one row per class and is trained, too. Weights are named tensors.
Shapes: C classes, D features, H hidden units, M rows received, S classes among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # prototypes (C, D), rows (M, D), labels (M,) int64 -> 0-d


def init_network(classes: int, hidden: int, features: int, draws: torch.Generator) -> dict[str, Tensor]:
    """Initial weights, drawn from `draws`: E standard normal, layers uniform within 1 / sqrt(inputs)."""
    made = {"embedding": torch.randn(classes, features, generator=draws)}
    for layer, inputs, outputs in (("hidden", features, hidden), ("output", hidden, features)):
        for name, shape in (("weight", (outputs, inputs)), ("bias", (outputs,))):
            made[f"{layer}.{name}"] = torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=draws)
    return made


def prototypes(weights: Mapping[str, Tensor]) -> Tensor:
    """P (C, D)."""
    hidden_CH = F.relu(F.linear(weights["embedding"], weights["hidden.weight"], weights["hidden.bias"]))
    return F.linear(hidden_CH, weights["output.weight"], weights["output.bias"])


def margin(centers_SD: Tensor, most: float) -> float:
    """The largest distance of any class's center to the nearest other one, at most `most`; `most` for a single class.

    Source: Zhang et al. (FedTGP), AAAI 2024, the adaptive margin.

    >>> margin(torch.tensor([[0.0], [1.0], [6.0]]), 100.0), margin(torch.tensor([[0.0]]), 7.0)
    (5.0, 7.0)
    """
    distances_SS = torch.cdist(centers_SD, centers_SD, compute_mode="donot_use_mm_for_euclid_dist")
    distances_SS.fill_diagonal_(torch.inf)
    return min(float(distances_SS.min(dim=1).values.max()), most)


def margin_loss(prototypes_CD: Tensor, rows_MD: Tensor, labels_M: Tensor, margin: float) -> Tensor:
    """mean_m -log[e^-(d(m, y_m) + margin) / (e^-(d(m, y_m) + margin) + sum over c != y_m of e^-d(m, c))].

    d(m, c) is the Euclidean distance of row m and prototype c; its gradient at distance 0 is 0.

    Args:
        prototypes_CD: trained. rows_MD: means that came from clients, of classes labels_M (M,) int64.
        margin: by how much a row must be nearer to its own class's prototype than to others; 0 is off.

    Source: FedTGP, the margin-enhanced contrastive loss.
    """
    distances_MC = torch.cdist(rows_MD, prototypes_CD, compute_mode="donot_use_mm_for_euclid_dist")
    away_MC = margin * F.one_hot(labels_M, len(prototypes_CD)).to(distances_MC)
    return F.cross_entropy(-(distances_MC + away_MC), labels_M)


def orthogonality(prototypes_CD: Tensor, rows_MD: Tensor, labels_M: Tensor, gamma: float) -> Tensor:
    """mean_m [1 - cos(row m, prototype of y_m)] + gamma mean over m and c != y_m of |cos(row m, prototype of c)|.

    Args:
        prototypes_CD: trained. rows_MD: means that came from clients, of classes labels_M (M,) int64.
        gamma: weight of the second term, in which prototypes become orthogonal to other classes' rows; 0 is off.

    Source: Guo et al. (FedORGP), 2025, eq. 3 to 5 with lambda_s = 1.

    >>> orthogonality(torch.eye(2), torch.tensor([[0.0, 3.0]]), torch.tensor([0]), 0.5)
    tensor(1.5000)
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

    Args:
        weights: as they are; left alone. loss: of one batch.
        draws: for the order of the rows, another one in each epoch.

    Returns:
        The new weights, and the loss of the last epoch, a mean over its batches by their sizes.
    """
    now = dict(weights)
    labels_M = labels_M.long()
    last = float("nan")
    for _ in range(epochs):
        total = 0.0
        for some in torch.randperm(len(labels_M), generator=draws).split(batch):
            now = {name: t.detach().requires_grad_() for name, t in now.items()}
            value = loss(prototypes(now), rows_MD[some], labels_M[some])
            gradients = torch.autograd.grad(value, list(now.values()))
            now = {name: t.detach() - lr * g for (name, t), g in zip(now.items(), gradients, strict=True)}
            total += float(value.detach()) * len(some)
        last = total / len(labels_M)
    return now, last
