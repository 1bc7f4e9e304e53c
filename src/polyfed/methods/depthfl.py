"""DepthFL: clients train the first blocks of one network, whose classifiers teach each other (Kim et al., ICLR 2023).

Depths d_1 = 1 > ... > d_L: the network up to the classifier behind its first ceil(d_l B) blocks of B, and the
classifiers on the way, m in all; the one behind all blocks is the head. Client k has the (k mod L + 1)-th depth.
Client k:  w_k <- w[depth];  E epochs of SGD on
           sum_i CE(o_i, y) + c(t) / (m - 1) sum_i sum_{j != i} KL(softmax o_j || softmax o_i),  o_j a constant;
           c(t) = `distillation` exp(-5 (1 - min(t, R) / R)^2),  t = 0, 1, ... the round, R = `ramp_up`.
Server:    every tensor of w <- mean over the clients that hold it;  what nobody holds stays bit for bit.
Predicted is by the mean of the logits of all m classifiers.
Sent: down P(d); up P(d). Kept: server: w with its classifiers.
Deviations from the paper: (1) Clients take plain SGD steps, the paper's "DepthFL (FedAvg)". Its main rows add FedDyn's
dynamic regularization. (2) Classifiers are one linear layer on the means over pixels; the authors' have convolutions
before it. (3) Each client's network is evaluated on its own test rows; the paper evaluates the whole network on one
test set. (4) BatchNorm's running statistics are averaged over the clients that hold the layer, as in the authors' code.
(5) c(t) and R are those of the authors' code; not verified against the paper's text. (6) Depths are fractions of the
number of blocks, which are found in the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message, get_group
from polyfed.core.method import (
    Batch,
    Context,
    Method,
    Requirements,
    TrainingResult,
    follows_device,
    hyperparameters,
    loads_message,
)
from polyfed.core.modules import float_state, load_state
from polyfed.core.server import Server
from polyfed.core.settings import Shares, in_turn, numbers_in
from polyfed.core.upload_forms import as_sent
from polyfed.functional.averaging import layer_wise_mean
from polyfed.functional.losses import cross_entropy, kl_divergence
from polyfed.methods.building_blocks.early_exits import add_early_exits

_ENOUGH = 0.5  # share of the distillation's weight in the last round below which a remark says so


@hyperparameters
class DepthFL(Method):
    """Shallower sub-models of one network, whose classifiers learn from each other."""

    depths: Shares = "1 0.75 0.5 0.25"  # shares of the network's blocks, from 1 down, assigned to clients in turn
    distillation: Annotated[float, Field(ge=0)] = 1.0  # full weight of the mutual distillation; 0: off
    ramp_up: Annotated[int, Field(ge=0)] = 300  # R, rounds until this weight is full; 0: from the start

    # the client's network ------------------------------------------------------------------------------------
    def variant(self, server: Server, client_id: int) -> str:
        return in_turn(self.depths, client_id)

    def build(self, model: Any, variant: str) -> nn.Module:
        return add_early_exits(model, numbers_in(self.depths)).truncated(float(variant or 1))

    def personal_model(self, module: Any) -> nn.Module:
        scored: nn.Module = module.ensemble()
        return scored

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        (architecture,) = server.architectures
        initial = server.initial_state(architecture)
        server.state["model"] = {name: initial[name] for name in float_state(server.model(architecture, {}))}

    def start_round(self, server: Server, selected: Sequence[int]) -> None:
        if self.distillation:
            server.log["distillation_in_last_round"] = _ramp_up(server.rounds - 1, self.ramp_up)

    def broadcast(self, server: Server, client_id: int) -> Message:
        (architecture,) = server.architectures
        held = float_state(server.model(architecture, {}, self.variant(server, client_id)))
        return {"model": {name: t for name, t in get_group(server.state, "model").items() if name in held}}

    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if uploads:
            models = [get_group(message, "model") for message in uploads.values()]
            weights = [server.share(i, "uniform") for i in uploads]
            server.state["model"] = layer_wise_mean(models, weights, get_group(server.state, "model"))

    # client ------------------------------------------------------------------------------------------------
    @loads_message
    def receive(self, client: Client, message: Message) -> Context:
        load_state(client.model, get_group(message, "model"))
        weight = self.distillation * _ramp_up(client.round - 1, self.ramp_up)
        return {"weight": torch.tensor(weight, device=next(client.model.parameters()).device)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return mutual_exits_loss(model(batch.x), batch.y, batch.w, context["weight"] if self.distillation else 0.0)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return {"model": float_state(client.model)}

    def remark(self, record: Mapping[str, Any]) -> str:
        reached = record["server"].get("distillation_in_last_round", 1.0)
        if reached >= _ENOUGH:
            return ""
        return (
            f"the classifiers' learning from each other reaches {reached:.1%} of its weight in the last round; "
            f"set method.ramp_up = {self.ramp_up} to some part of training.rounds"
        )

    # declared -------------------------------------------------------------------------------------------------
    requirements = Requirements(
        same_architecture=True, classes="its exits teach each other by probabilities of classes"
    )
    evaluation_stage = "received"
    upload_form = {"model": as_sent}
    delta_entries = ("model",)
    ignores_initial_weights = True


def _ramp_up(passed: int, rounds: int) -> float:
    """How much of the distillation counts after so many rounds: from exp(-5) to 1."""
    return math.exp(-5 * (1 - min(passed, rounds) / rounds) ** 2) if rounds else 1.0


def mutual_exits_loss(exits_NC: Sequence[Tensor], y_N: Tensor, w_N: Tensor, weight: Tensor | float) -> Tensor:
    """sum_i CE(o_i, y) + weight / (m - 1) sum_i sum_{j != i} KL(softmax o_j || softmax o_i) over the exits i = 1..m.

    o_j is a constant in KL; the number 0 as weight leaves the distillation out.
    """
    total = torch.stack([cross_entropy(logits_NC, y_N, w_N) for logits_NC in exits_NC]).sum()
    if len(exits_NC) == 1 or (isinstance(weight, float) and not weight):
        return total
    pairs = [
        kl_divergence(logits_NC, teacher_NC, w_N)
        for i, logits_NC in enumerate(exits_NC)
        for j, teacher_NC in enumerate(exits_NC)
        if i != j
    ]
    return total + weight / (len(exits_NC) - 1) * torch.stack(pairs).sum()
