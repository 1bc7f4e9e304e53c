"""ProtoNorm: FedProto with prototypes that the server pushes apart (Lee, Shin and Choi, 2025, arXiv:2507.04310).

P[c] is the mean of the clients' class means, as in FedProto; lr falls from 0.1.
server:    p[c] = P[c] / ||P[c]||,  then spread_steps times
           v[c] <- 0.9 v[c] + lr sum over c' of (p[c] - p[c']) / ||p[c] - p[c']||^2
           p[c] <- (p[c] + v[c]) / ||p[c] + v[c]||;    sends  scale p[c]
client k:  as in FedProto, towards scale p[c]
The method follows the authors' code, whose settings are the defaults. It was not verified against the paper's text.
Sent: down C D + C; up S D + S. Kept: client: last P received; server: P, what is sent of it, clients' classes.
Deviations from the paper: (1) In that code, a class that no client sends in a round has no prototype in the next. (2)
There, the steps end once the forces no longer change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor
from polyfed.core.method import Batch, Context, TrainingResult, hyperparameters
from polyfed.core.server import Server
from polyfed.functional.class_prototypes import merge, prototype_distance
from polyfed.functional.losses import cross_entropy
from polyfed.methods.building_blocks import prototypes
from polyfed.validation.effect import ActsWith

_LR = 0.1  # learning rate of spreading
_LR_DECAY = 0.95  # its factor, after step 1, 11, 21, ...
_MOMENTUM = 0.9
_LEAST = 1e-10  # the smallest squared distance, where two rows coincide


@hyperparameters
class ProtoNorm(prototypes.PrototypeMethod):
    """Averaged class means, pushed apart on the sphere and sent at one length."""

    prototype_weight: Annotated[float, Field(ge=0)] = 10.0
    weighting: Literal["count", "uniform"] = "uniform"  # clients count equally; "count": by their samples of the class
    spread_steps: Annotated[int, Field(ge=0)] = 500  # steps that push prototypes apart; 0: FedProto
    scale: Annotated[float, Field(gt=0), ActsWith("spread_steps")] = 80.0  # length of the prototypes that are sent

    # server ------------------------------------------------------------------------------------------------
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sent = prototypes.collect(server, uploads, "prototypes")
        if sent is not None:
            prototypes.record_owners(server, sent)
            labels, rows = merge(sent.rows, sent.labels, sent.counts)
            prototypes.store(server, labels, rows)
        if self.spread_steps and "prototypes" in server.state:
            server.state["spread"] = self.scale * spread(get_tensor(server.state, "prototypes"), self.spread_steps)

    def broadcast(self, server: Server, client_id: int) -> Message:
        if "prototypes" not in server.state:
            return {}
        rows = get_tensor(server.state, "spread" if self.spread_steps else "prototypes")
        return prototypes.own_and_others(server, client_id, rows, self.candidates)

    # client ------------------------------------------------------------------------------------------------
    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        z = model.represent(batch.x)
        task = cross_entropy(model.head(z), batch.y, batch.w)
        if "prototypes" not in context:
            return task
        distance = prototype_distance(z, batch.y, batch.w, context["prototypes"], context["known"])
        return task + self.prototype_weight * distance, {"distance": distance}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return prototypes.upload_means(client, counts=self.weighting == "count")

    # declared -------------------------------------------------------------------------------------------------
    staleness_weighting = "uploads"
    upload_form = prototypes.UPLOAD_FORM


def spread(rows_SD: Tensor, steps: int) -> Tensor:
    """Rows of length 1, pushed apart in so many steps of gradient descent with momentum, in float64.

    With p = row / ||row||, the force on p_i is sum over j != i of (p_i - p_j) / ||p_i - p_j||^2, which lowers the
    energy -sum over pairs of log ||p_i - p_j||;  v <- 0.9 v + lr force,  p <- (p + v) / ||p + v||. lr is 0.1, times
    0.95 after every tenth step. Up to D + 1 rows end at equal angles, all cosines -1 / (S - 1).
    """
    p_SD = F.normalize(rows_SD.double(), dim=1)
    v_SD = torch.zeros_like(p_SD)
    lr = _LR
    for step in range(steps):
        squared_SS = (2 - 2 * p_SD @ p_SD.T).clamp(min=_LEAST)
        inverse_SS = (1 / squared_SS).fill_diagonal_(0)
        force_SD = inverse_SS.sum(dim=1, keepdim=True) * p_SD - inverse_SS @ p_SD
        v_SD = _MOMENTUM * v_SD + lr * force_SD
        p_SD = F.normalize(p_SD + v_SD, dim=1)
        if step % 10 == 0:
            lr *= _LR_DECAY
    return p_SD.to(rows_SD.dtype)
