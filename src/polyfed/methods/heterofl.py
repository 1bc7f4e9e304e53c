"""HeteroFL: sub-models of the first channels of one network (Diao et al., ICLR 2021, arXiv:2010.01264).

w is the whole network, and r the client's rate: 1, 1/2, 1/4, 1/8 or 1/16, by its level a to e (`variant`).
client i:  w_i <- w[first ceil(r K) of each layer's K channels], all inputs and classes      `channels`, `broadcast`
           E epochs of  w_i <- w_i - eta grad CE(masked f(x; w_i), y)                        `loss`
           masked f: logits of classes that a client lacks are 0                             `mask_absent_classes`
server:    a client has the whole head, whose rows count for its own classes alone           `aggregate`
           w[e] <- mean of w_i[e] over the clients that hold entry e,                        `mean_of_holders`
           equal ("uniform") or by n_i ("samples");  others are unchanged                    (eq. 3 to 6)
prediction: f(x; w_i), not masked, with BatchNorm's statistics; each client's sub-model is scored as it would be sent
next. In networks with BatchNorm a second exchange, of all clients, without training, takes these (`static_batchnorm`):
  down     the new w_i
  up       mean and variance of each BatchNorm's inputs, each a mean over the client's batches, and their number
  server   for each rate their mean, weighted by the numbers of batches
Which channels each dimension of a tensor has is found by `building_blocks.channel_groups`; `ChannelPlan.entries` gives
the entries of a tensor that are of some channels. `tests/methods/test_heterofl.py` holds a round, and the exchange of
statistics, against networks made narrow by hand. P(r) is the numbers of the network at rate r, S(r) those of its
BatchNorm statistics.
Sent: down P(r) + S(r), plus P(r) for statistics; up P(r) + C bytes, plus S(r) + 1 for statistics. Kept: server: w,
BatchNorm's statistics by rate.
Deviations from the paper: (1) BatchNorm's statistics are computed per rate; the authors compute them over all data, and
do not count this communication. (2) There is no scaler: BatchNorm cancels it, and without BatchNorm the trained and the
evaluated network would differ. (3) A client's classes are sent with its weights; in the authors' code the server knows
them. (4) All clients' sub-models are evaluated, not only the whole network. (5) Gradients are not clipped; the authors'
code clips at norm 1 (`max_grad_norm = 1.0`), as does the recipe of FedIN's table 1. This slows networks without
BatchNorm. (6) The authors' code cannot slice bottleneck blocks such as ResNet152's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group, get_tensor
from polyfed.core.method import Batch, Context, Method, Requirements, StepResult, TrainingResult, hyperparameters
from polyfed.core.server import Server
from polyfed.functional.channel_slices import OUTPUT, ChannelPlan, Channels, first_channels
from polyfed.functional.clipping import clip_by_global_norm
from polyfed.functional.losses import cross_entropy
from polyfed.methods.building_blocks import static_batchnorm, sub_models, width_levels
from polyfed.methods.building_blocks.static_batchnorm import STATISTICS
from polyfed.methods.building_blocks.sub_models import SubModels
from polyfed.methods.building_blocks.weight_averaging import Weighting
from polyfed.methods.building_blocks.width_levels import RATES, Rates


def mask_absent_classes(logits_NC: Tensor, present_C: Tensor) -> Tensor:
    """Logits with 0 in the place of every class that is not present: such a class neither gains nor loses.

    0, not minus infinity: an absent class keeps its share of the softmax, and its row gets no gradient.

    Args:
        logits_NC: scores before the softmax. present_C: bool; classes beyond its end count as absent.

    Source: section 3, masked cross entropy.
    """
    rest = logits_NC.shape[1] - len(present_C)
    return torch.where(F.pad(present_C, (0, rest)), logits_NC, torch.zeros_like(logits_NC))


def mean_of_holders(
    plan: ChannelPlan, w: Group, parts: Sequence[tuple[Group, Channels]], shares: Sequence[float]
) -> dict[str, Tensor]:
    """Every entry of w becomes the mean of the w_i that hold it; what none holds keeps its value bit for bit.

    Sums are float64 and cast back, so that the mean of equal entries is that entry.

    Args:
        parts: of every client w_i, any of its tensors, and which channels they are.
        shares: of every client, none negative; divided by their sum over the clients that hold the entry.

    Source: HeteroFL, eq. 3 to 6; FedRolex (Alam et al., NeurIPS 2022), eq. 2.
    """
    mean = {}
    for name, whole in w.items():
        total = torch.zeros_like(whole, dtype=torch.float64)
        count = torch.zeros_like(total)
        for (w_i, channels), share in zip(parts, shares, strict=True):
            if name in w_i:
                held = plan.entries(name, channels, whole.shape)
                total[held] += share * w_i[name].detach().to(total)
                count[held] += share
        entries = (total / count.clamp(min=torch.finfo(count.dtype).tiny)).to(whole.dtype)
        mean[name] = torch.where(count > 0, entries, whole)
    return mean


@hyperparameters
class HeteroFL(Method):
    """Narrower sub-models of one network, averaged over the clients that hold a weight."""

    rates: Rates = "dynamic_a1-b1-c1-d1-e1"  # levels and their shares; "dynamic_": drawn in every round; "fix_": once
    masked: bool = True  # leave out logits and head rows of classes that a client lacks
    max_grad_norm: Annotated[float, Field(ge=0)] = 0.0  # bound on the gradient norm of a step; 0: off (authors: 1)
    weighting: Weighting = "uniform"  # clients count equally; "samples": by their samples

    # down: the cut of w --------------------------------------------------------------------------------------
    def channels(self, server: Server, client_id: int) -> Channels:
        """The client's channels, of every group of K channels of the whole network: the first ceil(r K)."""
        r = RATES[self.variant(server, client_id)]
        return sub_models.plan(server).channels(lambda size: self.window(server, size, r))

    def window(self, server: Server, size: int, rate: float) -> Tensor:
        """The channels, of a group of so many, that this rate keeps in the present round: int64, in order."""
        return first_channels(size, rate)

    def broadcast(self, server: Server, client_id: int) -> Message:
        plan = sub_models.plan(server)
        channels = self.channels(server, client_id)
        w = get_group(server.state, "model")
        w_i = {name: t[plan.entries(name, channels, t.shape)] for name, t in w.items()}
        return static_batchnorm.with_statistics(server, self.variant(server, client_id), channels, w_i)

    # client: the masked loss -------------------------------------------------------------------------------------
    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        logits = model(batch.x)
        if "classes" in context:
            logits = mask_absent_classes(logits, context["classes"])
        return cross_entropy(logits, batch.y, batch.w)

    # server: the mean ------------------------------------------------------------------------------------------
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if server.exchange == STATISTICS:
            static_batchnorm.average(server, uploads, self.variant, self.channels)
            return
        plan = sub_models.plan(server)
        parts = []
        for i, message in uploads.items():
            w_i = get_group(message, "model")
            channels = self.channels(server, i)
            if "classes" in message:  # of the head the rows of the client's own classes; other tensors are unchanged
                rows = {OUTPUT: get_tensor(message, "classes").nonzero().flatten()}
                w_i = {name: t[plan.entries(name, rows, t.shape)] for name, t in w_i.items()}
                channels = {**channels, **rows}
            parts.append((w_i, channels))
        shares = [server.share(i, self.weighting) for i in uploads]
        server.state["model"] = mean_of_holders(plan, get_group(server.state, "model"), parts, shares)

    # Nothing below changes an equation, but for the clipping in `gradients`, which is off.
    # levels and messages --------------------------------------------------------------------------------------
    def variant(self, server: Server, client_id: int) -> str:
        return width_levels.client_level(server, self.rates, client_id)

    def build(self, model: Any, variant: str) -> nn.Module:
        return sub_models.cut(model, RATES.get(variant, 1.0))

    def remarks(self, server: Server) -> Sequence[str]:
        return width_levels.remarks(server, self.rates, self.name)

    def receive(self, client: Client, message: Message) -> Context:
        context = sub_models.receive(client, message)
        if client.exchange == STATISTICS or not self.masked:
            return context
        return {"classes": _classes(client).to(next(client.model.parameters()).device)}

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        found = super().gradients(model, batch, context)
        return found._replace(grads=clip_by_global_norm(found.grads, self.max_grad_norm))

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        message = sub_models.upload(client)
        if client.exchange == STATISTICS or not self.masked:
            return message
        return {**message, "classes": _classes(client)}

    exchanges = SubModels.exchanges
    init_server = SubModels.init_server
    nbytes_in_paper = SubModels.nbytes_in_paper

    # declared -------------------------------------------------------------------------------------------------
    requirements = Requirements(same_architecture=True, classes="its loss leaves out classes that a client lacks")
    evaluation_stage = "received"
    upload_form = sub_models.UPLOAD_FORM
    delta_entries = ("model",)
    aligned_entries = ("statistics",)
    ignores_initial_weights = True


def _classes(client: Client) -> Tensor:
    """Which classes the client has training samples of, (C,) bool."""
    return torch.bincount(client.data.train.y, minlength=client.classes) > 0
