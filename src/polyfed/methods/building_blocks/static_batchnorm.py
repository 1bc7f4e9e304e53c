"""Running statistics of BatchNorm that are not kept in training, but taken afterwards, in an exchange of their own.

Sub-models of different widths see different activations, so that statistics kept in training would fit none of them
(HeteroFL, section 3). Such a layer normalizes by the batch in training and by its buffers in eval mode. After the mean
of the weights the server sends the new sub-models out; clients report the statistics on their data, and the server
averages them, weighted by batches, for each variant of the network apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from polyfed.core.client import Client, Prepare
from polyfed.core.message import Group, Message, get_group, get_tensor
from polyfed.core.modules import batchnorm_layers, copy_network, load_state, static_statistics
from polyfed.core.server import Server
from polyfed.core.upload_forms import Members, UploadContext, alike
from polyfed.functional.channel_slices import Channels, slice_channels
from polyfed.functional.modes import eval_mode
from polyfed.methods.building_blocks.channel_groups import channel_plan

STATISTICS = "statistics"  # the exchange in which they are reported


def disable_running_stats(module: nn.Module) -> None:
    """From now on the BatchNorm layers keep no statistics in training; their buffers stay where they are."""
    for layer in batchnorm_layers(module):
        layer.track_running_stats = False


# server -----------------------------------------------------------------------------------------------------------


def network(server: Server, variant: str = "") -> nn.Module:
    """The one architecture's network, whole or a variant, for its names and shapes: its weights do not count."""
    return server.model(server.architectures[0], {}, variant)


def with_statistics(server: Server, variant: str, channels: Channels, w_i: Group) -> Message:
    """A part w_i with the latest statistics of its variant, if any; in their own exchange, for new ones, as "average".

    channels: the channels that the part has.
    """
    if server.exchange == STATISTICS:
        return {"average": w_i} if static_statistics(network(server, variant)) else {}
    key = _key(variant)
    if key not in server.state:
        return {"model": w_i}
    plan = channel_plan(network(server))
    return {"model": w_i, STATISTICS: slice_channels(plan, get_group(server.state, key), channels)}


def average(
    server: Server,
    uploads: Mapping[int, Message],
    variant_of: Callable[[Server, int], str],
    channels_of: Callable[[Server, int], Channels],
) -> None:
    """Average what clients report, weighted by batches, variant by variant; those without any batch report nothing.

    The functions give a client's variant and channels; all clients of a variant have the same.
    """
    plan = channel_plan(network(server))
    variants = {i: variant_of(server, i) for i, message in uploads.items() if message}
    for variant in sorted(set(variants.values())):
        members = [i for i in variants if variants[i] == variant]
        batches = [float(get_tensor(uploads[i], "batches")) for i in members]
        channels = channels_of(server, members[0])
        key = _key(variant)
        before = get_group(server.state, key) if key in server.state else _initial(server, variant)
        new = {name: t.clone() for name, t in before.items()}
        for name, whole in new.items():
            reports = [get_group(uploads[i], STATISTICS)[name].double() for i in members]
            total = torch.zeros_like(reports[0])
            for n, report in zip(batches, reports, strict=True):
                total += n * report
            whole[plan.entries(name, channels, whole.shape)] = (total / sum(batches)).to(whole.dtype)
        server.state[key] = new


def _key(variant: str) -> str:
    return f"{STATISTICS} {variant}"


def _initial(server: Server, variant: str) -> dict[str, Tensor]:
    """Means 0 and variances 1, as wide as in the whole network, of the layers that the variant has."""
    held = static_statistics(network(server, variant))
    whole = static_statistics(network(server))
    return {
        name: torch.full(t.shape, float(name.endswith("running_var")), dtype=t.dtype)
        for name, t in whole.items()
        if name in held
    }


def reported(known: UploadContext, name: str) -> Members:
    """Form of a report: the statistics of the sub-model that was sent."""
    sent = known.sent.get("average", {})
    sizes = {} if isinstance(sent, Tensor) else sent
    held = static_statistics(network(known.server, known.method.variant(known.server, known.client_id)))
    return alike({key: sizes.get(key, t) for key, t in held.items()})


# client -----------------------------------------------------------------------------------------------------------


def report(client: Client) -> Message:
    """The statistics of the sub-model in the client's context on its training data, and of how many batches."""
    if "average" not in client.context:
        return {}
    model = copy_network(client.model)
    load_state(model, client.context["average"])
    statistics, batches = estimate_stats(model, client.data.train.x, client.prepare, client.training.batch_size)
    return {STATISTICS: statistics, "batches": torch.tensor(batches)} if batches else {}


def estimate_stats(module: nn.Module, x: Tensor, prepare: Prepare, size: int) -> tuple[dict[str, Tensor], int]:
    """Fills the static layers' statistics with the plain means over batches of what the layers see.

    All else runs in eval mode: nothing is dropped out. A batch of a single row is left out.

    Returns:
        The statistics by name, variances unbiased; and of how many batches they are the mean.
    """
    static = [layer for layer in batchnorm_layers(module) if not layer.track_running_stats]
    momenta = [layer.momentum for layer in static]
    device = next(module.parameters()).device
    batches = [rows for rows in x.split(size) if len(rows) > 1]
    with torch.no_grad(), eval_mode(module):
        for layer in static:
            layer.training = True
            layer.track_running_stats = True
            layer.momentum = None  # None: the plain mean
            layer.reset_running_stats()
        try:
            for rows in batches:
                module(prepare(rows.to(device)))
        finally:
            for layer, momentum in zip(static, momenta, strict=True):
                layer.track_running_stats, layer.momentum = False, momentum
    return {name: t.clone() for name, t in static_statistics(module).items()}, len(batches)
