"""FedProto: clients agree on one prototype per class (Tan et al., AAAI 2022, arXiv:2105.00243).

phi_k and h_k are the client's extractor and head, n_kc is its number of samples of class c.
client k:  E epochs of SGD on CE(h_k(phi_k(x)), y) + lambda mean_d (phi_k(x) - P[y])^2      `loss` (eq. 7, 8, see 2)
           m_k[c] = mean of phi_k(x) over its samples of class c                            `class_means`
                    in eval mode, after training ("after"), or in all batches of training ("during", see 6)
server:    P[c] <- sum_k n_kc m_k[c] / sum_k n_kc  over clients that sent one ("count")     `merge` (eq. 6, see 1)
                   or their plain mean ("uniform")
prediction: argmin_c ||phi_k(x) - P[c]||                                                    `PrototypeMethod.predict`
scored:     the prediction by what was received, before local training
A class that no client sends keeps its prototype. lambda is `prototype_weight`. In the loss's context: "prototypes", P
by class (C, D), and "known" (C,), whether a class has one; in that of a prediction those kept, (S, D), with their
"labels".
`tests/functional/test_class_prototypes.py` holds `class_means`, `merge` and the distance with its gradient, and
`tests/methods/test_fedproto.py` uploads and prototypes of rounds, to NumPy: these need not be read.

Up:     "labels" (S,), "prototypes" (S, D), m_k of them, and with weighting "count" their "counts" (S,), n_kc.
Down:   "labels" (S,) and "prototypes" (S, D), P of the client's own classes; with candidates "all" also "others", the
        "labels" and "prototypes" of all other classes. Received and predicted with in `building_blocks.prototypes`.
Shapes: C classes, S of them the client's, D features.
Sent: down C D + C ("own": S D + S); up S D + 2 S ("uniform": S D + S). Kept: client: last P received; server: P,
clients' classes.
Deviations from the paper: (1) Eq. 6 multiplies by n_kc / N_c and also divides by the number of senders, so that
prototypes would shrink. Here they are the weighted mean, or the plain mean of the authors' code. (2) Each sample is
pulled towards P[y], by the mean of squares, as in the authors' code; equation 8 has the distance of the class means
m_k[c] from P[c]. Samples of a class without a prototype count in the mean as 0. Another public implementation has
lambda = 10. (3) All known prototypes are candidates; the authors' code searches the client's own classes. (4) With
candidates "all" a client receives the prototypes of all classes, where the paper sends those of its own classes; so
does, with "own", a client that has not uploaded yet. (5) The authors' code counts correct predictions of both the head
and the prototypes, so published figures are a score of neither. (6) Algorithm 1 collects prototypes while weights still
change. "during" does so over all E epochs; the authors' code begins anew in each epoch, so that those of the last
remain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor
from polyfed.core.method import Batch, Context, TrainingResult, hyperparameters
from polyfed.core.server import Server
from polyfed.functional.class_prototypes import batch_class_sums, merge, prototype_distance
from polyfed.functional.losses import cross_entropy
from polyfed.methods.building_blocks import prototypes


@hyperparameters
class FedProto(prototypes.PrototypeMethod):
    """Averaged class means of representations, which regularize local training."""

    weighting: Literal["count", "uniform"] = "count"  # clients count by their samples of the class; "uniform": equally
    # class means of a pass after training, in eval mode; "during": of the training's own batches, without a pass
    collected: Literal["after", "during"] = "after"

    # client ------------------------------------------------------------------------------------------------
    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        z = model.represent(batch.x)
        scores = model.head(z)
        loss = cross_entropy(scores, batch.y, batch.w)
        sums = {}
        if "prototypes" in context:
            sums["distance"] = prototype_distance(z, batch.y, batch.w, context["prototypes"], context["known"])
            loss = loss + self.prototype_weight * sums["distance"]
        if self.collected == "during":
            sums["class_sums"], sums["class_weights"] = batch_class_sums(z.detach(), batch.y, batch.w, scores.shape[1])
        return loss, sums

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        counted = self.weighting == "count"
        if self.collected == "after":
            return prototypes.upload_means(client, counted)
        weights_C = trained.sums["class_weights"]
        seen_C = weights_C > 0
        labels_S = seen_C.nonzero()[:, 0].cpu()
        means_SD = trained.sums["class_sums"][seen_C] / weights_C[seen_C, None]
        counts = torch.bincount(client.data.train.y, minlength=len(weights_C))[labels_S]
        sent: Message = {"labels": labels_S.int(), "prototypes": means_SD}
        return {**sent, "counts": counts.int()} if counted else sent

    # server ------------------------------------------------------------------------------------------------
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sent = prototypes.collect(server, uploads, "prototypes")
        if sent is None:
            return
        prototypes.record_owners(server, sent)
        labels, rows = merge(sent.rows, sent.labels, sent.counts)  # counts are ones where clients count alike
        prototypes.store(server, labels, rows)

    def broadcast(self, server: Server, client_id: int) -> Message:
        if "prototypes" not in server.state:
            return {}
        return prototypes.own_and_others(server, client_id, get_tensor(server.state, "prototypes"), self.candidates)

    # declared -------------------------------------------------------------------------------------------------
    staleness_weighting = "uploads"
    upload_form = prototypes.UPLOAD_FORM
