"""FedTGP: server-trained prototypes with a margin (Zhang, Liu, Hua and Cao, AAAI 2024, arXiv:2401.03230).

client k:  E epochs of SGD on CE(h_k(phi_k(x)), y) + lambda mean_d (phi_k(x) - P[y])^2
           C_k[c] = mean of phi_k(x) over its samples of class c, in eval mode, after training
server:    delta = max over c of the distance from Q[c] to the nearest other Q[c'], at most `margin`;
                   Q[c]: the plain mean of the C_k[c]
           server_epochs epochs of SGD on CE(-(||C_k[c] - P[c']|| + delta [c' = c]) over all c', c), over all (k, c)

Deviations from the paper: (1) A class that nobody has sent yet is not sent and not a candidate; it takes part in the
server's loss. (2) The server's optimizer is plain SGD without state; the network's weights are in the server's state
and checkpoints.
The authors' code computes class means with the network stored before training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from polyfed.core.message import Message, group, tensor
from polyfed.core.method import hyperparameters
from polyfed.core.modules import split
from polyfed.core.server import Server
from polyfed.functional import prototype_network
from polyfed.functional.class_targets import merge
from polyfed.methods.building_blocks import prototypes


@hyperparameters
class FedTGP(prototypes.Prototypes):
    """Server-trained prototypes with a margin between classes."""

    name: ClassVar[str] = "fedtgp"
    paper: ClassVar[str] = "Zhang et al., AAAI 2024"
    down: ClassVar[str] = "C D + C"
    up: ClassVar[str] = "S D + S"
    states: ClassVar[str] = "client: last P received; server: prototype network, P"
    unaligned_entries: ClassVar[tuple[str, ...]] = ("prototypes",)

    lambda_: Annotated[float, Field(ge=0)] = 10.0  # weight of the mean squared distance; 0: Local
    margin: Annotated[float, Field(ge=0)] = 100.0  # tau, upper bound of delta; 0: off
    server_epochs: Annotated[int, Field(ge=1)] = 100  # passes over the received means per round
    server_lr: Annotated[float, Field(ge=0)] = 0.01  # learning rate of the server's SGD; 0: P stays random

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        features = split(server.model(server.architectures[0], {})).feature_dim
        draws = server.generator("prototypes")
        server.state["network"] = prototype_network.fresh(server.classes, features, features, draws)

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {name: server.state[name] for name in ("labels", "prototypes") if name in server.state}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sent = prototypes.gather(uploads, "prototypes")
        if sent is None:
            return
        _, centers = merge(sent.rows, sent.labels, torch.ones_like(sent.counts))
        delta = prototype_network.margin(centers, self.margin)
        weights, loss = prototype_network.fit(
            group(server.state, "network"),
            sent.rows,
            sent.labels,
            delta,
            self.server_epochs,
            server.training.batch_size,
            self.server_lr,
            server.generator("means"),
        )
        before = [tensor(server.state, "labels")] if "labels" in server.state else []
        labels = torch.cat([*before, sent.labels]).unique()
        rows = prototype_network.prototypes(weights)[labels.long()]
        server.state |= {"network": weights, "labels": labels, "prototypes": rows}
        server.log |= {"prototype_loss": loss, "margin": delta}
