"""FedSAF: clients agree on how the classes lie to one another, not on where they lie (Wu et al., 2026).

w_k = (phi_k, h_k): h_k is the network's head, phi_k all before it; P[c] the server's prototype of class c; M[c] the
mean of phi_k(x) over the samples of class c in a batch.
Client k:  E local epochs of SGD on CE(h_k(phi_k(x)), y) + lambda gap(M, P), over the classes of the batch that have a
           prototype (`functional.class_prototypes.structure_loss`);
           C_k[c] = mean of phi_k(x) over its samples of class c, in eval mode, after training.
Server:    P[c] <- mean over k of C_k[c], over those who sent one; a class that nobody sent keeps its P[c].
Scored: the client's own head, stage `personal`.

A batch with fewer than two common classes counts in the cross entropy alone.

arXiv:2605.05959. Only the abstract and summaries were at hand, which name two losses, GCSA and RCSA, without formulas,
and the plain mean of prototypes; no code was found.
Deviations from the paper: none is known, but these plainest readings are not verified against it: (1) that
distances are compared, and their scale; (2) that the structure is taken among means of a batch;
(3) lambda; (4) that every client's mean counts once; (5) that round 1, which has no prototypes, is Local.
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
        rows = get_tensor(message, "prototypes").to(next(client.model.parameters()))
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
