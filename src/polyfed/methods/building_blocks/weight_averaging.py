"""Averaging of weights among clients with different architectures.

Two modes are from the FedIN paper: "layer-wise" (eq. 19) keeps the union of all architectures' tensors by name and
averages each over the clients that have it; "same-shape" (eq. 20, 21) keeps one model per architecture and averages
within it. With one architecture both are FedAvg. Other named tensors can be shared in the same way (`init_zeros`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group, get_tensor
from polyfed.core.method import Requirements
from polyfed.core.modules import float_state
from polyfed.core.server import Server
from polyfed.functional.averaging import layer_wise_mean, weighted_mean
from polyfed.models.split import Part

Aggregation = Literal["layer-wise", "same-shape"]
Weighting = Literal["samples", "uniform"]
AVERAGES_HEADS = "it averages heads"  # why outputs have to mean the same for all clients
Target = Callable[[Group, list[int]], dict[str, Tensor]]  # a shared model, numbers of its clients -> where it should go
Step = Callable[[str, Group], dict[str, Tensor]]  # a shared model's name, V - W of its parameters -> what to add to W
_UNION = "union"


def requirements(
    aggregation: Aggregation,
    parts: tuple[Part, ...] | None = None,
    hint: str = "use method.aggregation = 'same-shape'",
    **further: Any,
) -> Requirements:
    """What networks must be like: layer-wise, tensors of one name have one shape everywhere, and not those of heads
    alone are averaged. With `parts`, of these parts of split models; heads are then others' business.
    All else is as in `Requirements`.
    """
    return Requirements(
        shared_shapes=aggregation != "same-shape",
        shared_parts=parts,
        more_than_head=aggregation == "layer-wise" and parts is None,
        same_columns=parts is None or "extractor" in parts,
        shared_outputs=AVERAGES_HEADS if parts is None else "",
        hint=hint,
        **further,
    )


# server: the shared model -----------------------------------------------------------------------------------------


def init(server: Server, aggregation: Aggregation, parts: Collection[Part] | None = None) -> None:
    """Seeded initial weights into the server's state; the union takes every tensor from the largest that has it.

    With `parts`, of these parts of split models alone.
    """
    models = {}
    for architecture in server.architectures:
        initial = server.initial_state(architecture)
        names = float_state(server.model(architecture, initial), parts=parts)
        models[architecture] = {name: initial[name] for name in names}
    if aggregation == "same-shape":
        for architecture, weights in models.items():
            server.state[_key("model", architecture)] = weights
        return
    union: dict[str, Tensor] = {}
    for architecture in sorted(models, key=lambda a: sum(t.numel() for t in models[a].values())):
        union |= models[architecture]
        server.state[_key("names", architecture)] = {name: t.new_empty(0) for name, t in models[architecture].items()}
    server.state[_key("model", _UNION)] = union


def init_zeros(server: Server, aggregation: Aggregation, what: str) -> None:
    """Zeros in the shape of the shared parameters into the server's state, for `weights_for` and `accumulate`."""
    names = parameter_names(server)
    shared_models = server.architectures if aggregation == "same-shape" else [_UNION]
    for shared in shared_models:
        model = get_group(server.state, _key("model", shared))
        server.state[_key(what, shared)] = {name: torch.zeros_like(t) for name, t in model.items() if name in names}


def weights_for(server: Server, aggregation: Aggregation, architecture: str, what: str = "model") -> Group:
    """What is shared with one architecture: the server's own tensors, not copies."""
    if aggregation == "same-shape":
        return get_group(server.state, _key(what, architecture))
    union = get_group(server.state, _key(what, _UNION))
    return {name: union[name] for name in get_group(server.state, _key("names", architecture)) if name in union}


def all_weights(server: Server) -> dict[str, Group]:
    """All shared weights by their names in the server's state: the union's, or one model's per architecture."""
    return {name: get_group(server.state, name) for name in server.state if name.startswith(_key("model", ""))}


def parameter_names(server: Server) -> frozenset[str]:
    """Names of the parameters of all architectures. All else that is shared are buffers: averaged, and no more."""
    templates = (server.model(architecture, {}) for architecture in server.architectures)
    return frozenset(name for template in templates for name in float_state(template, buffers=False))


def holder_counts(server: Server, aggregation: Aggregation, architecture: str) -> dict[str, int]:
    """N_k: how many of the clients present share each tensor of an architecture."""
    counts = Counter(member.architecture for member in server.clients.values())
    names = weights_for(server, aggregation, architecture)
    if aggregation == "same-shape":
        return dict.fromkeys(names, counts[architecture])
    held = {a: get_group(server.state, _key("names", a)) for a in counts}
    return {name: sum(count for a, count in counts.items() if name in held[a]) for name in names}


