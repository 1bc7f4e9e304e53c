"""FedORGP: prototypes that the server trains to be orthogonal to other classes (Guo, Luan, Li, Zhao and Jiang, 2025).

Client k:  E local epochs of SGD on CE(h_k(phi_k(x)), y) + lambda (1 - cos(phi_k(x), P[y]));
           C_k[c] = mean of phi_k(x) over its samples of class c, in eval mode, after training.
Server:    P = a network of a trained embedding of the classes: linear, ReLU, linear; `server_epochs` epochs of SGD on
           sum over a batch of the pairs (k, c) that came of
           1 - cos(C_k[c], P[c]) + gamma sum over c' != c of |cos(C_k[c], P[c'])|.
Predicted: the class of the P[c] of largest cosine; without any prototype, by the head. Scored: the newest P, stage
`received`.
Sent per round, D features, C classes, S classes at the client: up 4 (S D + S), down 4 (C D + C). Without labels:
`nbytes_in_paper`.
Deviations from the paper (arXiv:2502.16119), against whose text the equations were not verified; they are those of the
authors' code: (1) the clients' term is a mean over the batch, and lambda belongs to that; in the code it is the sum,
over 32 samples in the authors' runs. The server's loss is the sum over a batch, as there. lambda = gamma = 1 are that
code's defaults; its recorded runs have 10 and 10. (2) P of a class that nobody has sent yet is not sent, and is no
candidate; all C take part in the server's loss. (3) The network keeps its weights from round to round; its optimizer
has no momentum and so nothing to keep.
"""

from __future__ import annotations

import functools
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from polyfed.core.method import Batch, Context, hyperparameters
from polyfed.core.server import Server
from polyfed.functional import prototype_network
from polyfed.functional.class_targets import align, most_similar
from polyfed.methods.building_blocks.trained_prototypes import TrainedPrototypes


@hyperparameters
class FedORGP(TrainedPrototypes):
    """Server-trained prototypes at right angles to other classes, approached by cosine."""

    name: ClassVar[str] = "fedorgp"
    paper: ClassVar[str] = "Guo et al., arXiv:2502.16119"

    prototype_weight: Annotated[float, Field(ge=0)] = 1.0  # weight of 1 - cosine to the prototypes; 0: Local
    gamma: Annotated[float, Field(ge=0)] = 1.0  # weight of orthogonality to other classes; 0: off

    # server ------------------------------------------------------------------------------------------------
    def server_loss(self, server: Server, means: Tensor, labels: Tensor) -> prototype_network.Loss:
        return functools.partial(prototype_network.orthogonality, gamma=self.gamma)

    # client ------------------------------------------------------------------------------------------------
    def distance(self, z: Tensor, batch: Batch, context: Context) -> Tensor:
        return align(z, batch.y, batch.w, context["prototypes"], context["known"])

    def prototype_scores(self, z: Tensor, prototypes: Tensor, labels: Tensor, classes: int) -> Tensor:
        return most_similar(z, prototypes, labels, classes)
