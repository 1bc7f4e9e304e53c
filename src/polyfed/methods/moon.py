"""MOON: model-contrastive learning (Li, He and Song, CVPR 2021, arXiv:2103.16257).

z      = R(x; w),  the representation: what enters the head;   sim: cosine
l_con  = -log[ e^(sim(z, R(x; w^t)) / T) / (e^(sim(z, R(x; w^t)) / T) + e^(sim(z, R(x; w')) / T)) ]      eq. 3
client k:  E epochs of SGD on  CE(f(x; w), y) + mu l_con
server:    w <- sum over responding clients of p_k w_k,   p_k = n_k / sum n_j, or 1 / their number

Deviations from the paper: (1) z is the input of the head. The paper adds a projection of two layers;
`models.feature_dim` adds one layer (Linear, ReLU), for all compared methods alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Requirements, hyperparameters
from polyfed.core.modules import floats, frozen
from polyfed.functional.losses import contrast, cross_entropy
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.fedavg import FedAvg


@hyperparameters
class MOON(FedAvg):
    """Averaging of weights with a model-contrastive loss."""

    name: ClassVar[str] = "moon"
    paper: ClassVar[str] = "Li et al., CVPR 2021"
    ignores_initial_weights: ClassVar[bool] = True

    mu: Annotated[float, Field(ge=0)] = 1.0  # weight of l_con; 0: FedAvg
    temperature: Annotated[float, Field(gt=0)] = 0.5  # T; larger is weaker

    @property
    def requirements(self) -> Requirements:
        return weight_averaging.needs(self.aggregation, split_model=True)

    def receive(self, client: Client, message: Message) -> Context:
        is_first_round = client.weights is None
        if is_first_round or not self.mu:
            return super().receive(client, message)
        model = client.model
        previous = {name: t.clone() for name, t in floats(model).items()}
        super().receive(client, message)
        received = {name: t.clone() for name, t in floats(model).items()}
        return {"received": frozen(model, received), "previous": frozen(model, previous)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        z = model.represent(batch.x)
        task = cross_entropy(model.head(z), batch.y, batch.w)
        if "previous" not in context:
            return task + self.mu * math.log(2)
        near = context["received"].represent(batch.x)
        far = context["previous"].represent(batch.x)
        term = contrast(z, near, far, self.temperature, batch.w)
        return task + self.mu * term, {"contrast": term}
