"""FjORD: ordered dropout, nested widths of one network (Horváth et al., NeurIPS 2021, arXiv:2102.13451).

widths:    1/n, 2/n, ..., 1;  p_i: clients are assigned 1/n to 1 in blocks of equal size
a batch:   p <= p_i drawn uniformly;  one step on
           CE(f(x; w_i), y)  +  [p < p_i] KL(softmax f(x; w_i) || softmax f(x; w_i[first ceil(p K)]))
server:    w[k] <- sum n_i w_i[k] / sum n_i over the clients that hold entry k;
           entries that nobody holds are unchanged

Deviations from the paper: (1) Widths are assigned by client number, in blocks of equal size; the paper has clusters
of devices, which may differ in size. (2) BatchNorm's statistics are computed after aggregation, for each client's
largest width. In the Flower implementation by two of the authors every width has running statistics, which are
averaged. BatchNorm's weight and bias are shared by all widths in both. (3) Each client's own width is
evaluated; the paper evaluates all widths of the large network.
Distillation has the paper's best values, alpha = T = 1 (eq. 1), with its teacher's loss on the labels, as in that
implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Exchange, TrainingResult, hyperparameters
from polyfed.core.server import Server
from polyfed.functional.channel_slices import first_channels
from polyfed.functional.losses import cross_entropy, kl_divergence
from polyfed.methods.building_blocks import width_slicing


@hyperparameters
class FjORD(width_slicing.SlicedMethod):
    """Ordered dropout: nested widths of one network."""

    card = replace(
        width_slicing.SlicedMethod.card,
        name="fjord",
        paper="Horváth et al., NeurIPS 2021",
        differs="width: sub-models of one network",
        down="P(p_i) + S(p_i), plus P(p_i) for statistics",
        up="P(p_i), plus S(p_i) + 1 for statistics",
        states="server: w, BatchNorm's statistics by width",
        ignores_initial_weights=True,
    )

    num_widths: Annotated[int, Field(ge=1)] = 5  # n: widths are 1/n, 2/n, ..., 1; 1: FedAvg
    distill: bool = True  # distill the widest pass; False: train on labels only
    statistics: Literal["all", "selected"] = "all"  # clients that report BatchNorm statistics

    def exchanges(self, round: int) -> Sequence[Exchange]:
        return width_slicing.level_exchanges(self.statistics)

    # server ------------------------------------------------------------------------------------------------
    def _level(self, server: Server, client_id: int) -> int:
        """Level of a client: p_i n, from 1 to n."""
        everybody = server.all_client_ids
        return 1 + everybody.index(client_id) * self.num_widths // len(everybody)

    def variant(self, server: Server, client_id: int) -> str:
        return str(self._level(server, client_id))

    def build(self, model: Any, variant: str) -> nn.Module:
        level = int(variant or self.num_widths)
        return width_slicing.make_slimmable(model, [k / self.num_widths for k in range(1, level + 1)])

    def _kept(self, server: Server, client_id: int) -> dict[int, Tensor]:
        largest = self._level(server, client_id) / self.num_widths
        return width_slicing.kept_channels(server, lambda size: first_channels(size, largest))

    def broadcast(self, server: Server, client_id: int) -> Message:
        return width_slicing.submodel_message(server, self.variant(server, client_id), self._kept(server, client_id))

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        variants = {i: self.variant(server, i) for i in uploads}
        kept = {i: self._kept(server, i) for i in uploads}
        width_slicing.average(server, uploads, variants, kept, "samples")

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        return width_slicing.receive(client, message, masked=False)

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        return {"width": int(torch.randint(width_slicing.num_widths(client.model), (), generator=generator))}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        width = context["width"]
        is_widest = width == width_slicing.num_widths(model) - 1
        if is_widest or not self.distill:
            return cross_entropy(width_slicing.forward_at_width(model, width, batch.x), batch.y, batch.w)
        widest_logits = model(batch.x)
        narrow_logits = width_slicing.forward_at_width(model, width, batch.x)
        return cross_entropy(widest_logits, batch.y, batch.w) + kl_divergence(narrow_logits, widest_logits, batch.w)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return width_slicing.upload(client, masked=False)
