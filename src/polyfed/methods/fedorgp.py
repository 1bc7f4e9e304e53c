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
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from polyfed.core.message import Message, get_tensor
from polyfed.core.method import Batch, Context, hyperparameters
from polyfed.core.server import Server
from polyfed.functional import prototype_network
from polyfed.functional.class_targets import align, most_similar
from polyfed.functional.losses import cross_entropy
from polyfed.methods.building_blocks import prototypes


@hyperparameters
class FedORGP(prototypes.PrototypeMethod):
    """Server-trained prototypes at right angles to other classes, approached by cosine."""

    name: ClassVar[str] = "fedorgp"
    paper: ClassVar[str] = "Guo et al., arXiv:2502.16119"
    down: ClassVar[str] = "C D + C"
    up: ClassVar[str] = "S D + S"
    states: ClassVar[str] = "client: last P received; server: prototype network, P"
    unaligned_entries: ClassVar[tuple[str, ...]] = ("prototypes",)

    prototype_weight: Annotated[float, Field(ge=0)] = 1.0  # weight of the angles to the prototypes; 0: Local
    gamma: Annotated[float, Field(ge=0)] = 1.0  # weight of orthogonality to other classes; 0: off
    server_epochs: Annotated[int, Field(ge=1)] = 1  # passes over the received means per round
    server_lr: Annotated[float, Field(ge=0)] = 0.01  # learning rate of the server's SGD; 0: P stays random

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        prototypes.start_network(server)

    def broadcast(self, server: Server, client_id: int) -> Message:
        return prototypes.known(server)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sent = prototypes.collect(server, uploads, "prototypes")
        if sent is None:
            return
        orthogonal = functools.partial(prototype_network.orthogonality, gamma=self.gamma)
        loss = prototypes.train_network(server, sent, orthogonal, self.server_epochs, self.server_lr)
        server.log["prototype_loss"] = loss

    # client ------------------------------------------------------------------------------------------------
    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        z = model.represent(batch.x)
        task = cross_entropy(model.head(z), batch.y, batch.w)
        if "prototypes" not in context:
            return task
        away = align(z, batch.y, batch.w, context["prototypes"], context["known"])
        return task + self.prototype_weight * away, {"angle": away}

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        z = model.represent(x)
        scores: Tensor = model.head(z)
        if self.predictor == "head" or "prototypes" not in context:
            return scores
        return most_similar(z, get_tensor(context, "prototypes").to(z), get_tensor(context, "labels"), scores.shape[1])
