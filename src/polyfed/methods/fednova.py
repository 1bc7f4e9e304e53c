"""FedNova: averaging of normalized updates (Wang et al., NeurIPS 2020, arXiv:2007.07481), also among unlike networks.

Client k:  w <- w^t, received;  tau_k steps on CE(f(x; w), y) + (mu/2) ||w - w^t||^2.
Server:    w <- w^t - tau_eff sum_k p_k d_k,  d_k = (w^t - w_k) / a_k,  tau_eff = sum_k p_k a_k (eq. 6).
a_k = ||a_k||_1, the length of its steps under a constant gradient: for SGD tau_k; with momentum rho the sum over
s = 1 ... tau_k of (1 - rho^s) / (1 - rho); proximal, b = lr mu, [1 - (1 - b)^tau_k] / b; with both, their recursion.
Deviations from the paper: (1) where architectures differ, p_k and tau_eff are those of the clients that have a tensor,
or within each architecture. (2) Adam has no such a_k; it counts steps, a_k = tau_k. (3) Clients send w_k, of which the
server takes d_k. (4) BatchNorm's statistics are averaged by p_k, as their way is no gradient's. (5) Weight decay is not
part of a_k. (6) The server has no momentum, as it can have in the authors' code (gmf).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_tensor
from polyfed.core.method import TrainingResult, hyperparameters
from polyfed.core.server import Server
from polyfed.errors import ConfigError
from polyfed.functional.averaging import layer_wise_mean, normalized_mean, normalizer
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.fedprox import FedProx


@hyperparameters
class FedNova(FedProx):
    """Averaging of updates, normalized by each client's effective number of steps."""

    card = replace(
        FedProx.card,
        name="fednova",
        paper="Wang et al., NeurIPS 2020",
        up="P + 2",
        states="server: w",
        form={
            "model": upload_forms.as_sent,
            "n": upload_forms.SAMPLES,
            "a": upload_forms.Entry(least=1, most=upload_forms.MOST),
        },
    )

    mu: Annotated[float, Field(ge=0)] = 0.0  # weight of a proximal term in the local loss, as in FedProx; 0: off

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        training = server.training
        if training.optimizer == "sgd" and self.mu * training.lr >= 1:
            raise ConfigError(
                f"fednova: expected mu times training.lr below 1, got {self.mu:g} times {training.lr:g}; "
                f"such steps would overshoot what holds them"
            )
        if training.keep_optimizer_state:
            raise ConfigError(
                "fednova: expected training.keep_optimizer_state = false, as it counts the steps of optimizers that "
                "begin anew in every round"
            )
        super().init_server(server)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        shares = weight_averaging.client_shares(server, uploads, self.weighting)
        models = weight_averaging.client_weights(uploads)
        a = {i: float(get_tensor(message, "a")) for i, message in uploads.items()}
        names = weight_averaging.parameter_names(server)

        def target(base: Group, members: list[int]) -> dict[str, Tensor]:
            p = [shares[i] for i in members]
            w_k = [_those(models[i], names) for i in members]
            buffers = [_others(models[i], names) for i in members]
            moved = normalized_mean(w_k, p, [a[i] for i in members], _those(base, names))
            return {**moved, **layer_wise_mean(buffers, p, _others(base, names))}

        weight_averaging.server_step(server, self.aggregation, models, target)

    # client ------------------------------------------------------------------------------------------------
    def upload(self, client: Client, trained: TrainingResult) -> Message:
        training = client.training
        a = float(trained.steps)
        if training.optimizer == "sgd":
            a = normalizer(trained.steps, training.momentum, self.mu * client.lr)
        return {**super().upload(client, trained), "a": torch.tensor(a)}


def _those(weights: Group, names: frozenset[str]) -> dict[str, Tensor]:
    return {name: t for name, t in weights.items() if name in names}


def _others(weights: Group, names: frozenset[str]) -> dict[str, Tensor]:
    return {name: t for name, t in weights.items() if name not in names}
