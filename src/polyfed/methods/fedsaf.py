"""FedSAF: clients agree on how the classes lie to one another, not on where they lie (Wu et al., 2026).

phi_k and h_k are the client's extractor and head. M[c] is the mean of the representations of
class c in a batch, and d(a, b) the Euclidean distance divided by the root of D.
client k:  E epochs of SGD on CE(h_k(phi_k(x)), y) + lambda gap(M, P)
           gap = mean over a != b of (d(M[a], M[b]) - d(P[a], P[b]))^2,
                 over the classes of the batch that have a prototype
           C_k[c] = mean of phi_k(x) over its samples of class c, in eval mode, after training
server:    P[c] <- mean over k of C_k[c], over those who sent one
This is a reading: from the abstract and summaries; neither formulas nor code were found.
The abstract and summaries name two losses, GCSA and RCSA, without formulas, and the plain mean of prototypes. These
choices are not verified: Deviations from the paper (arXiv:2605.05959): (1) Distances are compared, by this scale. (2)
The structure is that among the means of a batch. (3) `structure_weight` is 1. (4) All clients' means have equal
weights. (5) Round 1, which has no prototypes, equals Local.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor
from polyfed.core.method import Batch, Context, hyperparameters
from polyfed.core.server import Server
from polyfed.functional.class_prototypes import batch_class_means, merge, structure_loss, to_dense
from polyfed.functional.losses import cross_entropy
from polyfed.methods.building_blocks import prototypes


@hyperparameters
class FedSAF(prototypes.PrototypeUploads):
    """Averaged class means, whose structure regularizes local training."""

    card = replace(
        prototypes.PrototypeUploads.card, name="fedsaf", paper="Wu et al., 2026", reading=True, states="server: P"
    )

    structure_weight: Annotated[float, Field(ge=0)] = 1.0  # weight of the gap; 0: Local, bit for bit

    staleness_weighting = "uploads"

    # server ------------------------------------------------------------------------------------------------
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sent = prototypes.collect(server, uploads, "prototypes")
        if sent is None:
            return
        labels, rows = merge(sent.rows, sent.labels, sent.counts)
        prototypes.keep_latest(server, labels, rows)

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        if not self.structure_weight or "prototypes" not in message:
            return {}
        rows = get_tensor(message, "prototypes").to(next(client.model.parameters()).dtype)
        prototypes_CD, known_C = to_dense(rows, get_tensor(message, "labels"), client.classes)
        return {"prototypes": prototypes_CD, "known": known_C}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        z = model.represent(batch.x)
        task = cross_entropy(model.head(z), batch.y, batch.w)
        if "prototypes" not in context:
            return task
        means_CD, present_C = batch_class_means(z, batch.y, batch.w, len(context["known"]))
        common_C = present_C & context["known"]
        gap = structure_loss(means_CD, context["prototypes"], common_C)
        return task + self.structure_weight * gap, {"structure": gap}

    def remark(self, record: Mapping[str, Any]) -> str:
        if record["sums"].get("structure") != 0:
            return ""
        return "no batch held two classes that have a prototype, so that clients train as in local"
