"""FedProx: averaging with a proximal term (Li et al., MLSys 2020, arXiv:1812.06127), also among differing networks.

Client k:  w <- w^t, received;  E local epochs of SGD on CE(f(x; w), y) + (mu/2) ||w - w^t||^2 (eq. 2).
Server:    w <- sum_k p_k w_k over those who answered, p_k = n_k / sum n_k (or 1 / their number).
Deviations from the paper: (1) where architectures differ, tensors are averaged layer-wise over the clients that have
them, or within each architecture; w^t is what the client received of them. (2) Clients are drawn uniformly and weighted
by samples, not drawn by samples and weighted alike. (3) Everybody trains E epochs; slow devices may do fewer in the
paper. (4) The norm is over parameters; BatchNorm's statistics are averaged and not held. (5) Under Adam or momentum the
term's gradient is treated as the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, StepResult, hyperparameters, loads_message
from polyfed.core.modules import copy_parameters
from polyfed.methods.building_blocks.proximal import add_pull
from polyfed.methods.fedavg import FedAvg


@hyperparameters
class FedProx(FedAvg):
    """Averaging with a proximal term in the local loss."""

    card = replace(FedAvg.card, name="fedprox", paper="Li et al., MLSys 2020")

    mu: Annotated[float, Field(ge=0)] = 0.01  # weight of the proximal term; 0: FedAvg; FedIN's comparison has 0.1

    @loads_message
    def receive(self, client: Client, message: Message) -> Context:
        super().receive(client, message)
        return {"received": copy_parameters(client.model)} if self.mu else {}

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        plain = super().gradients(model, batch, context)
        return add_pull(plain, model, context["received"], self.mu) if self.mu else plain
