"""What methods that cut one large network by width are made of: HeteroFL, FedRolex, FjORD, ScaleFL.

The server keeps the large network; a client is sent the channels that its rate and the method's window say, and sends
them back; every entry becomes the mean over those who hold it. Windows are made again from the round's number, so that
none is sent. Where the network has BatchNorm, its running statistics are by default not kept in training (the widths'
would not agree): after the average, clients report the statistics of the new sub-models on their data, in an exchange
of its own, and the server averages these rate by rate.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message, get_group, get_tensor, nbytes
from polyfed.core.method import (
    Batch,
    Context,
    Exchange,
    Method,
    MethodCard,
    Requirements,
    StepResult,
    TrainingResult,
    hyperparameters,
)
from polyfed.core.modules import copy_network, float_state, load_state, static_statistics
from polyfed.core.server import Server
from polyfed.core.settings import Stage
from polyfed.core.upload_forms import MOST, Entry, Form, Members, UploadContext, alike, as_sent
from polyfed.functional.channel_slices import (
    OUTPUT,
    ChannelPlan,
    Kept,
    SlicedModel,
    first_channels,
    partial_mean,
    slice_channels,
)
from polyfed.functional.clipping import clip_by_global_norm
from polyfed.functional.losses import cross_entropy, mask_absent_classes
from polyfed.functional.tied_tensors import call_with
from polyfed.methods.building_blocks import static_batchnorm, weight_averaging
from polyfed.methods.building_blocks.channel_groups import channel_plan, narrow_model

RATES = {"a": 1.0, "b": 1 / 2, "c": 1 / 4, "d": 1 / 8, "e": 1 / 16}
STATISTICS = "statistics"  # the exchange in which they are reported
Weighting = weight_averaging.Weighting
Statistics = Literal["all", "selected", "running"]

# rates ----------------------------------------------------------------------------------------------------------


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


Rates = Annotated[str, AfterValidator(_checked)]


def client_level(server: Server, rates: str, client_id: int) -> str:
    """The client's level, "a" to "e": "dynamic" draws it anew in every round, "fix" deals levels in blocks, once."""
    levels = _levels(rates)
    *_, whole = ends = list(itertools.accumulate(levels.values()))
    if rates.startswith("dynamic"):
        place = int(torch.randint(whole, (), generator=server.generator("rates", client_id)))
    else:
        place = server.all_client_ids.index(client_id)
        clients = len(server.all_client_ids)
        ends = [end * clients // whole for end in ends]
    return next(name for name, end in zip(levels, ends, strict=True) if place < end)


def level_rate(variant: str) -> float:
    """The rate of a level; of the network as it is, 1."""
    return RATES[variant] if variant else 1.0


# the network ------------------------------------------------------------------------------------------------------


def build(model: nn.Module, rate: float, statistics: Statistics) -> nn.Module:
    """The network cut in place to the first channels, with BatchNorm that keeps no statistics.

    Args:
        model: what `channel_plan` understands. rate: share of every group's channels.
        statistics: "running" lets BatchNorm keep its running statistics in training.

    Raises:
        ConfigError: the network cannot be cut.
    """
    plan = channel_plan(model)
    if statistics != "running":
        static_batchnorm.disable_running_stats(model)
    if rate < 1:
        narrow_model(model, plan.kept(lambda size: first_channels(size, rate)))
    return model


@dataclass(frozen=True)
class _Prefixes:
    """The widths of a network: its plan, and which channels each has, the narrowest first."""

    plan: ChannelPlan
    kept: Sequence[Kept]


def make_slimmable(model: nn.Module, rates: Sequence[float]) -> nn.Module:
    """The network cut in place to the last of the rates, that can also be run at the others (`forward_at_width`).

    Args:
        model: what `channel_plan` understands. rates: ascending shares of every group's channels.

    Raises:
        ConfigError: the network cannot be cut.
    """
    plan = channel_plan(model)
    kept = [plan.kept(partial(first_channels, rate=rate)) for rate in rates]
    build(model, rates[-1], statistics="all")
    model.prefixes = _Prefixes(channel_plan(model), kept)  # type: ignore[assignment]  # no module: an attribute like others
    return model


def num_widths(model: nn.Module) -> int:
    """At how many widths a `make_slimmable` network can be run."""
    return len(_prefixes(model).kept)


def forward_at_width(model: nn.Module, place: int, x: Tensor) -> Tensor:
    """What a `make_slimmable` network gives at one of its widths, counted from the narrowest, 0.

    The gradient reaches the parameters that the width has.
    """
    if place == num_widths(model) - 1:
        whole: Tensor = model(x)
        return whole
    prefixes = _prefixes(model)
    weights = slice_channels(prefixes.plan, dict(model.named_parameters()), prefixes.kept[place])
    outcome: Tensor = call_with(model, weights, (x,))
    return outcome


def _prefixes(model: nn.Module) -> _Prefixes:
    found: Any = model.prefixes
    assert isinstance(found, _Prefixes)
    return found


# server -----------------------------------------------------------------------------------------------------------


def level_exchanges(statistics: Statistics) -> Sequence[Exchange]:
    """Training, and the exchange in which BatchNorm's statistics are reported by "all" or by the "selected"."""
    if statistics == "running":
        return (Exchange(),)
    return Exchange(), Exchange(STATISTICS, who=statistics, trains=False)


def init(server: Server) -> None:
    """Seeded initial weights of the large network into the server's state."""
    initial = server.initial_state(server.architectures[0])
    server.state["model"] = {name: initial[name] for name in _weights(_large(server))}


def kept_channels(server: Server, window: Callable[[int], Tensor]) -> dict[int, Tensor]:
    """The channels of a sub-model, by group. window: number of channels -> those that are kept."""
    return channel_plan(_large(server)).kept(window)


def submodel_message(server: Server, variant: str, kept: Kept) -> Message:
    """A sub-model with the latest statistics of its variant; to report these, the sub-model alone, if it has any.

    Of the large network's tensors it has those that the variant's network has: all, where that is cut in width alone.
    """
    plan = channel_plan(_large(server))
    own = _own(server, variant)
    held = float_state(own)
    model = slice_channels(
        plan, {name: t for name, t in get_group(server.state, "model").items() if name in held}, kept
    )
    if server.exchange == STATISTICS:
        return {"average": model} if static_statistics(own) else {}
    known = (
        {"statistics": slice_channels(plan, get_group(server.state, key), kept)}
        if (key := _key(variant)) in server.state
        else {}
    )
    return {"model": model, **known}


def average(
    server: Server,
    uploads: Mapping[int, Message],
    variants: Mapping[int, str],
    kept: Mapping[int, Kept],
    weighting: Weighting,
) -> None:
    """Entry-wise means over those who hold the entry: of the weights, or by variant of the statistics.

    Rows of the classes are averaged over those who say that they have the class, where clients say so.

    Args:
        server: holds the large network. uploads: of the present exchange.
        variants, kept: client number -> its variant, its channels. weighting: how much each client's weights count.
    """
    plan = channel_plan(_large(server))
    if server.exchange != STATISTICS:
        if uploads:
            parts = [_part(plan, message, kept[i]) for i, message in uploads.items()]
            shares = [server.share(i, weighting) for i in uploads]
            server.state["model"] = partial_mean(plan, get_group(server.state, "model"), parts, shares)
        return
    reports = {i: message for i, message in uploads.items() if message}
    for name in sorted({variants[i] for i in reports}):
        members = [i for i in reports if variants[i] == name]
        parts = [SlicedModel(get_group(reports[i], "statistics"), kept[i]) for i in members]
        batches = [float(get_tensor(reports[i], "batches")) for i in members]
        base = get_group(server.state, _key(name)) if _key(name) in server.state else _fresh(server, name)
        server.state[_key(name)] = partial_mean(plan, base, parts, batches)


def _large(server: Server) -> nn.Module:
    return server.model(server.architectures[0], {})  # as a template: its weights are whoever's used it last


def _own(server: Server, variant: str) -> nn.Module:
    return server.model(server.architectures[0], {}, variant)  # as above


def _fresh(server: Server, variant: str) -> dict[str, Tensor]:
    """New statistics, as wide as the large network's, of the layers that the variant has."""
    held = static_statistics(_own(server, variant))
    return {name: t for name, t in static_batchnorm.init_stats(_large(server)).items() if name in held}


def _key(variant: str) -> str:
    return f"statistics {variant}"


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """What is averaged: all but the statistics of BatchNorm that keeps none in training."""
    reported = static_statistics(module)
    return {name: tensor for name, tensor in float_state(module).items() if name not in reported}


def _part(plan: ChannelPlan, message: Message, kept: Kept) -> SlicedModel:
    model = get_group(message, "model")
    if "classes" not in message:
        return SlicedModel(model, kept)
    rows = {OUTPUT: get_tensor(message, "classes").nonzero().flatten()}
    return SlicedModel(slice_channels(plan, model, rows), {**kept, **rows})


# client -----------------------------------------------------------------------------------------------------------


def receive(client: Client, message: Message, masked: bool) -> Context:
    """Load the sub-model; what the loss needs: with `masked`, which classes the client has."""
    if client.exchange == STATISTICS:
        return {name: get_group(message, name) for name in message}
    statistics = get_group(message, "statistics") if "statistics" in message else {}
    load_state(client.model, {**get_group(message, "model"), **statistics})
    return {"classes": _classes(client).to(next(client.model.parameters()).device)} if masked else {}


def loss(model: Any, batch: Batch, context: Context) -> Tensor:
    """CE, with the logits of absent classes set to 0 where the context says which classes are there."""
    logits = model(batch.x)
    return cross_entropy(
        mask_absent_classes(logits, context["classes"]) if "classes" in context else logits, batch.y, batch.w
    )


def clip_gradients(found: StepResult, most: float) -> StepResult:
    """The same with gradients of this common norm at most; 0 is no limit."""
    return found._replace(grads=clip_by_global_norm(found.grads, most))


def upload(client: Client, masked: bool) -> Message:
    """The trained weights, and with `masked` which classes the client has; or BatchNorm's statistics on its data."""
    if client.exchange == STATISTICS:
        if "average" not in client.context:
            return {}
        model = copy_network(client.model)
        x = client.data.train.x
        load_state(model, client.context["average"])
        statistics, batches = static_batchnorm.estimate_stats(model, x, client.prepare, client.training.batch_size)
        return {"statistics": statistics, "batches": torch.tensor(batches)} if batches else {}
    return {"model": _weights(client.model), **({"classes": _classes(client)} if masked else {})}


def _classes(client: Client) -> Tensor:
    """Which classes the client has training samples of, (C,) bool."""
    return torch.bincount(client.data.train.y, minlength=client.classes) > 0


def _reported(known: UploadContext, name: str) -> Members:
    """BatchNorm's statistics of the sub-model that came down."""
    down = known.sent.get("average", {})
    sizes = {} if isinstance(down, Tensor) else down
    held = static_statistics(_own(known.server, known.method.variant(known.server, known.client_id)))
    return alike({key: sizes.get(key, t) for key, t in held.items()})


FORM: Form = {
    "model": as_sent,
    "classes": Entry(("C",), (torch.bool,)),
    "statistics": _reported,
    "batches": Entry((), (torch.int64,), 1, MOST),
}


class SlicedMethod(Method):
    """Clients train slices of one network that the server keeps: what all such methods have in common."""

    card = MethodCard(form=FORM, delta_entries=("model",), aligned_entries=("statistics",))

    @property
    def requirements(self) -> Requirements:
        return Requirements(
            same_architecture=True, classes="larger sub-models teach smaller ones by probabilities of classes"
        )

    @property
    def evaluation_stage(self) -> Stage:
        return "received"

    def init_server(self, server: Server) -> None:
        init(server)

    def nbytes_in_paper(self, message: Message) -> int:
        """Of the sub-model alone, in training; the papers do not count the exchange for statistics."""
        return nbytes({"model": get_group(message, "model")}) if "model" in message else 0


@hyperparameters
class WidthSlicing(SlicedMethod):
    """Clients train slices that their rates and `window` choose: HeteroFL but for the window."""

    card = replace(
        SlicedMethod.card,
        differs="width: sub-models of one network",
        down="P(r) + S(r), plus P(r) for statistics",
        up="P(r) + C bytes, plus S(r) + 1 for statistics",
        states="server: w, BatchNorm's statistics by rate",
        ignores_initial_weights=True,
    )

    rates: Rates = "dynamic_a1-b1-c1-d1-e1"  # levels and proportions; "dynamic": redrawn every round, "fix": never
    masked: bool = True  # ignore logits and rows of absent classes
    max_grad_norm: Annotated[float, Field(ge=0)] = 0.0  # bound on the gradient norm of a step; 0: off
    statistics: Statistics = "all"  # clients that report BatchNorm statistics; "running": averaged
    weighting: Weighting = "uniform"  # weights of the mean; "samples": by training samples

    @property
    def requirements(self) -> Requirements:
        return Requirements(same_architecture=True, classes="its loss leaves out classes that a client lacks")

    def exchanges(self, round: int) -> Sequence[Exchange]:
        return level_exchanges(self.statistics)

    # server ------------------------------------------------------------------------------------------------
    def variant(self, server: Server, client_id: int) -> str:
        return client_level(server, self.rates, client_id)

    def build(self, model: Any, variant: str) -> nn.Module:
        return build(model, level_rate(variant), self.statistics)

    def window(self, server: Server, size: int, rate: float) -> Tensor:
        """The channels, of a group of so many, that this rate keeps in the present round: int64, in order."""
        return first_channels(size, rate)

    def _kept(self, server: Server, client_id: int) -> Kept:
        share = level_rate(self.variant(server, client_id))
        return kept_channels(server, lambda size: self.window(server, size, share))

    def broadcast(self, server: Server, client_id: int) -> Message:
        return submodel_message(server, self.variant(server, client_id), self._kept(server, client_id))

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        variants = {i: self.variant(server, i) for i in uploads}
        average(server, uploads, variants, {i: self._kept(server, i) for i in uploads}, self.weighting)

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        return receive(client, message, self.masked)

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return loss(model, batch, context)

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        return clip_gradients(super().gradients(model, batch, context), self.max_grad_norm)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return upload(client, self.masked)
