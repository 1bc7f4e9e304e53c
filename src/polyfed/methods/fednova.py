"""FedNova: averaging of normalized updates (Wang et al., NeurIPS 2020, arXiv:2007.07481), also among unlike networks.

client k:  tau_k steps of SGD on  CE(f(x; w), y) + (mu/2) ||w - w^t||^2
server:    d_k = (w^t - w_k) / a_k,   tau_eff = sum_k p_k a_k,   p_k = n_k / sum n_j
           w <- w^t - tau_eff sum_k p_k d_k                                                eq. 6

a_k, effective number of steps (displacement under a constant gradient, in learning rates):
  SGD                 tau_k
  momentum rho        [tau_k - rho (1 - rho^tau_k) / (1 - rho)] / (1 - rho)
  proximal, b = lr mu [1 - (1 - b)^tau_k] / b
  both                m <- rho m + 1 - b a,  a <- a + m,  tau_k times from 0
  Adam, AdamW         tau_k
Sent: down P; up P + 2. Kept: server: w.
Deviations from the paper: (1) With different architectures, p_k and tau_eff are computed per tensor, over the clients
that have it, or within each architecture. (2) a_k of Adam is the number of steps; the paper gives none. (3) Clients
send w_k and a_k, from which the server computes d_k. (4) BatchNorm's running statistics are averaged with p_k, since
they do not follow a gradient. (5) Weight decay is not part of a_k. (6) There is no server momentum, which is in the
authors' code but not in eq. 6. With momentum and a proximal term, the code adds both counts; here a_k is the exact sum
of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_tensor
from polyfed.core.method import (
    Batch,
    Context,
    StepResult,
    TrainingResult,
    follows_device,
    hyperparameters,
    loads_message,
)
from polyfed.core.modules import copy_parameters
from polyfed.core.server import Server
from polyfed.errors import ConfigError
from polyfed.functional.averaging import layer_wise_mean, normalized_mean
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.building_blocks.proximal import add_pull
from polyfed.methods.fedavg import FedAvg


@hyperparameters
class FedNova(FedAvg):
    """Averaging of updates, normalized by each client's effective number of steps."""

    mu: Annotated[float, Field(ge=0)] = 0.0  # weight of a proximal term in the local loss, as in FedProx; 0: off

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        training = server.training
        if training.optimizer == "sgd" and self.mu * training.lr >= 1:
            raise ConfigError(
                f"fednova: expected mu times training.lr below 1, got {self.mu:g} times {training.lr:g}; "
                f"such steps would overshoot what holds them"
            )
        super().init_server(server)

    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        shares = weight_averaging.client_shares(server, uploads, self.weighting)
        models = weight_averaging.client_weights(uploads)
        a = {i: float(get_tensor(message, "a")) for i, message in uploads.items()}
        names = weight_averaging.parameter_names(server)

        def target(base: Group, members: list[int]) -> dict[str, Tensor]:
            p = [shares[i] for i in members]
            w_k = [models[i] for i in members]
            moved = normalized_mean(w_k, p, [a[i] for i in members], base)
            mean = layer_wise_mean(w_k, p, base)  # for buffers, as running statistics follow no gradient
            return {name: moved[name] if name in names else mean[name] for name in base}

        weight_averaging.server_step(server, self.aggregation, models, target)

    # client ------------------------------------------------------------------------------------------------
    @loads_message
    def receive(self, client: Client, message: Message) -> Context:
        super().receive(client, message)
        return {"received": copy_parameters(client.model)} if self.mu else {}

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        plain = super().gradients(model, batch, context)
        return add_pull(plain, model, context["received"], self.mu) if self.mu else plain

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        training = client.training
        a = float(trained.steps)
        if training.optimizer == "sgd":
            a = normalizer(trained.steps, training.momentum, self.mu * client.lr)
        return {**super().upload(client, trained), "a": torch.tensor(a)}

    # declared -------------------------------------------------------------------------------------------------
    ignores_initial_weights = True
    upload_form = {
        "model": upload_forms.as_sent,
        "n": upload_forms.SAMPLES,
        "a": upload_forms.Entry(least=1, most=upload_forms.MOST),
    }


def normalizer(steps: int, momentum: float = 0.0, pull: float = 0.0) -> float:
    """a_k, in gradients: tau steps of size lr go lr a g under a gradient g that stays the same (section 4.1).

    momentum: rho in [0, 1). pull: b = lr mu, from 0 to below 1.
    """
    a = m = 0.0
    for _ in range(steps):
        m = momentum * m + 1 - pull * a
        a += m
    return a
