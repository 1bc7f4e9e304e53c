"""FedAvg: averaging of weights (McMahan et al., AISTATS 2017, arXiv:1602.05629), also among differing networks.

Client k:  w <- what the server sends;  E local epochs of SGD on CE(f(x; w), y).
Server:    w <- sum_k p_k w_k over those who answered, p_k = n_k / sum n_k (or 1 / their number).
Sent per round, P floats of weights and float buffers: down 4 P bytes; up 4 P + 8 (n_k, int64).
Deviations from the paper: (1) where architectures differ, tensors are averaged layer-wise over the clients that have
them, or within each architecture (FedIN's eq. 19 and 21): the paper has one architecture only. (2) BatchNorm's running
statistics are averaged like weights; its batch counter stays with the client. (3) The loss is that of Local.

What the literature builds on FedAvg (FedProx, SCAFFOLD, MOON, FedNova, InCoAvg, Fed-ET) extends this class, and changes
a hook or two of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from polyfed.core.client import Client
from polyfed.core.message import Message, group
from polyfed.core.method import Context, Method, Requirements, TrainingResult, hyperparameters
from polyfed.core.modules import load
from polyfed.core.server import Server
from polyfed.core.settings import Stage
from polyfed.core.upload_forms import SAMPLES, Form, as_sent
from polyfed.methods.building_blocks import weight_averaging


@hyperparameters
class FedAvg(Method):
    """Averaging of weights."""

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    differs: ClassVar[str] = "depth: tensors of one name have one shape (same-shape: anything)"
    down: ClassVar[str] = "P"
    up: ClassVar[str] = "P + 1"
    states: ClassVar[str] = "server: w"
    delta_entries: ClassVar[tuple[str, ...]] = ("model",)
    form: ClassVar[Form | None] = {"model": as_sent, "n": SAMPLES}
    ignores_initial_weights: ClassVar[bool] = True

    # "same-shape": within each architecture; "by-name": also a head alone
    aggregation: weight_averaging.Aggregation = "layer-wise"
    weighting: weight_averaging.Weighting = "samples"  # "uniform" counts every client once

    @property
    def requirements(self) -> Requirements:
        return weight_averaging.needs(self.aggregation)

    @property
    def evaluation_stage(self) -> Stage:
        return "received"

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        """Seeded initial weights."""
        weight_averaging.init(server, self.aggregation)

    def broadcast(self, server: Server, client_id: int) -> Message:
        """The shared weights of the client's architecture."""
        return weight_averaging.broadcast(server, self.aggregation, client_id)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """The mean of what came."""
        models = weight_averaging.client_weights(uploads)
        shares = weight_averaging.client_shares(uploads, self.weighting)
        weight_averaging.average(server, self.aggregation, models, shares)

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        """The weights are the client's."""
        load(client.model, group(message, "model"))
        return {}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        """Weights and number of samples."""
        return weight_averaging.upload(client)