def average(
    server: Server,
    aggregation: Aggregation,
    models: Mapping[int, Group],
    weights: Mapping[int, float],
    rate: float = 1.0,
    step: Step | None = None,
) -> None:
    """Replace the shared weights by the mean of the clients' `models`; what nobody sent keeps its value.

    models: client number -> its weights by name. weights: client number -> its share, before normalization. For the
    others see `server_step`.
    """

    def mean(base: Group, members: list[int]) -> dict[str, Tensor]:
        theirs = [models[i] for i in members]
        shares = [weights[i] for i in members]
        if aggregation == "same-shape":
            return weighted_mean(theirs, shares)
        return layer_wise_mean(theirs, shares, base)

    server_step(server, aggregation, models, mean, rate, step=step)


def server_step(
    server: Server,
    aggregation: Aggregation,
    models: Mapping[int, Group],
    target: Target,
    rate: float = 1.0,
    step: Step | None = None,
) -> None:
    """Move every shared model W towards V = `target` (W, its clients).

    Parameters: W <- W + rate (V - W); with rate 1 W is V, bit for bit; `step` takes the place of the rate. Buffers
    become V. A tensor that no client sent keeps its value.
    """
    names = parameter_names(server) if rate != 1 or step else frozenset()
    for shared, members in _clients_by_model(server, aggregation, models).items():
        base = get_group(server.state, _key("model", shared))
        new = target(base, members)
        sent = names & {name for i in members for name in models[i]}
        change = {name: new[name] - base[name] for name in new if name in sent}
        if step is not None:
            change = step(_escaped(shared), change)
        server.state[_key("model", shared)] = {**new, **{name: base[name] + rate * c for name, c in change.items()}}


def accumulate(server: Server, aggregation: Aggregation, what: str, changes: Mapping[int, Group]) -> None:
    """Add the clients' `delta_entries` (client number -> tensors by name) to what `init_zeros` has begun."""
    for shared, members in _clients_by_model(server, aggregation, changes).items():
        total = dict(get_group(server.state, _key(what, shared)))
        for name in total:
            total[name] = sum((changes[i][name] for i in members if name in changes[i]), start=total[name])
        server.state[_key(what, shared)] = total


def set_tensors(server: Server, aggregation: Aggregation, architecture: str, tensors: Group) -> None:
    """Put copies of `tensors` in the place of those of their names in what is shared with one architecture."""
    shared = _key("model", architecture if aggregation == "same-shape" else _UNION)
    server.state[shared] = {**get_group(server.state, shared), **{name: t.clone() for name, t in tensors.items()}}


# messages ---------------------------------------------------------------------------------------------------------


def broadcast(server: Server, aggregation: Aggregation, client_id: int) -> Message:
    """The client's shared weights as a message: group "model"."""
    return {"model": weights_for(server, aggregation, server.clients[client_id].architecture)}


def upload(client: Client) -> Message:
    """The client's weights and float buffers as "model", its number of training samples (int64) as "n"."""
    return {"model": float_state(client.model), "n": torch.tensor(client.n)}


def client_weights(uploads: Mapping[int, Message]) -> dict[int, Group]:
    """The group "model" of every upload."""
    return {client_id: get_group(message, "model") for client_id, message in uploads.items()}


def client_shares(server: Server, uploads: Mapping[int, Message], weighting: Weighting) -> dict[int, float]:
    """Every client's share before normalization, by the number of samples that it sent."""
    sent = {i: get_tensor(message, "n") if "n" in message else None for i, message in uploads.items()}
    return {i: server.share(i, weighting, n) for i, n in sent.items()}


# within -----------------------------------------------------------------------------------------------------------


def _clients_by_model(server: Server, aggregation: Aggregation, ids: Iterable[int]) -> dict[str, list[int]]:
    """Each shared model that any of the clients `ids` has -> the numbers of those who do."""
    numbers = list(ids)
    if aggregation == "same-shape":
        groups = {a: [i for i in numbers if server.clients[i].architecture == a] for a in server.architectures}
    else:
        groups = {_UNION: numbers}
    return {shared: members for shared, members in groups.items() if members}


def _key(what: str, architecture: str) -> str:
    return f"{what} {_escaped(architecture)}"


def _escaped(architecture: str) -> str:
    return architecture.replace("/", ":")  # a name in the state holds no "/", a user's architecture may
