"""FedAvg: averaging of weights (McMahan et al., AISTATS 2017, arXiv:1602.05629), also among differing networks.

Client k:  w <- what the server sends;  E local epochs of SGD on CE(f(x; w), y).
Server:    w <- sum_k p_k w_k over those who answered, p_k = n_k / sum n_k (or 1 / their number).
Sent per round, P floats of weights and float buffers: down 4 P bytes; up 4 P + 8 (n_k, int64).
Deviations from the paper: (1) where architectures differ, tensors are averaged layer-wise over the clients that have
them, or within each architecture (FedIN's eq. 19 and 21): the paper has one architecture only. (2) BatchNorm's running
statistics are averaged like weights; its batch counter stays with the client. (3) The loss is that of Local.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from polyfed.core import shared_model
from polyfed.core.client import Client
from polyfed.core.message import Message, group
from polyfed.core.method import Batch, Context, Method, Needs, Trained, knobs
from polyfed.core.networks import load
from polyfed.core.server import Server
from polyfed.core.settings import Stage
from polyfed.functional.losses import cross_entropy


@knobs
class FedAvg(Method):
    """Averaging of weights."""

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    differs: ClassVar[str] = "depth: tensors of one name have one shape (same-shape: anything)"
    down: ClassVar[str] = "P"
    up: ClassVar[str] = "P + 1"
    states: ClassVar[str] = "server: w"

    aggregation: shared_model.Aggregation = "layer-wise"  # or "same-shape"; alike where all share one architecture
    weighting: shared_model.Weighting = "samples"  # "uniform" counts every client once

    @property
    def needs(self) -> Needs:
        return shared_model.needs(self.aggregation)

    @property
    def scored(self) -> Stage:
        return "received"

    # server ------------------------------------------------------------------------------------------------
    def start(self, server: Server) -> None:
        shared_model.start(server, self.aggregation)

    def broadcast(self, server: Server, client_id: int) -> Message:
        return shared_model.broadcast(server, self.aggregation, client_id)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        shares = shared_model.shares(uploads, self.weighting)
        shared_model.average(server, self.aggregation, shared_model.uploaded(uploads), shares)

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        load(client.model, group(message, "model"))
        return {}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(model(batch.x), batch.y, batch.w)

    def upload(self, client: Client, trained: Trained) -> Message:
        return shared_model.upload(client)
