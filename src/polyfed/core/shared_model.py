"""The model that clients share by averaging, when their architectures differ.

Two ways, both from the FedIN paper: "layer-wise" (eq. 19) keeps the union of all architectures' tensors by name and
averages each over the clients that have it; "same-shape" (eq. 20, 21) keeps one model per architecture and averages
within it. With one architecture both are FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from polyfed.core.message import Group, Message, group
from polyfed.core.networks import floats
from polyfed.core.server import Server
from polyfed.functional.averaging import layer_wise_mean, weighted_mean

Aggregation = Literal["layer-wise", "same-shape"]
_UNION = "union"


def start(server: Server, aggregation: Aggregation, buffers: bool = True) -> None:
    """Seeded initial weights into the server's state; the union takes every tensor from the largest that has it.

    Without `buffers`, of parameters alone: then clients send no others, and BatchNorm's statistics are their own.
    """
    models = {a: _shared(server, a, buffers) for a in server.architectures}
    if aggregation == "same-shape":
        for architecture, weights in models.items():
            server.state[_key("model", architecture)] = weights
        return
    union: dict[str, Tensor] = {}
    for architecture in sorted(models, key=lambda a: sum(t.numel() for t in models[a].values())):
        union |= models[architecture]
        server.state[_key("names", architecture)] = {name: t.new_empty(0) for name, t in models[architecture].items()}
    server.state[_key("model", _UNION)] = union


def read(server: Server, aggregation: Aggregation, architecture: str) -> Group:
    """The shared weights of one architecture: the server's own tensors, not copies."""
    if aggregation == "same-shape":
        return group(server.state, _key("model", architecture))
    union = group(server.state, _key("model", _UNION))
    return {name: union[name] for name in group(server.state, _key("names", architecture))}


def average(
    server: Server, aggregation: Aggregation, models: Mapping[int, Group], weights: Mapping[int, float]
) -> None:
    """Replace the shared weights by the mean of the clients' `models`; what nobody sent keeps its value.

    Args:
        server: holds the shared weights. aggregation: see `start`.
        models: client number -> its weights by name. weights: client number -> its share, before normalisation.
    """
    if not models:
        return
    if aggregation == "layer-wise":
        base = group(server.state, _key("model", _UNION))
        mean = layer_wise_mean(list(models.values()), [weights[i] for i in models], base)
        server.state[_key("model", _UNION)] = mean
        return
    for architecture in server.architectures:
        members = [i for i in models if server.clients[i].architecture == architecture]
        if members:
            server.state[_key("model", architecture)] = weighted_mean(
                [models[i] for i in members], [weights[i] for i in members]
            )


def uploaded(uploads: Mapping[int, Message]) -> dict[int, Group]:
    """The group "model" of every upload."""
    return {client_id: group(message, "model") for client_id, message in uploads.items()}


def _key(what: str, architecture: str) -> str:
    return f"{what} {architecture.replace('/', ':')}"  # a name in the state holds no "/", a user's architecture may


def _shared(server: Server, architecture: str, buffers: bool) -> dict[str, Tensor]:
    initial = server.initial(architecture)
    return {name: initial[name] for name in floats(server.model(architecture, initial), buffers)}
