"""The diagonal of the Fisher information: how much the likelihood of single samples depends on each weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.functional.modes import evaluating


def squared_gradients(model: nn.Module, x_B: Tensor, y_B: Tensor) -> dict[str, Tensor]:
    """sum_n (d log p(y_n | x_n) / d w)^2, entry by entry: the square of each sample's gradient, not of their sum.

    In eval mode, where no sample depends on another. One sample alone, and networks with recurrent layers, which
    cannot be vectorised, go through plain backward passes; others through all samples at once.

    Args:
        model: gives logits (B, C). x_B: inputs as the model takes them. y_B: classes.

    Returns:
        Trainable parameter -> tensor of its shape; all samples' gradients are held at a time.

    Source: Yang et al. (FedDPA), NeurIPS 2023 (the empirical Fisher information, before the mean).
    """
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits: Tensor = torch.func.functional_call(model, weights, (x[None],))
        return F.cross_entropy(logits, y[None].long())

    gradient = torch.func.grad(loss)
    with evaluating(model):
        if len(x_B) > 1 and not any(isinstance(m, nn.RNNBase) for m in model.modules()):
            each = torch.func.vmap(gradient, in_dims=(None, 0, 0))(parameters, x_B, y_B)
            return {name: g.square().sum(dim=0).detach() for name, g in each.items()}
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for x, y in zip(x_B, y_B, strict=True):
            total = {name: total[name] + g.detach().square() for name, g in gradient(parameters, x, y).items()}
    return total


def unit_range(tensor: Tensor) -> Tensor:
    """(t - min t) / (max t - min t), in [0, 1]; a constant tensor, for which that is 0 / 0, becomes 0.

    >>> unit_range(torch.tensor([2.0, 4.0, 3.0])), unit_range(torch.tensor([5.0, 5.0]))
    (tensor([0.0000, 1.0000, 0.5000]), tensor([0., 0.]))
    """
    if not tensor.numel():
        return tensor.clone()
    low, high = tensor.aminmax()
    return (tensor - low) / torch.where(high > low, high - low, torch.ones_like(high))
