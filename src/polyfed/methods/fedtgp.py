"""FedTGP: prototypes that the server trains apart from each other (Zhang, Liu, Hua and Cao, AAAI 2024).

Clients as in FedProto: they are drawn to the server's prototypes P, and send the means C_k[c] of their trained
networks' representations (arXiv:2401.03230).
Server:    P = a network of a trained embedding of the classes: linear, ReLU, linear; `server_epochs` epochs of SGD on
           CE(-(||C_k[c] - P[c']|| + delta 1[c' = c]) over all c', c) over the pairs received;
           delta = max over c of the distance from Q[c] to the nearest Q[c'], at most `margin`, Q the clients'
           mean means: own prototypes must be nearer than others by delta.
Predicted: the class of the nearest P[c]; without any prototype, by the head. Scored: the newest P, stage `received`.
Deviations from the paper: (1) P of a class that nobody has sent yet is not sent, and is no candidate; all C take part
in the loss. (2) Where a round has one class only, delta is `margin`. (3) The network keeps its weights from round to
round; its optimizer has no momentum and so nothing to keep. As in the authors' code: (4) delta is of the nearest other
class; equation 9 takes the farthest. (5) Clients are drawn by mean squares per sample, weight 10; equation 11 has the
Euclidean distance of class means, weight 0.1. (6) The server's loss is a mean over the pairs, not their sum.
From that code: it collects the means from the network as it was before training.
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
