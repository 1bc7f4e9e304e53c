"""FedTGP: prototypes that the server trains apart from each other (Zhang, Liu, Hua and Cao, AAAI 2024).

phi_k and h_k are the client's extractor and head. P[c] is the prototype of class c and Q[c] the
plain mean of the C_k[c].
client k:  E epochs of SGD on CE(h_k(phi_k(x)), y) + lambda mean_d (phi_k(x) - P[y])^2
           C_k[c] = mean of phi_k(x) over its samples of class c, in eval mode, after training
server:    P = linear(ReLU(linear(embedding)))
           delta = max over c of the distance from Q[c] to the nearest other Q[c'], at most `margin`
           server_epochs epochs of SGD, over all (k, c), on
           CE(-(||C_k[c] - P[c']|| + delta [c' = c]) over all c', c)
Deviations from the paper (arXiv:2401.03230): (1) A class that no client has sent yet is not sent and is no candidate;
it takes part in the server's loss. (2) With a single class in a round, delta is `margin`. (3) The server's optimizer is
SGD without momentum, so it has no state. (4) Delta is of the nearest other class, as in the authors' code; equation 9
takes the farthest. (5) Mean squares per sample have weight 10, as in that code. Equation 11 has the Euclidean distance
of class means, with weight 0.1 in the paper's experiments. (6) The server's loss is a mean over the pairs, as in that
code, not their sum. (7) The authors' code computes the means with the network as it was before training.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.method import hyperparameters
from polyfed.core.server import Server
from polyfed.functional import server_prototypes
from polyfed.functional.class_prototypes import merge
from polyfed.methods.building_blocks.prototypes import TrainedPrototypes


@hyperparameters
class FedTGP(TrainedPrototypes):
    """Server-trained prototypes with a margin between classes."""

    card = replace(TrainedPrototypes.card, name="fedtgp", paper="Zhang et al., AAAI 2024")

    prototype_weight: Annotated[float, Field(ge=0)] = 10.0
    margin: Annotated[float, Field(ge=0)] = 100.0  # upper bound of delta; 0: no margin
    server_epochs: Annotated[int, Field(ge=1)] = 100  # passes over the received means per round

    def server_loss(self, server: Server, means: Tensor, labels: Tensor) -> server_prototypes.Loss:
        """Own prototypes must be nearer than others by the margin that the mean means have."""
        _, centers = merge(means, labels, torch.ones(len(labels)))
        delta = server_prototypes.margin(centers, self.margin)
        server.log["margin"] = delta
        return functools.partial(server_prototypes.margin_loss, margin=delta)
