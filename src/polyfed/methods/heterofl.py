"""HeteroFL: sub-models of the first channels of one network (Diao et al., ICLR 2021, arXiv:2010.01264).

rates:     a, b, c, d, e = 1, 1/2, 1/4, 1/8, 1/16;
           "dynamic_a1-b1-c1-d1-e1": each client draws a level each round, with these shares;
           "fix_a1-b3": the first quarter of the clients has a, the others b
client i:  w_i <- w[first ceil(r K) of each layer's K channels], all inputs and classes      `broadcast`
           E epochs of  w_i <- w_i - eta grad CE(masked f(x; w_i), y)                        `loss`
           masked f: logits of classes that a client lacks are 0
server:    w[k] <- mean of w_i[k] over the clients that hold entry k,                        `aggregate` (eq. 3 to 6)
           equal ("uniform") or by n_i ("samples");  others are unchanged
           a client has the whole head, whose rows count in the mean for its own classes alone
Then, in networks with BatchNorm, a second exchange, of all clients, without training:       `static_batchnorm`
  down     the new w_i
  up       mean and variance of each BatchNorm's inputs, each a mean over the client's batches, and their number
  server   for each rate their mean, weighted by the numbers of batches
prediction: f(x; w_i), not masked, with these statistics; each client's sub-model is scored as it would be sent next
Cut and mean are in `functional.channel_slices`. P(r) is the numbers of the network at rate r, S(r) those of its
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

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message, get_group, get_tensor
from polyfed.core.method import Batch, Context, Method, Requirements, StepResult, TrainingResult, hyperparameters
from polyfed.core.server import Server
from polyfed.functional.channel_slices import (
    OUTPUT,
    Channels,
    SlicedModel,
    first_channels,
    partial_mean,
    slice_channels,
)
from polyfed.functional.clipping import clip_by_global_norm
from polyfed.functional.losses import cross_entropy
from polyfed.methods.building_blocks import static_batchnorm, sub_models
from polyfed.methods.building_blocks.static_batchnorm import STATISTICS
from polyfed.methods.building_blocks.sub_models import SubModels
from polyfed.methods.building_blocks.weight_averaging import Weighting

RATES = {"a": 1.0, "b": 1 / 2, "c": 1 / 4, "d": 1 / 8, "e": 1 / 16}


def _levels(rates: str) -> dict[str, int]:
    """Level -> its share, as a string of rates has them."""
    return {level[0]: int(level[1:]) for level in rates.partition("_")[2].split("-")}


def _checked(rates: str) -> str:
    form = "expected 'dynamic_' or 'fix_', then levels a to e, each with its share, as in 'dynamic_a1-b1-c1-d1-e1'"
    if not re.fullmatch(r"(dynamic|fix)_[a-e][0-9]+(-[a-e][0-9]+)*", rates):
        raise ValueError(f"{form}; got '{rates}'")
    named = rates.partition("_")[2].split("-")
    if len(_levels(rates)) != len(named) or not all(_levels(rates).values()):
        raise ValueError(f"{form}, every level once and no share 0; got '{rates}'")
    return rates


@hyperparameters
class HeteroFL(Method):
    """Narrower sub-models of one network, averaged over the clients that hold a weight."""

    # levels and proportions; "dynamic_": drawn in every round, "fix_": once, in blocks; "fix_a1": all have the network
    rates: Annotated[str, AfterValidator(_checked)] = "dynamic_a1-b1-c1-d1-e1"
    masked: bool = True  # leave out logits and head rows of classes that a client lacks
    max_grad_norm: Annotated[float, Field(ge=0)] = 0.0  # bound on the gradient norm of a step; 0: off (authors: 1)
    weighting: Weighting = "uniform"  # clients count equally; "samples": by their samples

    # the client's network ------------------------------------------------------------------------------------
    def variant(self, server: Server, client_id: int) -> str:
        return client_level(server, self.rates, client_id)

    def build(self, model: Any, variant: str) -> nn.Module:
        return sub_models.cut(model, RATES.get(variant, 1.0))

    def channels(self, server: Server, client_id: int) -> Channels:
        """The channels that a client has, of every group of K channels of the whole network: the first ceil(r K)."""
        rate = RATES[self.variant(server, client_id)]
        return sub_models.plan(server).channels(lambda size: self.window(server, size, rate))

    def window(self, server: Server, size: int, rate: float) -> Tensor:
        """The channels, of a group of so many, that this rate keeps in the present round: int64, in order."""
        return first_channels(size, rate)

    # training: down, at the client, up, at the server ------------------------------------------------------
    def broadcast(self, server: Server, client_id: int) -> Message:
        """Cut w to the client's channels."""
        channels = self.channels(server, client_id)
        w_i = slice_channels(sub_models.plan(server), get_group(server.state, "model"), channels)
        return static_batchnorm.with_statistics(server, self.variant(server, client_id), channels, w_i)

    def receive(self, client: Client, message: Message) -> Context:
        context = sub_models.receive(client, message)
        if client.exchange == STATISTICS or not self.masked:
            return context
        return {"classes": _classes(client).to(next(client.model.parameters()).device)}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        logits = model(batch.x)
        if "classes" in context:  # those of absent classes are set to 0
            logits = mask_absent_classes(logits, context["classes"])
        return cross_entropy(logits, batch.y, batch.w)

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        found = super().gradients(model, batch, context)
        return found._replace(grads=clip_by_global_norm(found.grads, self.max_grad_norm))

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        message = sub_models.upload(client)
        if client.exchange == STATISTICS or not self.masked:
            return message
        return {**message, "classes": _classes(client)}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Every entry of w becomes its mean over the clients that hold it."""
        channels_of = {i: self.channels(server, i) for i in uploads}
        if server.exchange == STATISTICS:
            static_batchnorm.average(server, uploads, {i: self.variant(server, i) for i in uploads}, channels_of)
            return
        plan = sub_models.plan(server)
        parts = []
        for i, message in uploads.items():
            own_rows: Channels = {}
            if "classes" in message:  # of the head only the rows of the client's own classes count
                own_rows = {OUTPUT: get_tensor(message, "classes").nonzero().flatten()}
            w_i = slice_channels(plan, get_group(message, "model"), own_rows)
            parts.append(SlicedModel(w_i, {**channels_of[i], **own_rows}))
        shares = [server.share(i, self.weighting) for i in uploads]
        server.state["model"] = partial_mean(plan, get_group(server.state, "model"), parts, shares)

    # what all methods with parts of one network do alike ------------------------------------------------------
    exchanges = SubModels.exchanges
    init_server = SubModels.init_server
    nbytes_in_paper = SubModels.nbytes_in_paper

    def remarks(self, server: Server) -> Sequence[str]:
        """Levels of a fixed mode that no client has."""
        clients = len(server.all_client_ids)
        ends = _block_ends(self.rates, clients)
        blocks = zip(ends, itertools.pairwise((0, *ends.values())), strict=True)
        missing = [level for level, (begin, end) in blocks if begin == end]
        if self.rates.startswith("dynamic") or not missing:
            return ()
        widest = max(RATES[level] for level in ends if level not in missing)
        return (
            f"{self.name}: rates = '{self.rates}' gives none of the {clients} clients level {', '.join(missing)}; "
            f"in a round they train {widest:g} of each layer's channels at most",
        )

    # declared -------------------------------------------------------------------------------------------------
    requirements = Requirements(same_architecture=True, classes="its loss leaves out classes that a client lacks")
    evaluation_stage = "received"
    upload_form = sub_models.UPLOAD_FORM
    delta_entries = ("model",)
    aligned_entries = ("statistics",)
    ignores_initial_weights = True


def client_level(server: Server, rates: str, client_id: int) -> str:
    """The client's level, "a" to "e": "dynamic" draws it in every round, "fix" gives levels to blocks of clients."""
    if rates.startswith("dynamic"):
        places = sum(_levels(rates).values())
        place = int(torch.randint(places, (), generator=server.generator("rates", client_id)))
    else:
        places = len(server.all_client_ids)
        place = server.all_client_ids.index(client_id)
    return next(level for level, end in _block_ends(rates, places).items() if place < end)


def _block_ends(rates: str, places: int) -> dict[str, int]:
    """Where the block of each level ends among so many places, which have them by their shares."""
    levels = _levels(rates)
    ends = list(itertools.accumulate(levels.values()))
    return {level: end * places // ends[-1] for level, end in zip(levels, ends, strict=True)}


def _classes(client: Client) -> Tensor:
    """Which classes the client has training samples of, (C,) bool."""
    return torch.bincount(client.data.train.y, minlength=client.classes) > 0


def mask_absent_classes(logits_NC: Tensor, present_C: Tensor) -> Tensor:
    """Logits with 0 in the place of every class that is not present: such a class neither gains nor loses.

    0, not minus infinity: an absent class keeps its share of the softmax, and its row gets no gradient.

    Args:
        logits_NC: scores before the softmax. present_C: bool; classes beyond its end count as absent.

    Source: section 3, masked cross entropy.
    """
    rest = logits_NC.shape[1] - len(present_C)
    return torch.where(F.pad(present_C, (0, rest)), logits_NC, torch.zeros_like(logits_NC))
