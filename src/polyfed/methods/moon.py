"""MOON: model-contrastive learning (Li, He and Song, CVPR 2021, arXiv:2103.16257), also among differing networks.

z = R(x; w): the representation, the input of the head
e(r) = exp(cosine(z, r) / T),   l_con = -log[ e(R(x; w^t)) / (e(R(x; w^t)) + e(R(x; w'))) ]   eq. 3
client k:  E epochs of SGD on  CE(f(x; w), y) + mu l_con
server:    w <- sum over responding clients of p_k w_k
           p_k = n_k / sum n_j ("samples"),  1 / their number ("uniform")
w^t: the weights received; w': those that the client's own last round ended with.
Sent: down P; up P + 1. Kept: server: w.
Deviations from the paper: (1) Different architectures are averaged layer by layer or within each architecture; the
paper has one. (2) z is the input of the network's head. The paper adds a projection of two layers; `models.feature_dim`
adds one layer (Linear, ReLU), for all compared methods alike. (3) In a client's first round l_con is log 2; the paper
omits the negative. Neither has a gradient. (4) Both reference networks run in eval mode. (5) w' is the model that a
client stores anyway; no second copy is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Requirements, hyperparameters, loads_message
from polyfed.core.modules import FrozenModel, float_state
from polyfed.functional.losses import cross_entropy, task_loss
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.fedavg import FedAvg


@hyperparameters
class MOON(FedAvg):
    """Averaging of weights with a model-contrastive loss."""

    mu: Annotated[float, Field(ge=0)] = 1.0  # weight of l_con; 0: FedAvg
    temperature: Annotated[float, Field(gt=0)] = 0.5  # T; larger is weaker

    @loads_message
    def receive(self, client: Client, message: Message) -> Context:
        is_first_round = client.weights is None
        if is_first_round or not self.mu:
            return super().receive(client, message)
        model = client.model
        previous = {name: t.clone() for name, t in float_state(model).items()}
        super().receive(client, message)
        received = {name: t.clone() for name, t in float_state(model).items()}
        return {"received": FrozenModel(model, received), "previous": FrozenModel(model, previous)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        z = model.represent(batch.x)
        task = task_loss(model.head(z), batch.y, batch.w)
        if "previous" not in context:
            return task + self.mu * math.log(2)
        near = context["received"].represent(batch.x)
        far = context["previous"].represent(batch.x)
        term = model_contrastive_loss(z, near, far, self.temperature, batch.w)
        return task + self.mu * term, {"contrast": term}

    ignores_initial_weights = True

    @property
    def requirements(self) -> Requirements:
        return weight_averaging.requirements(self.aggregation, split_model=True)


def model_contrastive_loss(z_ND: Tensor, near_ND: Tensor, far_ND: Tensor, temperature: float, w_N: Tensor) -> Tensor:
    """-log[e^(cos(z, near) / T) / (e^(cos(z, near) / T) + e^(cos(z, far) / T))], weighted mean over the rows.

    near and far are constants for the gradient.
    """
    others = (near_ND.detach(), far_ND.detach())
    logits_N2 = torch.stack([F.cosine_similarity(z_ND, other, dim=1) for other in others], dim=1) / temperature
    return cross_entropy(logits_N2, torch.zeros_like(w_N, dtype=torch.int64), w_N)
