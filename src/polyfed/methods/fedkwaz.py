"""FedKWAZ: two networks per client, which learn from all clients' class means and then from each other (NeurIPS 2025).

Client k, own network w_k, second network m_k of one architecture for all clients; H: representations, f: scores.
    Z_w[c], F_w[c], Z_m[c], F_m[c]: the server's mean representations and scores of class c, of w and of m.
    Stage 1, `global_epochs` epochs of SGD on L_w + L_m,
        L_w = CE(w) - sum_c softmax(F_m[y])_c log softmax(f_w)_c + MSE(H_w, Z_m[y]),
        L_m = CE(m) - sum_c softmax(F_w[y])_c log softmax(f_m)_c + MSE(H_m, Z_w[y]): each learns from the other's means.
    Stage 2, E local epochs: w_k and m_k teach each other, on plain and on patch-mixed images
        (LocalMutual).
    Then the class means of both networks, over the client's training samples, in eval mode.
Server:    plain means over those who sent a class; a class that nobody sent keeps its rows.
Scored:    w_k, stage `personal`. m_k stays with the client.
T = 4, the search's candidates, 30 rounds between searches and an epoch for each stage are the paper's (appendix D.3).
Deviations from the paper ("Transforming Gaps into Gains", openreview.net/forum?id=G8wWeZVmla), of which Algorithm 1 and
the text were compared, its other formulas not; where they differ from the authors' code (ysml666/FedKWAZ) we follow the
code: (1) stage 2 has the cross entropy with labels, KL(teacher || student), and means of squares; Algorithm 1 has no
labels there, KL(student || teacher), and sums. Against that code: (2) teachers are constants; there, on plain images,
gradients pass into the teacher, and the distance of representations counts twice. (3) Class means are taken after
training, in eval mode, as in Algorithm 1; there during stage 2, while weights still change. (4) Gradients are not
clipped; there at norm 10. (5) Candidates are tried on the same mixed images for all three purposes, and the first may
win; there each purpose draws its own. (6) A sample of a class without means counts in the cross entropy alone, and a
class that nobody sends in a round keeps its means; there it has none in the next. (7) One optimizer takes the steps of
both networks. (8) Patches are shifted evenly to both sides. (9) The candidates are 4, 16 and
64 patches for all images; for 28 x 28 pixels the paper has 49 in the place of 64.
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
        form={
            "labels": LABELS,
            **{name: rows_of("D" if name.endswith("features") else "C") for name in _MEANS},
        },
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
        like = next(client.model.parameters())
        labels = get_tensor(message, "labels")
        found = {name: to_dense(get_tensor(message, name).to(like), labels, client.classes) for name in _MEANS}
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
        labels, means, _ = class_means(rows, client.data.train.y, client.classes)
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
