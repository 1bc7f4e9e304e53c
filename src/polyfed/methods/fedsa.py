"""FedSA: anchors of the classes, to which representations and heads are drawn (Zhou et al., AAAI 2025; a reading).

phi_k and h_k are the client's extractor and head, A[c] is the anchor of class c. The gap of
vectors is the mean over the classes of the distance to the nearest other class.
client k:  E epochs of SGD on CE(h_k(phi_k(x)), y) + lambda mean_d (phi_k(x) - A[y])^2
               + contrast CE(-(||phi_k(x) - A[c]|| + delta_k [c = y]) over all c, y)
               + calibration mean over all c of CE(h_k(A[c]), c)
           C_k[c] = mean of phi_k(x) over its samples of class c, in eval mode, after training
           delta_k = the larger of gap(A) and gap(C_k) of its last upload
server:    before round 1: A[c] = relu(norm(W_2 relu(norm(W_1 e_c)))), random, norm over classes
           A[c] <- momentum A[c] + (1 - momentum) mean over k of C_k[c]
This is a reading: from the abstract and the authors' code; the paper's equations were not at
hand.
Sent: down C D; up S D + S. Kept: client: gap of its last means; server: anchors.
Deviations from the paper (arXiv:2501.05496): (1) Class means are computed after training; in the authors' code, while
weights still change. (2) In round 1, and for a client with one class, delta is the anchors' gap. (3) The head
classifies, since it is calibrated for that; the authors' code classifies by the nearest mean. (4) Not verified: which
of the two the paper scores, `anchor_weight` (the code's `-lam`), how anchors are drawn, the momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor
from polyfed.core.method import Batch, Context, Method, TrainingResult, hyperparameters
from polyfed.core.modules import as_split_model
from polyfed.core.server import Server
from polyfed.functional.class_prototypes import merge, nearest_distances, prototype_distance
from polyfed.functional.losses import cross_entropy
from polyfed.functional.modes import frozen_running_stats
from polyfed.methods.building_blocks import prototypes

_EPSILON = 1e-5  # BatchNorm's, added to variances of anchors


@hyperparameters
class FedSA(Method):
    """One anchor per class, drawn apart at the server, for representations and heads."""

    anchor_weight: Annotated[float, Field(ge=0)] = 1.0  # weight of the mean squared distance to the anchor; 0: off
    contrast: Annotated[float, Field(ge=0)] = 1.0  # weight of the contrast of anchors with a margin; 0: off
    # weight of the head's loss on all anchors; 0: off. All three 0: Local, bit for bit
    calibration: Annotated[float, Field(ge=0)] = 1.0
    # share of its old value that an anchor keeps; 1: anchors stay as drawn, 0: they are the clients' mean means
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.9999

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        features = as_split_model(server.model(server.architectures[0], {})).feature_dim
        server.state["anchors"] = draw_anchors(server.classes, features, server.generator("anchors"))

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {"anchors": get_tensor(server.state, "anchors")}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sent = prototypes.collect(server, uploads, "prototypes")
        if sent is None:
            return
        labels, rows = merge(sent.rows, sent.labels, sent.counts)
        anchors = get_tensor(server.state, "anchors").clone()
        known = labels.long()
        anchors[known] = self.momentum * anchors[known] + (1 - self.momentum) * rows
        server.state["anchors"] = anchors

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        if not (self.anchor_weight or self.contrast or self.calibration):
            return {}
        anchors = get_tensor(message, "anchors")
        margin = nearest_distances(anchors).mean()
        if "gap" in client.state:
            margin = torch.maximum(margin, get_tensor(client.state, "gap"))
        dtype = next(client.model.parameters()).dtype
        return {"anchors": anchors.to(dtype), "margin": margin.to(dtype)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        z = model.represent(batch.x)
        total = cross_entropy(model.head(z), batch.y, batch.w)
        if "anchors" not in context:
            return total
        anchors = context["anchors"]
        labels = torch.arange(len(anchors), device=anchors.device)
        is_known = torch.ones_like(labels, dtype=torch.bool)
        sums = {}
        if self.anchor_weight:
            sums["distance"] = prototype_distance(z, batch.y, batch.w, anchors, is_known)
            total = total + self.anchor_weight * sums["distance"]
        if self.contrast:
            sums["contrast"] = margin_contrastive_loss(z, batch.y, batch.w, anchors, context["margin"])
            total = total + self.contrast * sums["contrast"]
        if self.calibration:
            with frozen_running_stats(model.head):
                scores = model.head(anchors)
            sums["calibration"] = cross_entropy(scores, labels, torch.ones_like(anchors[:, 0]))
            total = total + self.calibration * sums["calibration"]
        return total, sums

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        message = prototypes.upload_means(client)
        rows = get_tensor(message, "prototypes")
        if len(rows) > 1:
            client.state["gap"] = nearest_distances(rows).mean()
        return message

    # declared -------------------------------------------------------------------------------------------------
    requirements = prototypes.REQUIREMENTS
    staleness_weighting = "uploads"
    exposed = prototypes.EXPOSED
    upload_form = prototypes.UPLOAD_FORM
    unaligned_entries = ("prototypes",)


def draw_anchors(classes: int, features: int, draws: torch.Generator) -> Tensor:
    """Anchors (C, D) from `draws`: relu(norm(W_2 relu(norm(W_1 e_c)))), e_c standard normal (D,).

    W_1, W_2 (D, D) are uniform within 1 / sqrt(D); norm takes each feature to mean 0 and variance 1 over the classes,
    as BatchNorm does in training mode, which leaves biases without effect.

    Source: Zhou et al. (FedSA), AAAI 2025, the projection of class embeddings; its layers from the authors' code.
    """
    hidden_CD = torch.randn(classes, features, generator=draws)
    for _ in range(2):
        weight_DD = torch.empty(features, features).uniform_(-(features**-0.5), features**-0.5, generator=draws)
        hidden_CD = hidden_CD @ weight_DD.T
        variance_D, mean_D = torch.var_mean(hidden_CD, dim=0, correction=0)
        hidden_CD = torch.relu((hidden_CD - mean_D) / (variance_D + _EPSILON).sqrt())
    return hidden_CD


def margin_contrastive_loss(z_ND: Tensor, y_N: Tensor, w_N: Tensor, anchors_CD: Tensor, margin: Tensor) -> Tensor:
    """CE(-(d(n, c) + margin [c = y_n]) over all c, y_n), weighted mean over the rows.

    d(n, c) is the Euclidean distance of row n and anchor c, a constant for the gradient, which is 0 at distance 0.

    Source: FedSA, margin-enhanced contrastive learning.
    """
    distances_NC = torch.linalg.vector_norm(z_ND[:, None] - anchors_CD.detach()[None], dim=2)
    is_own_NC = y_N[:, None] == torch.arange(len(anchors_CD), device=y_N.device)
    return cross_entropy(-(distances_NC + margin * is_own_NC), y_N, w_N)
