"""Pulls toward reference weights, added to the gradients: autograd takes three times as long for them.

d = w - w_ref, over all entries of the parameters that take a gradient and are in `reference`, which has w_ref; `step`
is that of the loss alone, whose gradients are added to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyfed.core.method import StepResult, trained_tensors


def add_pull(step: StepResult, model: Any, reference: Mapping[str, Tensor], weight: float) -> StepResult:
    """The step of a loss plus (weight / 2) ||d||^2, whose gradient is weight d.

    Source: Li et al. (FedProx), MLSys 2020, eq. 2; FedIN, eq. 3.
    """
    apart = _differences(model, reference)
    penalty = weight / 2 * _norm(apart).square()
    return _add(step, penalty, {name: d.mul_(weight) for name, d in apart.items()})


def add_pull_to_length(
    step: StepResult, model: Any, reference: Mapping[str, Tensor], weight: float, length: float
) -> StepResult:
    """The step of a loss plus (weight / 2) (||d|| - length)^2, whose gradient is weight (1 - length / ||d||) d.

    At d = 0 it is 0.

    Source: Yang et al. (FedDPA), NeurIPS 2023.
    """
    apart = _differences(model, reference)
    norm = _norm(apart)
    factor = torch.where(norm > 0, weight * (1 - length / norm), torch.zeros_like(norm))
    return _add(step, weight / 2 * (norm - length).square(), {name: d.mul_(factor) for name, d in apart.items()})


def _differences(model: Any, reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: w - reference[name] for name, w in trained_tensors(model).items() if name in reference}


def _norm(apart: Mapping[str, Tensor]) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(d) for d in apart.values()]))
    return norm


def _add(step: StepResult, penalty: Tensor, pulls: Mapping[str, Tensor]) -> StepResult:
    """The step with a penalty and its gradients, which a parameter without a gradient of the loss has alone."""
    grads = dict(step.grads)
    for name, pull in pulls.items():
        plain = grads.get(name)
        grads[name] = pull if plain is None else plain.add_(pull)  # in place, as memory is what this costs
    return step._replace(grads=grads, loss=step.loss + penalty)
