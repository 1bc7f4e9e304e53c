"""SCAFFOLD: control variates against client drift (Karimireddy et al., ICML 2020, arXiv:1910.06378).

client k:  tau_k steps  w <- opt(g(w) - c_k + c),   g the gradient of CE(f(x; w), y)
           c_k+ = mean of the g of its steps                              "mean"
                  c_k - c + (w^t - w_k) / (tau_k lr)                      "II"
server:    w <- w^t + server_lr mean_k (w_k - w^t)         over responding clients
           c <- c + (1/N) sum_k (c_k+ - c_k)               N: all clients
N counts all clients present; c and c_k start at zero; who is not drawn keeps c_k.
Sent: down 2 P + 1; up 2 P + 1. Kept: client: c_k, previous c_k; server: w, c.
Deviations from the paper: (1) With different architectures, all means are per tensor or within each architecture; the
paper has one. (2) `"mean"` is the default; the paper's options are for plain SGD. (3) Clients send w_k; the server
computes the difference to w^t. (4) The server keeps the sum of all c_k and divides it by the number of present clients,
so that c stays their mean when clients join later. (5) BatchNorm's statistics have no variates and are averaged without
`server_lr`. (6) The paper's option I, the gradient of all samples at w^t, is left out. (7) The paper does not cover
lost uploads. Here a client restores its earlier c_k if the server has not counted its last round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group, get_tensor
from polyfed.core.method import Batch, Context, StepResult, TrainingResult, follows_device, hyperparameters
from polyfed.core.modules import float_state
from polyfed.core.server import Server
from polyfed.errors import ConfigError
from polyfed.functional.device_copies import move_group
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.fedavg import FedAvg

_SUM = "control"  # in the server's state: the sum of all c_k


@hyperparameters
class SCAFFOLD(FedAvg):
    """Averaging of weights, with control variates against client drift."""

    variates: Literal["mean", "II"] = "mean"  # new c_k: mean gradient of the steps, or the paper's option "II"
    server_lr: Annotated[float, Field(gt=0)] = 1.0  # step size of the server; 1: plain mean
    weighting: weight_averaging.Weighting = "uniform"  # clients count equally in w; "samples": by their samples

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        if self.variates == "II" and not server.training.lr:
            raise ConfigError("scaffold: variates 'II' divide by training.lr, got 0; take variates 'mean'")
        super().init_server(server)
        weight_averaging.init_zeros(server, self.aggregation, _SUM)

    def broadcast(self, server: Server, client_id: int) -> Message:
        architecture = server.clients[client_id].architecture
        total = weight_averaging.weights_for(server, self.aggregation, architecture, _SUM)
        counts = weight_averaging.holder_counts(server, self.aggregation, architecture)
        control = {name: c / counts[name] for name, c in total.items()}
        heard = server.state.get(f"heard {client_id}", torch.tensor(0))
        return {**super().broadcast(server, client_id), "control": control, "heard": heard}

    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        models = weight_averaging.client_weights(uploads)
        shares = weight_averaging.client_shares(server, uploads, self.weighting)
        weight_averaging.average(server, self.aggregation, models, shares, self.server_lr)
        changes = {i: get_group(message, "control") for i, message in uploads.items()}
        weight_averaging.accumulate(server, self.aggregation, _SUM, changes)
        server.state |= {f"heard {i}": torch.tensor(server.round) for i in uploads}

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        super().receive(client, message)
        received = {name: w.clone() for name, w in float_state(client.model, buffers=False).items()}
        device = next(client.model.parameters()).device
        c = move_group(get_group(message, "control"), device)
        own = move_group(_own_control(client, message), device)
        correction = {name: c[name] - own[name] for name in received}
        return {"received": received, "correction": correction, "own": own}

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        plain = super().gradients(model, batch, context)
        correction: Mapping[str, Tensor] = context["correction"]
        grads = {name: correction[name] if g is None else g + correction[name] for name, g in plain.grads.items()}
        raw = {name: g for name, g in plain.grads.items() if g is not None} if self.variates == "mean" else {}
        return StepResult(grads, plain.loss, plain.sums, raw)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        own: Group = client.context["own"]
        new = self._new_control(client, trained)
        client.state |= {"before": dict(own), "control": new, "sent in": torch.tensor(client.round)}
        return {**super().upload(client, trained), "control": {name: new[name] - own[name] for name in new}}

    def _new_control(self, client: Client, trained: TrainingResult) -> dict[str, Tensor]:
        """The new control variate c_k+, on the network's device."""
        received = client.context["received"]
        correction = client.context["correction"]
        if self.variates == "II":
            now = float_state(client.model, buffers=False)
            way = trained.steps * client.lr
            return {name: (w - now[name]) / way - correction[name] for name, w in received.items()}
        found = {name: total / trained.steps for name, total in trained.raw.items()}
        return {name: found[name] if name in found else torch.zeros_like(w) for name, w in received.items()}

    # declared -------------------------------------------------------------------------------------------------
    upload_form = {"model": upload_forms.as_sent, "n": upload_forms.SAMPLES, "control": upload_forms.as_sent}
    ignores_initial_weights = True

    fixed_entries = {"control": "changes of control variates, whose sum the server must keep exactly"}


def _own_control(client: Client, message: Message) -> Group:
    """c_k as the server has it: the previous one, if the client's last upload was lost."""
    state = client.state
    was_heard = "sent in" in state and torch.equal(get_tensor(state, "sent in"), get_tensor(message, "heard"))
    name = "control" if was_heard else "before"
    if name in state:
        return get_group(state, name)
    return {name: torch.zeros_like(w) for name, w in float_state(client.model, buffers=False).items()}
