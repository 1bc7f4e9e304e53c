"""FedRolex: clients train a window that rolls over one network (Alam et al., NeurIPS 2022, arXiv:2212.01548).

Rates as in HeteroFL: levels a to e keep ceil(r K) of every group of K channels, r = 1, 1/2, 1/4, 1/8, 1/16. In round
j = 0, 1, ... the window of a group starts at channel j mod K and goes around its end (eq. 2), alike for all of a rate.
Client i:  w_i <- w[window];  E epochs on CE of the logits, those of absent classes set to 0;  in training, activations
           divided by r before BatchNorm, which normalises by the batch; gradients clipped.
Server:    every entry of w <- plain mean over the clients that hold it; a class's row over those that have the class.
Sent per round, P floats of weights of the sub-model, S of its BatchNorm's statistics (from the second round on), C
classes: down 4 (P + S), up 4 P + C (which classes, one byte each); where there is BatchNorm, for the statistics of the
new sub-model down 4 P, up 4 S + 8 (and how many batches, int64).
Deviations from the paper: (1) ceil(r K) channels, not floor, so that round 0 is HeteroFL's and none is left without.
(2) The authors' code rolls backwards; this goes forwards, as the paper says. (3) All tensors of a residual stream roll
together. (4) Scaler, masks, clipping and BatchNorm's statistics are HeteroFL's; statistics of a rate are kept channel
by channel, and scores are those of the window that was trained last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from polyfed.core import submodels
from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Exchange, Gradients, Method, Needs, Trained, knobs
from polyfed.core.server import Server
from polyfed.core.settings import Stage
from polyfed.functional.submodels import rolling


@knobs
class FedRolex(Method):
    """Narrower copies of one network, of channels that change from round to round."""

    name: ClassVar[str] = "fedrolex"
    paper: ClassVar[str] = "Alam et al., NeurIPS 2022"
    differs: ClassVar[str] = "the width: slices of one network"
    down: ClassVar[str] = "P(r) + S(r), and P(r) for the statistics"
    up: ClassVar[str] = "P(r) + C bytes, and S(r) + 1 for the statistics"
    states: ClassVar[str] = "server: w, BatchNorm's statistics by rate"

    rates: submodels.Rates = "dynamic_a1-b1-c1-d1-e1"  # levels and shares; "dynamic" redraws every round, "fix" never
    step: Annotated[int, Field(ge=0)] = 1  # channels that the window moves on by in a round; 0 is HeteroFL
    scaler: bool = True  # in training, what enters BatchNorm is divided by the rate
    masked: bool = True  # logits and rows of absent classes play no part
    clip: Annotated[float, Field(ge=0)] = 1.0  # largest norm of a step's gradient; 0 is off
    statistics: submodels.Statistics = (
        "all"  # who reports BatchNorm's; "running": kept in training and averaged instead
    )

    @property
    def needs(self) -> Needs:
        return Needs(one_architecture=True)

    @property
    def scored(self) -> Stage:
        return "received"

    def exchanges(self, round: int) -> Sequence[Exchange]:
        return submodels.exchanges(self.statistics)

    # server ------------------------------------------------------------------------------------------------
    def start(self, server: Server) -> None:
        submodels.start(server)

    def variant(self, server: Server, client_id: int) -> str:
        return submodels.level(server, self.rates, client_id)

    def build(self, model: Any, variant: str) -> nn.Module:
        return submodels.build(model, submodels.rate(variant), self.scaler, self.statistics)

    def _kept(self, server: Server, client_id: int) -> dict[int, Tensor]:
        rate, moved = submodels.rate(self.variant(server, client_id)), self.step * max(server.round - 1, 0)
        return submodels.kept(server, lambda size: rolling(size, rate, moved))

    def broadcast(self, server: Server, client_id: int) -> Message:
        return submodels.send(server, self.variant(server, client_id), self._kept(server, client_id))

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        variants = {i: self.variant(server, i) for i in uploads}
        submodels.average(server, uploads, variants, {i: self._kept(server, i) for i in uploads})

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        return submodels.receive(client, message, self.masked)

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return submodels.loss(model, batch, context)

    def gradients(self, model: Any, batch: Batch, context: Context) -> Gradients:
        return submodels.clip(super().gradients(model, batch, context), self.clip)

    def upload(self, client: Client, trained: Trained) -> Message:
        return submodels.upload(client, self.masked)

    def paper_nbytes(self, message: Message) -> int:
        return submodels.paper_nbytes(message)
