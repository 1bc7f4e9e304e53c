"""FjORD: ordered dropout, nested widths of one network (Horváth et al., NeurIPS 2021, arXiv:2102.13451).

widths:    1/n, 2/n, ..., 1;  p_i: clients are assigned 1/n to 1 in blocks of equal size
a batch:   p <= p_i drawn uniformly;  one step on
           CE(f(x; w_i), y) + [p < p_i] KL(softmax f(x; w_i) || softmax f(x; w_i[first ceil(p K)]))
server:    w[k] <- sum n_i w_i[k] / sum n_i over the clients that hold entry k
           others are unchanged
Sent: down P(p_i) + S(p_i), plus P(p_i) for statistics; up P(p_i), plus S(p_i) + 1 for statistics. Kept: server: w,
BatchNorm's statistics by width.
Deviations from the paper: (1) Widths are assigned by client number, in blocks of equal size; the paper has clusters of
devices, which may differ in size. (2) BatchNorm's statistics are computed after aggregation, for each client's largest
width. In the Flower implementation by two of the authors every width has running statistics, which are averaged. (3)
Each client's own width is evaluated; the paper evaluates all widths of the large network. (4) Distillation has the
paper's best values, alpha = T = 1 (eq. 1); its teacher learns from the labels in the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, hyperparameters
from polyfed.core.server import Server
from polyfed.functional.channel_slices import ChannelPlan, Kept, first_channels, slice_channels
from polyfed.functional.losses import cross_entropy, kl_divergence
from polyfed.functional.tied_tensors import call_with
from polyfed.methods.building_blocks.channel_groups import channel_plan
from polyfed.methods.building_blocks.sub_models import SubModels, cut


@hyperparameters
class FjORD(SubModels):
    """Ordered dropout: nested widths of one network."""

    num_widths: Annotated[int, Field(ge=1)] = 5  # n: widths are 1/n, 2/n, ..., 1; 1: FedAvg
    # distill the widest pass into the drawn width; false: the drawn width alone learns, from the labels
    distill: bool = True

    # the client's network ------------------------------------------------------------------------------------
    def _level(self, server: Server, client_id: int) -> int:
        """Level of a client: p_i n, from 1 to n."""
        everybody = server.all_client_ids
        return 1 + everybody.index(client_id) * self.num_widths // len(everybody)

    def variant(self, server: Server, client_id: int) -> str:
        return str(self._level(server, client_id))

    def build(self, model: Any, variant: str) -> nn.Module:
        level = int(variant or self.num_widths)
        return make_slimmable(model, [k / self.num_widths for k in range(1, level + 1)])

    def rate(self, server: Server, client_id: int) -> float:
        return self._level(server, client_id) / self.num_widths

    # server ------------------------------------------------------------------------------------------------
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        self.average(server, uploads, "samples")

    # client ------------------------------------------------------------------------------------------------
    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        return {"width": int(torch.randint(num_widths(client.model), (), generator=generator))}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        width = context["width"]
        is_widest = width == num_widths(model) - 1
        if is_widest or not self.distill:
            return cross_entropy(forward_at_width(model, width, batch.x), batch.y, batch.w)
        widest_logits = model(batch.x)
        narrow_logits = forward_at_width(model, width, batch.x)
        return cross_entropy(widest_logits, batch.y, batch.w) + kl_divergence(narrow_logits, widest_logits, batch.w)


# a network of several widths ------------------------------------------------------------------------------------------


class _Widths(NamedTuple):
    """A network's plan, and which channels each of its widths has, the narrowest first."""

    plan: ChannelPlan
    kept: list[Kept]


def make_slimmable(model: nn.Module, rates: Sequence[float]) -> nn.Module:
    """The network cut in place to the last of the rates, that can also be run at the others (`forward_at_width`).

    Args:
        rates: ascending shares of every group's channels.

    Raises:
        ConfigError: the network cannot be cut.
    """
    plan = channel_plan(model)
    kept: list[Kept] = [plan.kept(partial(first_channels, rate=rate)) for rate in rates]
    cut(model, rates[-1])
    model.widths = _Widths(channel_plan(model), kept)  # type: ignore[assignment]  # no module: an attribute like others
    return model


def num_widths(model: nn.Module) -> int:
    """At how many widths a `make_slimmable` network can be run."""
    return len(_widths(model).kept)


def forward_at_width(model: nn.Module, place: int, x: Tensor) -> Tensor:
    """What a `make_slimmable` network gives at one of its widths, counted from the narrowest, 0.

    The gradient reaches the parameters that the width has.
    """
    if place == num_widths(model) - 1:
        whole: Tensor = model(x)
        return whole
    widths = _widths(model)
    kept = widths.kept[place]
    if any(channels.device != x.device for channels in kept.values()):  # brought there once
        kept = widths.kept[place] = {group: channels.to(x.device) for group, channels in kept.items()}
    weights = slice_channels(widths.plan, dict(model.named_parameters()), kept)
    outcome: Tensor = call_with(model, weights, (x,))
    return outcome


def _widths(model: nn.Module) -> _Widths:
    found: Any = model.widths
    assert isinstance(found, _Widths)
    return found
