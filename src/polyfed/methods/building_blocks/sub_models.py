"""One network w, which the server keeps and of which clients train parts (HeteroFL, FedRolex, ScaleFL).

In the server's state: "model", all of w but the statistics of its BatchNorm (`static_batchnorm`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message, get_group, nbytes
from polyfed.core.method import Context, Exchange, Method, Requirements
from polyfed.core.modules import float_state, load_state, static_statistics
from polyfed.core.server import Server
from polyfed.core.upload_forms import MOST, Entry, Form, as_sent
from polyfed.functional.channel_slices import ChannelPlan, first_channels
from polyfed.methods.building_blocks import static_batchnorm
from polyfed.methods.building_blocks.channel_groups import channel_plan, narrow_model
from polyfed.methods.building_blocks.static_batchnorm import STATISTICS

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
    """A method whose clients train parts of w, before an exchange in which BatchNorm's statistics are reported."""

    def exchanges(self, round: int) -> Sequence[Exchange]:
        """Training, and the exchange in which BatchNorm's statistics are reported."""
        return Exchange(), Exchange(STATISTICS, who="all", trains=False)

    def init_server(self, server: Server) -> None:
        initial = server.initial_state(server.architectures[0])
        server.state["model"] = {name: initial[name] for name in trained_state(static_batchnorm.network(server))}

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
