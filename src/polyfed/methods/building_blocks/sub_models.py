"""One network w, which the server keeps and of which clients train parts (HeteroFL, FedRolex, ScaleFL).

In the server's state: "model", all of w but the statistics of its BatchNorm (`static_batchnorm`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message, get_group, nbytes
from polyfed.core.method import Context, Exchange, Method, Requirements, TrainingResult
from polyfed.core.modules import float_state, load_state, static_statistics
from polyfed.core.server import Server
from polyfed.core.upload_forms import MOST, Entry, Form, as_sent
from polyfed.functional.channel_slices import (
    ChannelPlan,
    Channels,
    SlicedModel,
    first_channels,
    partial_mean,
    slice_channels,
)
from polyfed.methods.building_blocks import static_batchnorm
from polyfed.methods.building_blocks.channel_groups import channel_plan, narrow_model
from polyfed.methods.building_blocks.static_batchnorm import STATISTICS
from polyfed.methods.building_blocks.weight_averaging import Weighting

UPLOAD_FORM: Form = {
    "model": as_sent,
    "classes": Entry(("C",), (torch.bool,)),
    "statistics": static_batchnorm.reported,
    "batches": Entry((), (torch.int64,), 1, MOST),
}


def plan(server: Server) -> ChannelPlan:
    """The groups of channels of w."""
    return channel_plan(static_batchnorm.network(server))


def trained_state(module: nn.Module) -> dict[str, Tensor]:
    """What is averaged: all but the statistics of BatchNorm that keeps none in training."""
    reported = static_statistics(module)
    return {name: tensor for name, tensor in float_state(module).items() if name not in reported}


def cut(model: nn.Module, rate: float) -> nn.Module:
    """The network cut in place to the first ceil(rate K) of every K channels; its BatchNorm keeps no statistics.

    Raises:
        ConfigError: the network cannot be cut.
    """
    plan = channel_plan(model)
    static_batchnorm.disable_running_stats(model)
    return narrow_model(model, plan.channels(lambda size: first_channels(size, rate))) if rate < 1 else model


def receive(client: Client, message: Message) -> Context:
    """Load a part of w; in the exchange of statistics, hand it on."""
    if client.exchange == STATISTICS:
        return {name: get_group(message, name) for name in message}
    statistics = get_group(message, "statistics") if "statistics" in message else {}
    load_state(client.model, {**get_group(message, "model"), **statistics})
    return {}


def upload(client: Client) -> Message:
    """The trained part; in the exchange of statistics, these."""
    if client.exchange == STATISTICS:
        return static_batchnorm.report(client)
    return {"model": trained_state(client.model)}


class SubModels(Method):
    """A method whose clients have the first channels of w: `rate` says which share, `variant` and `build` what else."""

    def rate(self, server: Server, client_id: int) -> float:
        """The share of each group's channels that a client has."""
        raise NotImplementedError

    def channels(self, server: Server, client_id: int) -> Channels:
        """The channels that a client has of each group of channels."""
        rate = self.rate(server, client_id)
        return plan(server).channels(lambda size: first_channels(size, rate))

    def exchanges(self, round: int) -> Sequence[Exchange]:
        """Training, and the exchange in which BatchNorm's statistics are reported."""
        return Exchange(), Exchange(STATISTICS, who="all", trains=False)

    def init_server(self, server: Server) -> None:
        initial = server.initial_state(server.architectures[0])
        server.state["model"] = {name: initial[name] for name in trained_state(static_batchnorm.network(server))}

    def broadcast(self, server: Server, client_id: int) -> Message:
        """The client's channels of the layers that it has."""
        variant = self.variant(server, client_id)
        held = float_state(static_batchnorm.network(server, variant))
        w = {name: t for name, t in get_group(server.state, "model").items() if name in held}
        channels = self.channels(server, client_id)
        return static_batchnorm.with_statistics(server, variant, channels, slice_channels(plan(server), w, channels))

    def average(self, server: Server, uploads: Mapping[int, Message], weighting: Weighting) -> None:
        """Entry-wise means over the clients that hold the entry: of the weights, or of the statistics by variant."""
        channels_of = {i: self.channels(server, i) for i in uploads}
        if server.exchange == STATISTICS:
            static_batchnorm.average(server, uploads, {i: self.variant(server, i) for i in uploads}, channels_of)
            return
        parts = [SlicedModel(get_group(message, "model"), channels_of[i]) for i, message in uploads.items()]
        shares = [server.share(i, weighting) for i in uploads]
        server.state["model"] = partial_mean(plan(server), get_group(server.state, "model"), parts, shares)

    def receive(self, client: Client, message: Message) -> Context:
        return receive(client, message)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return upload(client)

    def nbytes_in_paper(self, message: Message) -> int:
        """Of the sub-model alone, in training; the papers do not count the exchange for statistics."""
        return nbytes({"model": get_group(message, "model")}) if "model" in message else 0

    requirements = Requirements(
        same_architecture=True, classes="larger sub-models teach smaller ones by probabilities of classes"
    )
    evaluation_stage = "received"
    upload_form = UPLOAD_FORM
    delta_entries = ("model",)
    aligned_entries = ("statistics",)
    ignores_initial_weights = True
