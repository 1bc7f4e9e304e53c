"""FedTGP: prototypes that the server trains apart from each other (Zhang, Liu, Hua and Cao, AAAI 2024).

phi_k and h_k are the client's extractor and head, P[c] is the prototype of class c.
client k:  E epochs of SGD on CE(h_k(phi_k(x)), y) + lambda mean_d (phi_k(x) - P[y])^2      `loss` (eq. 11, see 5)
           m_k[c] = mean of phi_k(x) over its samples of class c, in eval mode, after training
server:    Q[c] = plain mean of the m_k[c]
           delta = max over c of the distance from Q[c] to the nearest other Q[c'],
                   at most `margin`                                                `adaptive_margin` (eq. 9, see 4)
           P = linear(ReLU(linear(embedding))), trained in server_epochs epochs of SGD, over all (k, c), on
               CE(-(||m_k[c] - P[c']|| + delta [c' = c]) over all c', c)           `margin_loss` (eq. 10, see 6)
               in shuffled batches of the clients' size                            `building_blocks.prototype_network`
prediction: argmin_c ||phi_k(x) - P[c]||
scored:     the prediction by what was received, before local training
lambda is `prototype_weight`. `tests/methods/test_fedtgp.py` holds the margin, the loss and the server's training to
independent calculations, so that `building_blocks.prototype_network` need not be read. What clients send and keep, and
`predict`, are those of `building_blocks.prototypes`.
Shapes: C classes, S of them a client's, D features, M means received, B of them in a batch.
Sent: down C D + C; up S D + S. Kept: client: last P received; server: prototype network, P.
Deviations from the paper (arXiv:2401.03230): (1) A class that no client has sent yet is not sent and is no candidate;
it takes part in the server's loss. (2) With a single class in a round, delta is `margin`. (3) The server's optimizer is
SGD without momentum, so it has no state. (4) Delta is of the nearest other class, as in the authors' code; equation 9
takes the farthest. (5) Mean squares per sample have weight 10, as in that code. Equation 11 has the Euclidean distance
of class means, with weight 0.1 in the paper's experiments. (6) The server's loss is a mean over the pairs, as in that
code, not their sum. (7) The authors' code computes the means with the network as it was before training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, hyperparameters
from polyfed.core.server import Server
from polyfed.functional.class_prototypes import distances, merge, nearest_distances, prototype_distance
from polyfed.functional.losses import cross_entropy
from polyfed.methods.building_blocks import prototype_network, prototypes


@hyperparameters
class FedTGP(prototypes.PrototypeMethod):
    """Server-trained prototypes with a margin between classes."""

    prototype_weight: Annotated[float, Field(ge=0)] = 10.0
    margin: Annotated[float, Field(ge=0)] = 100.0  # upper bound of delta; 0: no margin
    server_epochs: Annotated[int, Field(ge=1)] = 100  # passes over the received means per round
    server_lr: Annotated[float, Field(ge=0)] = 0.01  # learning rate of the server's SGD; 0: prototypes stay as drawn

    # client ------------------------------------------------------------------------------------------------
    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        z = model.represent(batch.x)
        task = cross_entropy(model.head(z), batch.y, batch.w)
        if "prototypes" not in context:
            return task
        distance = prototype_distance(z, batch.y, batch.w, context["prototypes"], context["known"])
        return task + self.prototype_weight * distance, {"distance": distance}

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        prototype_network.init(server)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sent = prototypes.collect(server, uploads, "prototypes")
        if sent is None:
            return
        _, q_SD = merge(sent.rows, sent.labels, torch.ones(len(sent.labels)))
        delta = adaptive_margin(q_SD, self.margin)
        server.log["margin"] = delta

        def apart(p_CD: Tensor, means_BD: Tensor, labels_B: Tensor) -> Tensor:
            return margin_loss(p_CD, means_BD, labels_B, delta)

        prototype_network.fit(server, sent, apart, self.server_epochs, self.server_lr)


def adaptive_margin(q_SD: Tensor, most: float) -> float:
    """delta, the largest distance of any Q[c] to the nearest other one, at most `most`; `most` for one class."""
    return min(float(nearest_distances(q_SD).max()), most)


def margin_loss(p_CD: Tensor, means_MD: Tensor, labels_M: Tensor, delta: float) -> Tensor:
    """mean_m -log[e^-(d(m, y_m) + delta) / (e^-(d(m, y_m) + delta) + sum over c != y_m of e^-d(m, c))].

    d(m, c) is the Euclidean distance of the m-th mean, of class y_m, and P[c]; its gradient at distance 0 is 0.
    """
    is_own_MC = labels_M[:, None] == torch.arange(len(p_CD), device=labels_M.device)
    return F.cross_entropy(-(distances(means_MD, p_CD) + delta * is_own_MC), labels_M)
