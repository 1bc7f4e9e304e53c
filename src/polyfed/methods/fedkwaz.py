"""FedKWAZ: two networks per client, which learn from all clients' class means and then from each other (NeurIPS 2025).

w is the client's own network, m the second one, H are representations and f scores. Z_w[c] and
F_w[c] are the server's means of H_w and f_w for class c.
client k:  1. global_epochs epochs of SGD on L_w + L_m,
              L_w = CE(w) + CE(f_w, softmax(F_m[y])) + MSE(H_w, Z_m[y])
              L_m = CE(m) + CE(f_m, softmax(F_w[y])) + MSE(H_m, Z_w[y])
           2. E epochs of mutual learning
           3. class means of H_w, f_w, H_m, f_m over its samples, in eval mode
server:    plain means over the clients that sent a class
Stage 2 is LocalMutual's. A sample of a class without means counts in the cross entropy alone.
Of the paper (openreview.net/forum?id=G8wWeZVmla), the text and Algorithm 1 were available. Deviations from it or from
its authors' code (ysml666/FedKWAZ): (1) Stage 2 has labels, KL(teacher || student) and means of squares, as in the
code; Algorithm 1 has no labels, KL(student || teacher) and sums. (2) Teachers are constants; the code lets gradients
pass into the teacher on plain images. (3) Class means are computed after training, as in Algorithm 1; in the code
during stage 2. (4) Gradients are not clipped; the code clips them at norm 10. (5) The search tests mixtures on the same
images for all purposes. (6) A class that no client sends keeps its means. (7) One optimizer steps both networks. (8)
Patches are shifted evenly to both sides. (9) Candidates have 4, 16 and 64 patches; for 28 x 28 pixels the paper has 49
instead of 64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor
from polyfed.core.method import Batch, Context, Phase, TrainingResult, hyperparameters
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.core.upload_forms import LABELS, rows_of
from polyfed.functional.class_prototypes import (
    class_means,
    merge,
    prototype_distance,
    soft_cross_entropy,
    to_dense,
    update_rows,
)
from polyfed.functional.losses import cross_entropy
from polyfed.methods.local_mutual import LocalMutual

_MEANS = ("own_features", "own_scores", "auxiliary_features", "auxiliary_scores")  # Z_w, F_w, Z_m, F_m


@hyperparameters
class FedKWAZ(LocalMutual):
    """Class means of two networks per client, which also teach each other on plain and on patch-mixed images."""

    card = replace(
        LocalMutual.card,
        name="fedkwaz",
        paper="NeurIPS 2025 (Knowledge Weak-Aware Zones)",
        down="2 C D + 2 C C + C",
        up="2 S D + 2 S C + S",
        states="client: both networks, mixtures; server: class means of both",
        form={"labels": LABELS, **{name: rows_of("D" if name.endswith("features") else "C") for name in _MEANS}},
        unaligned_entries=("own_features", "auxiliary_features"),
    )

    # epochs of stage 1; not set: training.local_epochs; 0: local-mutual, bit for bit
    global_epochs: Annotated[int, Field(ge=0)] | None = None

    # server ------------------------------------------------------------------------------------------------
    def broadcast(self, server: Server, client_id: int) -> Message:
        return {name: server.state[name] for name in ("labels", *_MEANS) if name in server.state}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if not uploads:
            return
        before = dict(server.state)
        sent = torch.cat([get_tensor(message, "labels") for message in uploads.values()])
        for name in _MEANS:
            rows = torch.cat([get_tensor(message, name) for message in uploads.values()])
            labels, means = merge(rows, sent, torch.ones(len(sent)))
            if name in before:
                labels, means = update_rows(get_tensor(before, name), get_tensor(before, "labels"), means, labels)
            server.state |= {"labels": labels, name: means}

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        super().receive(client, message)
        if "labels" not in message or self.global_epochs == 0:
            return {}
        dtype = next(client.model.parameters()).dtype
        labels = get_tensor(message, "labels")
        found = {name: to_dense(get_tensor(message, name).to(dtype), labels, client.classes) for name in _MEANS}
        context = {name: rows for name, (rows, _) in found.items()}
        context |= {name: context[name].softmax(dim=1) for name in _MEANS if name.endswith("scores")}
        return {**context, "known": found["own_scores"][1]}

    def phases(self, training: Training) -> Sequence[Phase]:
        epochs = training.local_epochs if self.global_epochs is None else self.global_epochs
        first = [Phase(epochs, name="global")] if epochs else []
        return (*first, Phase(training.local_epochs, name="mutual"))

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        if client.phase == "global":
            return {"global stage": True}
        return {"global stage": False, **super().step_inputs(client, step, generator)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        if not context["global stage"]:
            return super().loss(model, batch, context)
        of_own = _taught_by_means(model.own, batch, context, "auxiliary")
        return of_own + _taught_by_means(model.auxiliary_model, batch, context, "own")

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        model: Any = client.model

        def outputs(x: Tensor) -> Tensor:
            parts = []
            for network in (model.own, model.auxiliary_model):
                z = network.represent(x)
                parts += [z, network.head(z)[:, : client.classes]]
            return torch.cat(parts, dim=1)

        rows = inference.map_batches(outputs, model, client.data.train, client.prepare)
        train = client.data.train
        labels, means, _ = class_means(rows, train.y, client.classes, train.at(rows.device).y)
        parts = means.split([model.own.feature_dim, client.classes] * 2, dim=1)
        return {"labels": labels, **{name: part.contiguous() for name, part in zip(_MEANS, parts, strict=True)}}


def _taught_by_means(network: Any, batch: Batch, context: Context, teacher: str) -> Tensor:
    """Stage 1's loss of a network; teacher: "own" or "auxiliary", the network whose means it learns."""
    z = network.represent(batch.x)
    scores = network.head(z)
    task = cross_entropy(scores, batch.y, batch.w)
    if "known" not in context:
        return task
    targets = context[f"{teacher}_scores"]
    taught = soft_cross_entropy(scores[:, : targets.shape[1]], batch.y, batch.w, targets, context["known"])
    return task + taught + prototype_distance(z, batch.y, batch.w, context[f"{teacher}_features"], context["known"])
