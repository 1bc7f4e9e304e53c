"""ScaleFL: clients train one network's first blocks and first channels, with early exits (Ilhan et al., CVPR 2023).

A level width@depth has the first ceil(width K) channels of every group of K, the network up to
the exit after ceil(depth B) of its B blocks, and earlier exits, m in all. Levels are assigned
once, in equal numbers and random order.
client i:  w_i <- w[level l];  E epochs on
           sum_j j L_j / (m (m + 1) / 2),  L_m = CE(o_m, y)
           L_j = CE(o_j, y) + gamma T^2 KL(softmax(o_m / T) || softmax(o_j / T)),  j < m, T = 3,
                 after a quarter of the rounds
server:    w[k] <- mean of w_i[k] over the clients that hold entry k,
           equal ("uniform") or by n_i ("samples");  others are unchanged
Sent: down P(l) + S(l), plus P(l) for statistics; up P(l), plus S(l) + 1 for statistics. Kept: server: w with its exits,
clients' levels, BatchNorm's statistics by level.
Deviations from the paper: (1) The default levels match the mean size that FedIN states for ResNet152, without widths or
exits. The authors' code has four levels, of widths 0.7, 0.7, 0.75 and 1. (2) Exits are one linear layer; the authors'
are small networks. (3) Distillation is on; in the authors' code gamma is 0 by default, so their commands for images run
without. (4) KL is summed over classes, and its teacher is constant; in the authors' code it is neither. (5) There is no
scaler; in front of BatchNorm it has almost no effect. (6) BatchNorm's statistics are computed after aggregation, per
level.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message, get_group
from polyfed.core.method import Batch, Context, TrainingResult, hyperparameters
from polyfed.core.modules import float_state
from polyfed.core.server import Server
from polyfed.functional.channel_slices import Channels, first_channels, slice_channels
from polyfed.functional.losses import cross_entropy, kl_divergence
from polyfed.methods.building_blocks import static_batchnorm, sub_models
from polyfed.methods.building_blocks.early_exits import add_early_exits
from polyfed.methods.building_blocks.static_batchnorm import STATISTICS
from polyfed.methods.building_blocks.sub_models import SubModels
from polyfed.methods.building_blocks.weight_averaging import Weighting
from polyfed.methods.heterofl import mean_of_holders

_TEMPERATURE = 3.0  # T of the distillation
_DISTILL_FROM = 0.25  # fraction of the rounds before it


class Level(NamedTuple):
    """Fractions of channels (width) and blocks (depth)."""

    width: float
    depth: float


def _levels(text: str) -> list[Level]:
    pairs = (level.partition("@") for level in text.split())
    return [Level(float(width), float(depth)) for width, _, depth in pairs]


def _checked(text: str) -> str:
    level = r"(0?\.\d+|1(\.0+)?)@(0?\.\d+|1(\.0+)?)"
    levels = _levels(text) if re.fullmatch(f"{level}( {level})*", text) else []
    depths = [depth for _, depth in levels]
    if not levels or depths != sorted(depths) or depths[-1] < 1 or not all(min(level) > 0 for level in levels):
        raise ValueError(
            "expected levels as width@depth, shares above 0 and up to 1, the shallowest first and the last of depth 1, "
            f"as in '0.5@0.4 1@1'; got '{text}'"
        )
    return text


@hyperparameters
class ScaleFL(SubModels):
    """Narrower and shallower sub-models of one network with early exits."""

    # width@depth of each level, by increasing depth, the last of depth 1; "1@1": the whole network, one exit
    levels: Annotated[str, AfterValidator(_checked)] = "0.4@0.4 0.5@0.55 0.55@0.7 0.65@0.85 1@1"
    gamma: Annotated[float, Field(ge=0)] = 0.05  # weight of the distillation from the last exit; 0: off
    weighting: Weighting = "uniform"  # clients count equally; "samples": by their samples

    # the client's network ------------------------------------------------------------------------------------
    def _level(self, variant: str) -> Level:
        """Level of the whole network."""
        return _levels(self.levels)[int(variant) - 1] if variant else Level(1.0, 1.0)

    def variant(self, server: Server, client_id: int) -> str:
        clients = len(server.all_client_ids)
        levels = len(_levels(self.levels))
        order = torch.randperm(clients, generator=server.generator_of_run("levels"))
        place = int(order[server.all_client_ids.index(client_id)])
        return str(levels - place * levels // clients)  # the whole network is never without a client

    def build(self, model: Any, variant: str) -> nn.Module:
        width, depth = self._level(variant)
        whole = add_early_exits(model, [level.depth for level in _levels(self.levels)])
        sub_models.cut(whole, width)
        return whole.truncated(depth)

    def personal_model(self, module: Any) -> nn.Module:
        scored: nn.Module = module.final_exit()
        return scored

    # server ------------------------------------------------------------------------------------------------
    def channels(self, server: Server, client_id: int) -> Channels:
        """The channels that a client has of each group: the first ones, by the width of its level."""
        width = self._level(self.variant(server, client_id)).width
        return sub_models.plan(server).channels(lambda size: first_channels(size, width))

    def broadcast(self, server: Server, client_id: int) -> Message:
        """The client's channels of the layers that it has."""
        variant = self.variant(server, client_id)
        held = float_state(static_batchnorm.network(server, variant))
        w = {name: t for name, t in get_group(server.state, "model").items() if name in held}
        channels = self.channels(server, client_id)
        w_i = slice_channels(sub_models.plan(server), w, channels)
        return static_batchnorm.with_statistics(server, variant, channels, w_i)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Every entry of w becomes its mean over the clients that hold it; statistics likewise, level by level."""
        if server.exchange == STATISTICS:
            static_batchnorm.average(server, uploads, self.variant, self.channels)
            return
        parts = [(get_group(message, "model"), self.channels(server, i)) for i, message in uploads.items()]
        shares = [server.share(i, self.weighting) for i in uploads]
        whole = get_group(server.state, "model")
        server.state["model"] = mean_of_holders(sub_models.plan(server), whole, parts, shares)

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        distils = client.round > _DISTILL_FROM * client.training.rounds
        return {**sub_models.receive(client, message), "distils": distils}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        gamma = self.gamma if context["distils"] else 0.0
        return multi_exit_loss(model(batch.x), batch.y, batch.w, gamma, _TEMPERATURE)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return sub_models.upload(client)

    # declared -------------------------------------------------------------------------------------------------
    upload_form = sub_models.UPLOAD_FORM
    ignores_initial_weights = True
    planned = "when early exits begin to learn from the last one"


def multi_exit_loss(exits_NC: Sequence[Tensor], y_N: Tensor, w_N: Tensor, gamma: float, temperature: float) -> Tensor:
    """sum_j j L_j / (m (m + 1) / 2) over the exits j = 1..m of a network, all of which learn from the labels.

    L_j = CE(o_j, y) + gamma T^2 KL(softmax(o_m / T) || softmax(o_j / T)) for j < m, the last exit being a constant in
    the latter; L_m = CE(o_m, y).
    """
    m = len(exits_NC)
    last_NC = exits_NC[-1]
    losses = [cross_entropy(logits_NC, y_N, w_N) for logits_NC in exits_NC]
    for j, logits_NC in enumerate(exits_NC[:-1] if gamma else ()):
        taught = kl_divergence(logits_NC / temperature, last_NC / temperature, w_N)
        losses[j] = losses[j] + gamma * temperature**2 * taught
    total = torch.stack([j * loss for j, loss in enumerate(losses, 1)]).sum()
    return total / (m * (m + 1) / 2)
