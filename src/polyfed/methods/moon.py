"""MOON: model-contrastive learning (Li, He and Song, CVPR 2021, arXiv:2103.16257), also among differing networks.

z = R(x; w) is the representation, sim the cosine; w^t what the client received, w' what its own last round ended with.
Client k:  w <- w^t;  E local epochs of SGD on CE(f(x; w), y) + mu l_con,
           l_con = -log[e(z, R(x; w^t)) / (e(z, R(x; w^t)) + e(z, R(x; w')))],  e(a, b) = exp(sim(a, b) / T) (eq. 3).
Server:    w <- sum_k p_k w_k over those who answered, p_k = n_k / sum n_k (or 1 / their number).
Deviations from the paper: (1) where architectures differ, tensors are averaged layer-wise over the clients that have
them, or within each architecture. (2) z is what enters the network's head; the paper puts two layers before it, for
which `models.feature_dim` adds one. (3) In a client's first round w' = w^t: l_con is log 2, without gradient; the paper
leaves it out. (4) Both reference networks run in eval mode. (5) w' is the client's own model, which it keeps anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Requirements, hyperparameters, loads_message
from polyfed.core.modules import float_state, freeze_copy
from polyfed.functional.losses import model_contrastive_loss, task_loss
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.fedavg import FedAvg


@hyperparameters
class MOON(FedAvg):
    """Averaging of weights with a model-contrastive loss."""

    card = replace(FedAvg.card, name="moon", paper="Li et al., CVPR 2021")

    mu: Annotated[float, Field(ge=0)] = 1.0  # weight of l_con; 0: FedAvg
    temperature: Annotated[float, Field(gt=0)] = 0.5  # T; larger is weaker

    @property
    def requirements(self) -> Requirements:
        return weight_averaging.requirements(self.aggregation, split_model=True)

    @loads_message
    def receive(self, client: Client, message: Message) -> Context:
        is_first_round = client.weights is None
        if is_first_round or not self.mu:
            return super().receive(client, message)
        model = client.model
        previous = {name: t.clone() for name, t in float_state(model).items()}
        super().receive(client, message)
        received = {name: t.clone() for name, t in float_state(model).items()}
        return {"received": freeze_copy(model, received), "previous": freeze_copy(model, previous)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        z = model.represent(batch.x)
        task = task_loss(model.head(z), batch.y, batch.w)
        if "previous" not in context:
            return task + self.mu * math.log(2)
        near = context["received"].represent(batch.x)
        far = context["previous"].represent(batch.x)
        term = model_contrastive_loss(z, near, far, self.temperature, batch.w)
        return task + self.mu * term, {"contrast": term}
