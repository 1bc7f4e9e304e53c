"""FedAvg: averaging of weights (McMahan et al., AISTATS 2017, arXiv:1602.05629), also for different architectures.

client k:  w_k <- w;  E epochs of  w_k <- w_k - eta grad CE(f(x; w_k), y)
server:    w   <- sum over responding clients of p_k w_k,   p_k = n_k / sum n_j   ("samples"),
           1 / their number ("uniform")

Sent: down P; up P + 1. Kept: server: w.
Deviations from the paper: (1) Different architectures are averaged layer by layer or within each architecture, as in
FedIN's eq. 19 and 21. The paper has a single architecture. (2) BatchNorm's running statistics are averaged like
weights. Its batch counter (an integer) stays local. (3) The local loss is the mean cross entropy, which the paper
leaves open. p_k is normalized over responding clients.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import torch

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group
from polyfed.core.method import (
    Context,
    Method,
    Requirements,
    TrainingResult,
    follows_device,
    hyperparameters,
    loads_message,
)
from polyfed.core.modules import load_state
from polyfed.core.server import Server
from polyfed.core.settings import Stage
from polyfed.core.upload_forms import SAMPLES, as_sent
from polyfed.errors import ConfigError
from polyfed.methods.building_blocks import weight_averaging

_WEIGHTED = "n w: "


@hyperparameters
class FedAvg(Method):
    """Federated averaging of weights."""

    # averages each tensor over all clients that have it; "same-shape": within each architecture
    aggregation: weight_averaging.Aggregation = "layer-wise"
    weighting: weight_averaging.Weighting = "samples"  # clients count by their samples; "uniform": equally

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        weight_averaging.init(server, self.aggregation)

    def broadcast(self, server: Server, client_id: int) -> Message:
        return weight_averaging.broadcast(server, self.aggregation, client_id)

    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        models = weight_averaging.client_weights(uploads)
        shares = weight_averaging.client_shares(server, uploads, self.weighting)
        weight_averaging.average(server, self.aggregation, models, shares)

    # the same, where the server sees sums alone: of n_k w_k and n_k -----------------------------------------
    def check_addends(self, server: Server) -> None:
        if len(server.architectures) > 1 or self.weighting == "uniform":
            got = f"{len(server.architectures)} architectures and weighting '{self.weighting}'"
            raise ConfigError(
                f"secure_sums: expected clients of one architecture for {self.name}, which count by their samples, got "
                f"{got}"
            )

    def addends(self, client: Client, upload: Message) -> tuple[Group, Message]:
        weights = {name: w if w.dtype == torch.float64 else w.float() for name, w in get_group(upload, "model").items()}
        weighted = {f"{_WEIGHTED}{name}": client.n * w for name, w in weights.items()}
        return {**weighted, "n": torch.tensor(float(client.n), dtype=torch.float64)}, {}

    def aggregate_sum(
        self, server: Server, total: Group, summed: Collection[int], others: Mapping[int, Message]
    ) -> None:
        if not summed:
            return
        first = min(summed)
        shared = weight_averaging.weights_for(server, self.aggregation, server.clients[first].architecture)
        mean = {name.removeprefix(_WEIGHTED): (t / total["n"]) for name, t in total.items() if name != "n"}
        known = all(name in shared and shared[name].shape == w.shape for name, w in mean.items())
        rows = sum(server.clients[i].num_samples for i in summed)
        if not known or total["n"].round() != rows:  # as where masks do not cancel
            server.log["sums_left_out"] = len(summed)
            return
        weight_averaging.average(server, self.aggregation, {first: mean}, {first: 1.0})

    # client ------------------------------------------------------------------------------------------------
    @loads_message
    def receive(self, client: Client, message: Message) -> Context:
        load_state(client.model, get_group(message, "model"))
        return {}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return weight_averaging.upload(client)

    # declared -------------------------------------------------------------------------------------------------
    upload_form = {"model": as_sent, "n": SAMPLES}
    delta_entries = ("model",)
    common_entries = ("model",)
    ignores_initial_weights = True

    @property
    def requirements(self) -> Requirements:
        return weight_averaging.requirements(self.aggregation)

    @property
    def evaluation_stage(self) -> Stage:
        return "received"

    @property
    def staleness_weighting(self) -> Literal["none", "alike", "changes", "uploads"]:
        return "changes" if type(self).aggregate is FedAvg.aggregate else "none"
