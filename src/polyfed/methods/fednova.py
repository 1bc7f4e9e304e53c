"""FedNova: averaging of normalised updates (Wang et al., NeurIPS 2020, arXiv:2007.07481), also among unlike networks.

Client k:  w <- w^t, received;  tau_k steps on CE(f(x; w), y) + (mu/2) ||w - w^t||^2.
Server:    w <- w^t - tau_eff sum_k p_k d_k,  d_k = (w^t - w_k) / a_k,  tau_eff = sum_k p_k a_k (eq. 6).
a_k = ||a_k||_1, the length of its steps under a constant gradient: for SGD tau_k; with momentum rho the sum over
s = 1 ... tau_k of (1 - rho^s) / (1 - rho); proximal, b = lr mu, [1 - (1 - b)^tau_k] / b; with both, their recursion.
Sent per round, P floats of weights and buffers: down 4 P bytes; up 4 P + 8 (n_k, int64) + 4 (a_k), and 4 (tau_k) with
`effective = "steps"`: tau_eff = sum_k p_k tau_k.
Deviations from the paper: (1) where architectures differ, p_k and tau_eff are those of the clients that have a tensor,
or within each architecture. (2) Adam has no such a_k; it counts steps, a_k = tau_k. (3) Clients send w_k, of which the
server takes d_k. (4) BatchNorm's statistics are averaged by p_k, as their way is no gradient's. (5) Weight decay is not
part of a_k. From the authors' code: server momentum (gmf).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, group, tensor
from polyfed.core.method import Batch, Context, Trained, knobs
from polyfed.core.modules import load
from polyfed.core.server import Server
from polyfed.errors import RequestError
from polyfed.functional.averaging import layer_wise_mean, normalised_mean
from polyfed.functional.effective_steps import normaliser
from polyfed.functional.losses import cross_entropy
from polyfed.methods.building_blocks import proximal_term, weight_averaging


@knobs
class FedNova(weight_averaging.Averaging):
    """Averaging of updates, each divided by the length of its client's steps."""

    name: ClassVar[str] = "fednova"
    paper: ClassVar[str] = "Wang et al., NeurIPS 2020"
    up: ClassVar[str] = "P + 2"
    states: ClassVar[str] = "server: w, with server_momentum m"
    form: ClassVar[upload_forms.Form | None] = {
        "model": upload_forms.as_sent,
        "n": upload_forms.SAMPLES,
        "a": upload_forms.NUMBER,
        "tau": upload_forms.NUMBER,
    }
    starts_blank: ClassVar[bool] = True

    effective: Literal["normalisers", "steps"] = "normalisers"  # what tau_eff averages: a_k, or tau_k
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the server's step; 0 is off
    mu: Annotated[float, Field(ge=0)] = 0.0  # weight of the proximal term of local solvers; 0 is off

    # server ------------------------------------------------------------------------------------------------
    def start(self, server: Server) -> None:
        training = server.training
        if training.optimizer == "sgd" and self.mu * training.lr >= 1:
            raise RequestError(
                f"fednova: expected mu times training.lr below 1, came {self.mu:g} times {training.lr:g}; "
                f"such steps would overshoot what holds them"
            )
        super().start(server)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        shares, models = weight_averaging.shares(uploads, self.weighting), weight_averaging.uploaded(uploads)
        a = {i: float(tensor(message, "a")) for i, message in uploads.items()}
        tau = {i: float(tensor(message, "tau")) if "tau" in message else a[i] for i, message in uploads.items()}
        names = weight_averaging.parameters(server)

        def target(base: Group, members: list[int]) -> dict[str, Tensor]:
            p, (w, statistics) = [shares[i] for i in members], _cut(base, names)
            ends, others = zip(*(_cut(models[i], names) for i in members), strict=True)
            moved = normalised_mean(ends, p, [a[i] for i in members], w, [tau[i] for i in members])
            return {**moved, **layer_wise_mean(others, p, statistics)}

        weight_averaging.advance(server, self.aggregation, models, target, momentum=self.server_momentum)

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        load(client.model, group(message, "model"))
        return proximal_term.reference(client.model, self.mu)

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return proximal_term.added(cross_entropy(model(batch.x), batch.y, batch.w), model, context, self.mu)

    def upload(self, client: Client, trained: Trained) -> Message:
        training, a = client.training, float(trained.steps)
        if training.optimizer == "sgd":
            a = normaliser(trained.steps, training.momentum, self.mu * client.lr)
        sent = {**super().upload(client, trained), "a": torch.tensor(a)}
        return {**sent, "tau": torch.tensor(float(trained.steps))} if self.effective == "steps" else sent


def _cut(weights: Group, names: frozenset[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters, and what else there is."""
    inside = {name: t for name, t in weights.items() if name in names}
    return inside, {name: t for name, t in weights.items() if name not in names}
