"""FedORGP: prototypes that the server trains to be orthogonal to other classes (Guo, Luan, Li, Zhao and Jiang, 2025).

phi_k and h_k are the client's extractor and head; P[c] is the server's vector of class c.
client k:  E epochs of SGD on CE(h_k(phi_k(x)), y) + lambda_c (1 - cos(phi_k(x), P[y]))
           C_k[c] = mean of phi_k(x) over its samples of class c, in eval mode, after training
server:    P = linear(ReLU(linear(embedding)))
           server_epochs epochs of SGD on 1 - s + gamma d, over the pairs (k, c)
           s = mean of cos(C_k[c], P[c])
           d = mean of |cos(C_k[c], P[c'])| over the pairs and the C - 1 other classes c'
The paper is the PDF in its authors' repository (March 2025). Deviations from the paper (arXiv:2502.16119): (1) The
weight lambda_s of 1 - s is 1, as in the paper's experiments. Another weight equals another choice of `server_lr` and
`gamma`. (2) Round 1 has no prototypes, as in the authors' code; algorithm 1 sends the untrained ones. (3) A class that
no client has sent yet is not sent; it takes part in the server's loss. (4) The server's optimizer is SGD without
momentum, so it has no state.
Sent: down C D + C; up S D + S. Kept: client: last P received; server: prototype network, P.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, hyperparameters
from polyfed.core.server import Server
from polyfed.functional.class_prototypes import mean_of_known
from polyfed.functional.losses import cross_entropy
from polyfed.methods.building_blocks import prototype_network, prototypes


@hyperparameters
class FedORGP(prototypes.PrototypeMethod):
    """Server-trained prototypes at right angles to other classes, approached by cosine."""

    # lambda_c, weight of 1 - cosine with the prototype of the sample's class; 0: Local, bit for bit
    prototype_weight: Annotated[float, Field(ge=0)] = 10.0
    # predict by the head, or by the prototype of largest cosine; the other one is evaluated, too
    predictor: Literal["prototype", "head"] = "head"
    # weight of orthogonality to other classes' means; 0: prototypes only follow their own class
    gamma: Annotated[float, Field(ge=0)] = 10.0
    server_epochs: Annotated[int, Field(ge=1)] = 1  # passes over the received means per round
    server_lr: Annotated[float, Field(ge=0)] = 0.01  # learning rate of the server's SGD; 0: prototypes stay as drawn

    # client ------------------------------------------------------------------------------------------------
    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        z = model.represent(batch.x)
        task = cross_entropy(model.head(z), batch.y, batch.w)
        if "prototypes" not in context:
            return task
        cosine_N = F.cosine_similarity(z, context["prototypes"][batch.y], dim=1)  # with a row of zeros: 0
        distance = mean_of_known(1 - cosine_N, context["known"][batch.y], batch.w)  # eq. 8
        return task + self.prototype_weight * distance, {"distance": distance}

    def similarity(self, z: Tensor, prototypes: Tensor) -> Tensor:
        return F.normalize(z, dim=1) @ F.normalize(prototypes, dim=1).T

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        prototype_network.init(server)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        def loss(prototypes_CD: Tensor, rows_BD: Tensor, labels_B: Tensor) -> Tensor:
            return orthogonality(prototypes_CD, rows_BD, labels_B, self.gamma)

        sent = prototypes.collect(server, uploads, "prototypes")
        if sent is not None:
            prototype_network.fit(server, sent, loss, self.server_epochs, self.server_lr)


def orthogonality(prototypes_CD: Tensor, rows_MD: Tensor, labels_M: Tensor, gamma: float) -> Tensor:
    """mean_m [1 - cos(row m, prototype of y_m)] + gamma mean over m and c != y_m of |cos(row m, prototype of c)|.

    Source: eq. 3 to 5 with lambda_s = 1.
    """
    cosines_MC = F.normalize(rows_MD, dim=1) @ F.normalize(prototypes_CD, dim=1).T
    own_MC = F.one_hot(labels_M, len(prototypes_CD)).to(cosines_MC)
    similarity = (own_MC * cosines_MC).sum(dim=1).mean()
    others = max(len(prototypes_CD) - 1, 1)
    overlap = ((1 - own_MC) * cosines_MC.abs()).sum(dim=1).mean() / others
    return 1 - similarity + gamma * overlap
