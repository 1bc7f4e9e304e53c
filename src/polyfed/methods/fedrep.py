"""FedRep: one representation for all, a head of one's own (Collins, Hassani, Mokhtari and Shakkottai, ICML 2021).

client k:  phi_k <- phi
           head_epochs epochs of       h_k   <- h_k   - eta grad CE(h_k(phi_k(x)), y)
           extractor_epochs epochs of  phi_k <- phi_k - eta grad CE(h_k(phi_k(x)), y)
server:    phi <- sum over responding clients of p_k phi_k
           p_k = 1 / their number ("uniform"),  n_k / sum n_j ("samples")
Heads with the same layers start alike, by the seed, and are never sent.
Sent: down P - P_h; up P - P_h. Kept: client: h_k; server: phi.
Deviations from the paper: (1) Different architectures' extractors are averaged layer by layer or within each
architecture; the paper has one. (2) The fixed part is in eval mode. BatchNorm's statistics of phi are averaged like
weights. (3) All clients can fit their head once more after the last round (`final_head_epochs`), as in the authors'
code. (4) Clients have equal weights; the authors' code weights them by samples (`weighting = "samples"`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field, model_validator

from polyfed.core import upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Exchange, Phase, Requirements, TrainingResult, follows_device, hyperparameters
from polyfed.core.modules import BODY, HEAD, float_state
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.methods.building_blocks import weight_averaging
from polyfed.methods.fedavg import FedAvg


@hyperparameters
class FedRep(FedAvg):
    """A shared extractor and personal heads, trained alternately."""

    weighting: weight_averaging.Weighting = "uniform"  # clients count equally; "samples": by their samples
    # epochs of the head per round, before the extractor; 0: it is never trained
    head_epochs: Annotated[int, Field(ge=0)] = 10
    # epochs of the extractor per round; not set: training.local_epochs; 0: only heads are trained
    extractor_epochs: Annotated[int, Field(ge=0)] | None = None
    final_head_epochs: Annotated[int, Field(ge=0)] = 0  # epochs of all clients' heads after the last round; 0: none

    @model_validator(mode="after")
    def _trains_something(self) -> FedRep:
        if not self.head_epochs and self.extractor_epochs == 0:
            raise ValueError("expected head_epochs or extractor_epochs above 0, got 0 for both: nothing would train")
        return self

    def final_exchanges(self) -> Sequence[Exchange]:
        head = Phase(self.final_head_epochs, HEAD, name="head", follows_schedule=False)
        fit = Exchange("head", who="all", phases=(head,))
        return (fit,) if self.final_head_epochs else ()

    # server ------------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        weight_averaging.init(server, self.aggregation, parts=BODY)

    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if server.exchange == "train":  # in the final round nothing comes up
            super().aggregate(server, uploads)

    # client ------------------------------------------------------------------------------------------------
    def phases(self, training: Training) -> Sequence[Phase]:
        epochs = training.local_epochs if self.extractor_epochs is None else self.extractor_epochs
        return Phase(self.head_epochs, HEAD, name="head"), Phase(epochs, BODY, name="extractor")

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return {"model": float_state(client.model, parts=BODY)} if client.exchange == "train" else {}

    # declared -------------------------------------------------------------------------------------------------
    staleness_weighting = "changes"
    upload_form = {"model": upload_forms.as_sent}
    ignores_initial_weights = False
    common_start = "head"

    @property
    def requirements(self) -> Requirements:
        return weight_averaging.requirements(self.aggregation, split_model=True, parts=BODY)
