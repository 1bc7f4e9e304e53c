"""FD: clients learn each other's mean output for every class (Jeong et al., NeurIPS workshop 2018, arXiv:1811.11479).

f_k(x): scores (logits) of client k, s(f) = softmax(f), z_k[c]: client k's mean output for class c.
Client k:  E local epochs of SGD on CE(f_k(x), y) - lambda sum_c Z_k[y]_c log s(f_k(x))_c;
           z_k[c] = mean of s(f_k(x)) over its n_kc samples of class c, in eval mode, after training.
Server:    Z_k[c] = sum_j n_jc z_j[c] / sum_j n_jc over those j other than k who sent one: leave one out, so that
           N_c Z[c] = (N_c - n_kc) Z_k[c] + n_kc z_k[c], Z[c] the mean over all, N_c = sum_j n_jc.
The paper normalizes outputs by the softmax before they are averaged, so "probabilities" are the default: a mean of them
is a distribution whatever the clients' scales, and no score can run away with it. `outputs = "logits"` averages raw
scores and takes softmax(Z); either way a target is a distribution, never a raw score.
Controls send another target: "own" z_k[c]; "flat" Z_k[c] with all of its entries but the c-th replaced by their mean;
"uniform" 1 / C throughout: label smoothing (Szegedy et al., CVPR 2016) by lambda / (1 + lambda).
Sent: down S C + S; up S C + 2 S. Kept: server: z_k, n_k, clients' classes.
Deviations from the paper: (1) The mean over clients is weighted by samples. The paper counts each device once
(`weighting = "uniform"`). (2) z_k is computed in one pass after training; the paper accumulates it while weights still
change. (3) The paper selects all clients in every round. Here a class that no client sent keeps its last outputs, and
one without other owners has no target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from polyfed.core import inference, upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor, nbytes
from polyfed.core.method import Batch, Context, Method, Requirements, TrainingResult, hyperparameters
from polyfed.core.server import Server
from polyfed.functional.class_prototypes import merge, soft_cross_entropy, to_dense
from polyfed.functional.losses import cross_entropy
from polyfed.methods.building_blocks import prototypes

_TABLE = ("owners", "labels", "outputs", "counts")  # what the server keeps of each row that counts


@hyperparameters
class FD(Method):
    """Federated distillation: clients exchange one mean output per class."""

    distillation_weight: Annotated[float, Field(ge=0)] = 1.0  # lambda, weight of the distillation; 0: Local
    outputs: Literal["probabilities", "logits"] = "probabilities"  # what is averaged; "logits": raw scores
    # clients by samples of the class; "uniform": equally, as in the paper, without sending counts
    weighting: Literal["count", "uniform"] = "count"
    # targets in place of the others' outputs: the client's "own", the others' made "flat", or "uniform"
    control: Literal["none", "own", "flat", "uniform"] = "none"

    # server ------------------------------------------------------------------------------------------------
    def broadcast(self, server: Server, client_id: int) -> Message:
        if "outputs" not in server.state:
            return {}
        owners, labels, outputs, counts = (get_tensor(server.state, name) for name in _TABLE)
        if self.control == "own":
            used = owners == client_id
        else:
            used = prototypes.mask_owned_classes(server, client_id, labels) & (owners != client_id)
        if not used.any():
            return {}
        labels, outputs = merge(outputs[used], labels[used], counts[used])
        if self.control == "flat":
            outputs = _flat(outputs, labels)
        elif self.control == "uniform":
            outputs = torch.full_like(outputs, 1 / outputs.shape[1])
        return {"labels": labels, "outputs": outputs}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sent = prototypes.collect(server, uploads, "outputs")
        if sent is None:
            return
        prototypes.record_owners(server, sent)
        new = dict(zip(_TABLE, sent, strict=True))
        if "outputs" in server.state:  # keep rows of classes that nobody sent anew
            kept = ~torch.isin(get_tensor(server.state, "labels"), sent.labels)
            new = {name: torch.cat([get_tensor(server.state, name)[kept], rows]) for name, rows in new.items()}
        server.state |= new

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        if not self.distillation_weight or "outputs" not in message:
            return {}
        rows = get_tensor(message, "outputs").to(next(client.model.parameters()).dtype)
        rows = torch.softmax(rows, 1) if self.outputs == "logits" else rows / rows.sum(1, True)
        targets, known = to_dense(rows, get_tensor(message, "labels"), client.classes)
        return {"targets": targets, "known": known}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        scores = model(batch.x)
        task = cross_entropy(scores, batch.y, batch.w)
        if "targets" not in context:
            return task
        targets = context["targets"]
        taught = soft_cross_entropy(scores[:, : targets.shape[1]], batch.y, batch.w, targets, context["known"])
        return task + self.distillation_weight * taught, {"distillation": taught}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        model = client.model

        def outputs(x: Tensor) -> Tensor:
            scores: Tensor = model(x)[:, : client.classes]
            return torch.softmax(scores, 1) if self.outputs == "probabilities" else scores

        rows = inference.map_batches(outputs, model, client.data.train, client.prepare)
        return prototypes.class_means_message(client, rows, "outputs", counts=self.weighting == "count")

    # accounting --------------------------------------------------------------------------------------------
    def nbytes_in_paper(self, message: Message) -> int:
        """Bytes of the outputs only, as in FedGH's Table 3."""
        return nbytes({"outputs": message["outputs"]}) if "outputs" in message else 0

    # declared -------------------------------------------------------------------------------------------------
    requirements = Requirements(classes="it averages outputs by class")
    staleness_weighting = "uploads"
    upload_form = {"labels": upload_forms.LABELS, "outputs": upload_forms.rows_of("C"), "counts": upload_forms.COUNTS}

    @property
    def fixed_entries(self) -> Mapping[str, str]:
        no_longer = "probabilities, which noise would leave none; use method.outputs = 'logits'"
        return {"outputs": no_longer} if self.outputs == "probabilities" else {}


def _flat(rows_SC: Tensor, labels_S: Tensor) -> Tensor:
    """Each row with its label's entry as it is, and the mean of all others in their place."""
    classes = rows_SC.shape[1]
    own_SC = F.one_hot(labels_S.long(), classes).bool()
    rest_S1 = rows_SC.masked_fill(own_SC, 0).sum(1, keepdim=True) / (classes - 1)
    return torch.where(own_SC, rows_SC, rest_S1)
