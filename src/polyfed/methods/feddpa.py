"""FedDPA: weights that matter to a client stay its own, the rest is shared (Yang, Huang and Ye, NeurIPS 2023).

w: what the server sends, w_k: the client's own model, M: 1 where an entry is personal.
Client k:  F = mean_n (d log p(y_n | x_n; w_k) / d w_k)^2, brought to [0, 1] in each tensor;  M = F > threshold;
           w_k <- M w_k + (1 - M) w;
           epochs of SGD on CE + (lambda1 / 2) ||w_k - w||^2, entries with M = 1 alone;
           epochs of SGD on CE + (lambda2 / 2) (||w_k - w|| - C)^2, the others alone;
           u = w_k - w, without the personal entries.
Server:    w <- w + sum_k p_k u_k over those who answered, p_k = n_k / sum n_k (or 1 / their number).
Sent: down P; up P. Kept: server: w.
Deviations from the paper: (1) Different architectures are averaged layer by layer or within each architecture; the
paper has one. (2) w + u is sent instead of u. The server knows w, so both reveal the same. (3) Clipping and noise are
those of `[privacy]`. Personal entries of u are 0, as in the paper; the authors' code clips, noises and sends them. (4)
Norms are squared and taken over all entries. The authors' code adds up the tensors' norms and takes the absolute
distance of the sum to C. (5) F of a constant tensor is 0, not 0 / 0. F is computed in eval mode, since BatchNorm in
training mode mixes samples. (6) BatchNorm's running statistics are averaged like weights, without a mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference, upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Message, get_group
from polyfed.core.method import (
    Batch,
    Context,
    Phase,
    Requirements,
    StepResult,
    TrainingResult,
    follows_device,
    hyperparameters,
)
from polyfed.core.modules import float_state, load_state
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.building_blocks.proximal import add_pull, add_pull_to_length
from polyfed.methods.fedavg import FedAvg


@hyperparameters
class FedDPA(FedAvg):
    """Averaging with personal weights, selected by their Fisher information."""

    threshold: Annotated[float, Field(ge=-1, le=1)] = 0.4  # entries with a larger F are personal; 1: none; below 0: all
    lambda1: Annotated[float, Field(ge=0)] = 0.1  # weight of the pull of personal entries to w; 0: off
    lambda2: Annotated[float, Field(ge=0)] = 0.05  # weight of the pull of the update's norm to C; 0: off
    max_update_norm: Annotated[float, Field(gt=0)] = 0.5  # C, the norm that lambda2 pulls the update to

    # server ------------------------------------------------------------------------------------------------
    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        weights = {i: server.share(i, self.weighting) for i in uploads}
        weight_averaging.average(server, self.aggregation, weight_averaging.client_weights(uploads), weights)

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        model = client.model
        device = next(model.parameters()).device
        w = {name: t.to(device, copy=True) for name, t in get_group(message, "model").items()}
        if client.weights is None:
            load_state(model, w)
        fisher = inference.fisher_information(model, client.data.train, client.prepare)
        personal = {name: min_max_normalize(t) > self.threshold for name, t in fisher.items()}
        own = dict(model.named_parameters())
        kept = {name: torch.where(mask, own[name].detach(), w[name]) for name, mask in personal.items()}
        load_state(model, {**w, **kept})
        shared = {name: ~mask for name, mask in personal.items()}
        context: dict[str, Any] = {"w": w, "personal": personal, "shared": shared}
        moves = torch.stack([_any_entry(personal), _any_entry(shared)]).tolist()  # asked for together
        context["personal rows"] = torch.arange(client.n if moves[0] else 0)  # where nothing may move, no rows
        context["shared rows"] = torch.arange(client.n if moves[1] else 0)
        return context

    def phases(self, training: Training) -> Sequence[Phase]:
        personal = Phase(training.local_epochs, rows="personal rows", mask="personal", name="personal")
        shared = Phase(training.local_epochs, rows="shared rows", mask="shared", name="shared")
        return personal, shared

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        return {"personal turn": client.phase == "personal"}

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        plain = super().gradients(model, batch, context)
        if context["personal turn"] and self.lambda1:
            return add_pull(plain, model, context["w"], self.lambda1)
        if not context["personal turn"] and self.lambda2:
            return add_pull_to_length(plain, model, context["w"], self.lambda2, self.max_update_norm)
        return plain

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        model = float_state(client.model)
        w = client.context["w"]
        sent = {name: torch.where(mask, w[name], model[name]) for name, mask in client.context["personal"].items()}
        return {"model": {**model, **sent}}

    # declared -------------------------------------------------------------------------------------------------
    evaluation_stage = "personal"
    upload_form = {"model": upload_forms.as_sent}
    ignores_initial_weights = True

    @property
    def requirements(self) -> Requirements:
        reason = "its Fisher information is of probabilities of classes"
        return dataclasses.replace(super().requirements, classes=reason)


def _any_entry(masks: Mapping[str, Tensor]) -> Tensor:
    """Whether any entry of any mask is True, 0-d; not where there are none, as nothing of the network trains."""
    return torch.stack([mask.any() for mask in masks.values()] or [torch.tensor(False)]).any()


def min_max_normalize(tensor: Tensor) -> Tensor:
    """(t - min t) / (max t - min t), in [0, 1]; a constant tensor, for which that is 0 / 0, becomes 0."""
    if not tensor.numel():
        return tensor.clone()
    low, high = tensor.aminmax()
    return (tensor - low) / torch.where(high > low, high - low, torch.ones_like(high))
