"""The proximal term: (mu/2) ||w - w^t||^2 holds a client near the weights w^t that it received (FedProx, eq. 2)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polyfed.core.method import Context
from polyfed.functional.losses import squared_distance


def reference(model: nn.Module, mu: float) -> dict[str, Any]:
    """What `added` needs: copies of the parameters, no buffers, as they are now; nothing where `mu` is 0."""
    return {"reference": {name: p.detach().clone() for name, p in model.named_parameters()}} if mu else {}


def added(task: Tensor, model: nn.Module, context: Context, mu: float) -> Tensor:
    """`task` + (mu/2) ||w - reference||^2, the squared norm; `task` itself where `mu` is 0."""
    return task + mu / 2 * squared_distance(dict(model.named_parameters()), context["reference"]) if mu else task
