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
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from polyfed.core.method import Batch, Context, hyperparameters
from polyfed.core.server import Server
from polyfed.functional import server_prototypes
from polyfed.functional.class_prototypes import align, most_similar
from polyfed.methods.building_blocks.prototypes import TrainedPrototypes


@hyperparameters
class FedORGP(TrainedPrototypes):
    """Server-trained prototypes at right angles to other classes, approached by cosine."""

    card = replace(TrainedPrototypes.card, name="fedorgp", paper="Guo et al., arXiv:2502.16119")

    # lambda_c, weight of 1 - cosine with the prototype of the sample's class; 0: Local, bit for bit
    prototype_weight: Annotated[float, Field(ge=0)] = 10.0
    # predict by the head, or by the prototype of largest cosine; the other one is evaluated, too
    predictor: Literal["prototype", "head"] = "head"
    # weight of orthogonality to other classes' means; 0: prototypes only follow their own class
    gamma: Annotated[float, Field(ge=0)] = 10.0

    # server ------------------------------------------------------------------------------------------------
    def server_loss(self, server: Server, means: Tensor, labels: Tensor) -> server_prototypes.Loss:
        return functools.partial(server_prototypes.orthogonality, gamma=self.gamma)

    # client ------------------------------------------------------------------------------------------------
    def distance(self, z: Tensor, batch: Batch, context: Context) -> Tensor:
        return align(z, batch.y, batch.w, context["prototypes"], context["known"])

    def prototype_scores(self, z: Tensor, prototypes: Tensor, labels: Tensor, classes: int) -> Tensor:
        return most_similar(z, prototypes, labels, classes)
