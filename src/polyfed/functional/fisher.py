"""The diagonal of the Fisher information: how much the likelihood of single samples depends on each weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.functional.modes import eval_mode
from polyfed.functional.tied_tensors import call_with

_AT_ONCE = 2**24  # numbers that samples' gradients may be together: 64 MiB


def fisher_diagonal(model: nn.Module, x_B: Tensor, y_B: Tensor) -> dict[str, Tensor]:
    """sum_n (d log p(y_n | x_n) / d w)^2, entry by entry: the square of each sample's gradient, not of their sum.

    By the name of each trainable parameter. In eval mode, where no sample depends on another.

    Source: Yang et al. (FedDPA), NeurIPS 2023 (the empirical Fisher information, before the mean).
    """
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(w) for name, w in weights.items()}

    def loss(w: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(call_with(model, w, (x[None],)), y[None].long())

    gradient = torch.func.grad(loss)
    rows = max(1, _AT_ONCE // sum(w.numel() for w in weights.values()))
    with eval_mode(model):
        for x, y in zip(x_B.split(rows), y_B.split(rows), strict=True):
            try:
                grads = torch.func.vmap(gradient, in_dims=(None, 0, 0))(weights, x, y)
            except RuntimeError:  # vmap has no rule for an operation, as for LSTMs
                each = [gradient(weights, *sample) for sample in zip(x, y, strict=True)]
                grads = {name: torch.stack([g[name] for g in each]) for name in weights}
            for name, g in grads.items():
                total[name] += g.square().sum(dim=0)
    return total
