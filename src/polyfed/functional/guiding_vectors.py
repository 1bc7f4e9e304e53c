"""Learning towards guiding vectors, and how these should move so that it helps (FedL2G).

Shapes: N samples, C classes, Q entries of a guiding vector: as many as scores, or as features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyfed.functional.losses import cross_entropy, weighted_mean
from polyfed.functional.tied_tensors import call_with


def guided_loss(
    scores_NC: Tensor, found_NQ: Tensor, y_N: Tensor, w_N: Tensor, guides_CQ: Tensor, weight: float
) -> Tensor:
    """CE(scores, y) + weight * mean_q (found - guide of y)^2, both weighted means over the rows.

    Differentiable in the guides, too; row weights are those of `losses.cross_entropy`.

    Source: Zhang et al. (FedL2G), arXiv:2410.06490, the local objective.
    """
    squared_N = (found_NQ - guides_CQ[y_N]).square().mean(dim=1)
    return cross_entropy(scores_NC, y_N, w_N) + weight * weighted_mean(squared_N, w_N)


def meta_gradient(
    module: nn.Module,
    guides_CQ: Tensor,
    study: tuple[Tensor, Tensor],
    quiz: tuple[Tensor, Tensor],
    lr: float,
    weight: float,
) -> Tensor:
    """Gradient in the guides g of CE on the quiz after one step of SGD on the study batch, which g has guided.

    w' = w - lr grad_w [CE + weight * distance to g] on the study batch;  then grad_g CE(w') on the quiz. Rows of
    classes that the study batch lacks are 0. By two derivatives, the second through the step.

    Args:
        module: gives (scores (N, C), what is guided (N, Q)), twice differentiable; its parameters are left alone.
        study, quiz: (x, y).

    Source: FedL2G, arXiv:2410.06490, the learning-to-guide step.
    """
    w = {name: p.detach().requires_grad_() for name, p in module.named_parameters() if p.requires_grad}
    g = guides_CQ.detach().requires_grad_()
    x, y = study
    scores, found = call_with(module, w, (x,))
    loss = guided_loss(scores, found, y, torch.ones_like(scores[:, 0]), g, weight)
    grads = torch.autograd.grad(loss, tuple(w.values()), create_graph=True, allow_unused=True)
    moved = {name: p if d is None else p - lr * d for (name, p), d in zip(w.items(), grads, strict=True)}
    x, y = quiz
    scores, _ = call_with(module, moved, (x,))
    missed = cross_entropy(scores, y, torch.ones_like(scores[:, 0]))
    (gradient,) = torch.autograd.grad(missed, g, materialize_grads=True)
    return gradient
