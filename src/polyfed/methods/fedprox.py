"""FedProx: averaging with a proximal term (Li et al., MLSys 2020, arXiv:1812.06127).

client k:  E epochs of SGD on  CE(f(x; w), y) + (mu/2) ||w - w^t||^2                          eq. 2
server:    w <- sum over responding clients of p_k w_k,   p_k = n_k / sum n_j, or 1 / their number

Deviations from the paper: (1) Clients are selected uniformly and weighted by samples; the paper selects them in
proportion to samples and weights them equally. (2) All clients train E epochs. In the paper slow devices may do fewer
(gamma-inexactness). (3) The norm covers parameters only. BatchNorm's running statistics are averaged like weights;
its batch counter stays local. (4) With Adam or momentum, the term's gradient is treated like the rest.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, hyperparameters
from polyfed.core.modules import copy_parameters
from polyfed.functional.losses import cross_entropy, squared_distance
from polyfed.methods.fedavg import FedAvg


@hyperparameters
class FedProx(FedAvg):
    """Averaging with a proximal term in the local loss."""

    name: ClassVar[str] = "fedprox"
    paper: ClassVar[str] = "Li et al., MLSys 2020"
    ignores_initial_weights: ClassVar[bool] = True

    mu: Annotated[float, Field(ge=0)] = 0.01  # weight of the proximal term; 0: FedAvg

    def receive(self, client: Client, message: Message) -> Context:
        super().receive(client, message)
        return {"received": copy_parameters(client.model)} if self.mu else {}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        task = cross_entropy(model(batch.x), batch.y, batch.w)
        if not self.mu:
            return task
        return task + self.mu / 2 * squared_distance(dict(model.named_parameters()), context["received"])
