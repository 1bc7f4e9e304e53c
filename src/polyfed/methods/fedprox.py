"""FedProx: averaging with a proximal term (Li et al., MLSys 2020, arXiv:1812.06127), also among differing networks.

client k:  E epochs of SGD on  CE(f(x; w), y) + (mu/2) ||w - w^t||^2              (eq. 2)
server:    w <- sum over responding clients of p_k w_k
           p_k = n_k / sum n_j ("samples"),  1 / their number ("uniform")
Sent: down P; up P + 1. Kept: server: w.
Deviations from the paper: (1) Different architectures are averaged layer by layer or within each architecture; the
paper has one. (2) Clients are drawn uniformly and weighted by samples; the paper draws them by samples and weights them
equally. (3) All clients train E epochs. The paper lets slow devices train fewer (gamma-inexactness). (4) The norm is
over parameters. BatchNorm's running statistics are averaged without the proximal term. (5) Adam and momentum treat the
term's gradient like the rest.
"""

from __future__ import annotations

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

    mu: Annotated[float, Field(ge=0)] = 0.01  # weight of the proximal term; 0: FedAvg; FedIN's comparison has 0.1

    @loads_message
    def receive(self, client: Client, message: Message) -> Context:
        super().receive(client, message)
        return {"received": copy_parameters(client.model)} if self.mu else {}

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        plain = super().gradients(model, batch, context)
        return add_pull(plain, model, context["received"], self.mu) if self.mu else plain

    ignores_initial_weights = True
