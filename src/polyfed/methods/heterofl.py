"""HeteroFL: clients train the first channels of one network (Diao et al., ICLR 2021, arXiv:2010.01264).

Rates r: levels a to e keep the first ceil(r K) of every group of K channels, r = 1, 1/2, 1/4, 1/8, 1/16; all inputs
and classes.
Client i:  w_i <- w[first channels];  E epochs on CE of the logits, those of absent classes set to 0 (section 3);
           in training, activations divided by r before BatchNorm, which normalises by the batch; gradients clipped.
Server:    every entry of w <- plain mean over the clients that hold it (eq. 3 to 6), a class's row over those that have
           the class; what nobody holds stays. Then clients report BatchNorm's statistics of the new sub-models.
Sent per round, P floats of weights of the sub-model, S of its BatchNorm's statistics (from the second round on), C
classes: down 4 (P + S), up 4 P + C (which classes, one byte each); where there is BatchNorm, for the statistics of the
new sub-model down 4 P, up 4 S + 8 (and how many batches, int64).
Deviations from the paper: (1) statistics are taken rate by rate, from the clients that have the rate, and weighted by
batches; the authors take them for the large network, from all data. (2) The scaler stands in front of BatchNorm only:
without it, a narrow network that is scored as it is would be another one than in training. (3) Which classes a client
has is sent with its weights; in the authors' code the server knows.
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
from polyfed.functional.submodels import first


@knobs
class HeteroFL(Method):
    """Narrower copies of one network, averaged where they overlap."""

    name: ClassVar[str] = "heterofl"
    paper: ClassVar[str] = "Diao et al., ICLR 2021"
    differs: ClassVar[str] = "the width: slices of one network"
    down: ClassVar[str] = "P(r) + S(r), and P(r) for the statistics"
    up: ClassVar[str] = "P(r) + C bytes, and S(r) + 1 for the statistics"
    states: ClassVar[str] = "server: w, BatchNorm's statistics by rate"

    rates: submodels.Rates = "dynamic_a1-b1-c1-d1-e1"  # levels and shares; "dynamic" redraws every round, "fix" never
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
        rate = submodels.rate(self.variant(server, client_id))
        return submodels.kept(server, lambda size: first(size, rate))

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
