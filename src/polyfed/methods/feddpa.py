"""FedDPA: weights that matter to a client stay its own, the rest is shared (Yang, Huang and Ye, NeurIPS 2023).

w: what the server sends, w_k: the client's own model, M: 1 where an entry is personal.
Client k:  F = mean_n (d log p(y_n | x_n; w_k) / d w_k)^2, brought to [0, 1] in each tensor;  M = F > threshold;
           w_k <- M w_k + (1 - M) w;
           epochs of SGD on CE + (lambda1 / 2) ||w_k - w||^2, entries with M = 1 alone;
           epochs of SGD on CE + (lambda2 / 2) (||w_k - w|| - C)^2, the others alone;
           u = w_k - w, with `clip` u min(1, C / ||u||), then plus N(0, (C noise)^2 / |S|) on every entry.
Server:    w <- w + sum_k p_k u_k over those who answered, p_k = n_k / sum n_k (or 1 / their number).
Sent per round, P floats of weights and float buffers: 4 P bytes each way; with noise 8 more down, |S|.
Deviations from the paper: (1) where architectures differ, updates are averaged layer-wise or within each architecture.
(2) Sent is w + u, the same to whoever knows w. (3) Personal entries of u are 0 unless `share_personal`; noise is added
to them all the same, so that nobody sees which they are. (4) Norms are squared, over all entries; "tensorwise" is the
authors' code: the sum of the tensors' norms, and its absolute distance to C. (5) F of a constant tensor is 0, and F is
taken in eval mode. (6) A stretch in which nothing may move is left out. (7) BatchNorm's statistics are averaged like
weights, but neither masked, clipped nor noised: with BatchNorm there is no guarantee. (8) `noise` is a multiplier; what
epsilon it is worth over all rounds is for an accountant to say. A client's first w_k is w.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.core import inference, upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Message, group, tensor
from polyfed.core.method import Batch, Context, Method, Needs, Phase, Trained, knobs
from polyfed.core.modules import floats, load
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.functional import drift
from polyfed.functional.fisher import unit_range
from polyfed.functional.losses import cross_entropy
from polyfed.methods.building_blocks import weight_averaging


@knobs
class FedDPA(Method):
    """Averaging of updates to a model of which each client keeps what its data depend on."""

    name: ClassVar[str] = "feddpa"
    paper: ClassVar[str] = "Yang et al., NeurIPS 2023"
    differs: ClassVar[str] = "depth: tensors of one name have one shape (same-shape: anything)"
    down: ClassVar[str] = "P (and 1 with noise)"
    up: ClassVar[str] = "P"
    states: ClassVar[str] = "server: w"
    changes: ClassVar[tuple[str, ...]] = ("model",)
    form: ClassVar[upload_forms.Form | None] = {"model": upload_forms.as_sent}
    starts_blank: ClassVar[bool] = True

    threshold: Annotated[float, Field(ge=-1, le=1)] = 0.4  # F above it is personal; 1: nothing is, below 0: everything
    lambda1: Annotated[float, Field(ge=0)] = 0.1  # pull of personal entries to w; 0 is off
    lambda2: Annotated[float, Field(ge=0)] = 0.05  # pull of the update's norm to the bound; 0 is off
    bound: Annotated[float, Field(gt=0)] = 0.5  # C
    norms: drift.Norms = "squared"  # how the two pulls measure; "tensorwise": the authors' code
    clip: bool = False  # True: updates longer than C are shortened to C
    noise: Annotated[float, Field(ge=0)] = (
        0.0  # sigma over C, for all clients of a round together; needs clip; 0 is off
    )
    share_personal: bool = False  # True: personal entries of the update are sent like all others
    personal_epochs: Annotated[int, Field(ge=1)] | None = None  # of the personal entries; None: training.epochs
    shared_epochs: Annotated[int, Field(ge=1)] | None = None  # of the others, after them; None: training.epochs
    aggregation: weight_averaging.Aggregation = (
        "layer-wise"  # "same-shape": within an architecture; "by-name": also a head
    )
    weighting: weight_averaging.Weighting = "samples"  # "uniform" counts every client once

    @model_validator(mode="after")
    def _noise_is_for_bounded_updates(self) -> FedDPA:
        if self.noise and not self.clip:
            raise ValueError(
                f"noise: expected clip = true beside it, as noise hides bounded updates, came {self.noise:g}"
            )
        return self

    @property
    def needs(self) -> Needs:
        return weight_averaging.needs(self.aggregation)

    # server ------------------------------------------------------------------------------------------------
    def start(self, server: Server) -> None:
        weight_averaging.init(server, self.aggregation)

    def plan(self, server: Server, selected: Sequence[int]) -> None:
        if self.noise:
            server.state["selected"] = torch.tensor(max(1, len(selected)))

    def broadcast(self, server: Server, client_id: int) -> Message:
        message = weight_averaging.broadcast(server, self.aggregation, client_id)
        return {**message, "selected": tensor(server.state, "selected")} if "selected" in server.state else message

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        weights = {i: float(server.clients[i].n) if self.weighting == "samples" else 1.0 for i in uploads}
        weight_averaging.average(server, self.aggregation, weight_averaging.client_weights(uploads), weights)

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        model, train, values = client.model, client.data.train, group(message, "model")
        device = next(model.parameters()).device
        w = {name: t.to(device, copy=True) for name, t in values.items()}
        if client.weights is None:
            load(model, w)
        found = inference.fisher(model, train.x, train.y, client.prepare)
        personal = {name: unit_range(t) > self.threshold for name, t in found.items()}
        own = dict(model.named_parameters())
        kept = {name: torch.where(mask, own[name].detach(), w[name]) for name, mask in personal.items()}
        load(model, {**w, **kept})
        shared = {name: ~mask for name, mask in personal.items()}
        context: dict[str, Any] = {"w": w, "personal": personal, "shared": shared}
        for part in ("personal", "shared"):  # where nothing may move, no rows
            moves = any(bool(mask.any()) for mask in context[part].values())
            context[f"{part} rows"] = torch.arange(client.n if moves else 0)
        return {**context, **({"selected": tensor(message, "selected").clone()} if "selected" in message else {})}

    def phases(self, training: Training) -> Sequence[Phase]:
        mine, ours = (training.epochs if e is None else e for e in (self.personal_epochs, self.shared_epochs))
        own = Phase(mine, rows="personal rows", mask="personal", name="personal")
        return own, Phase(ours, rows="shared rows", mask="shared", name="shared")

    def inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        return {"personal turn": client.phase == "personal"}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        task = cross_entropy(model(batch.x), batch.y, batch.w)
        weights, w = dict(model.named_parameters()), context["w"]
        if context["personal turn"]:
            return task + self.lambda1 / 2 * drift.length(weights, w, self.norms) if self.lambda1 else task
        return task + self.lambda2 / 2 * drift.gap(weights, w, self.bound, self.norms) if self.lambda2 else task

    def upload(self, client: Client, trained: Trained) -> Message:
        model, w, personal = floats(client.model), client.context["w"], client.context["personal"]
        sent = {n: model[n] if self.share_personal else torch.where(m, w[n], model[n]) for n, m in personal.items()}
        if self.clip:
            std = self.bound * self.noise / math.sqrt(float(client.context["selected"])) if self.noise else 0.0
            update = {name: t - w[name] for name, t in sent.items()}
            released = drift.released(update, self.bound, std, client.generator("noise"))
            sent = {name: w[name] + t for name, t in released.items()}
        return {"model": {**model, **sent}}
