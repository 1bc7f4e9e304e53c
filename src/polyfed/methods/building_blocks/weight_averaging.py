"""The model that clients share by averaging, when their architectures differ.

Two ways, both from the FedIN paper: "layer-wise" (eq. 19) keeps the union of all architectures' tensors by name and
averages each over the clients that have it; "same-shape" (eq. 20, 21) keeps one model per architecture and averages
within it. With one architecture both are FedAvg. "by-name" is "layer-wise" that also takes unrelated networks, which
have nothing but a head in common. Beside the model other named tensors can be shared alike (`zeros`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, group, tensor
from polyfed.core.method import Context, Method, Needs, Trained, knobs
from polyfed.core.modules import floats, load
from polyfed.core.server import Server
from polyfed.core.settings import Stage
from polyfed.core.upload_forms import SAMPLES, Form, as_sent
from polyfed.functional.averaging import layer_wise_mean, weighted_mean
from polyfed.models.split import Part

Aggregation = Literal["layer-wise", "same-shape", "by-name"]
OfOneFamily = Literal["layer-wise", "same-shape"]  # of methods whose networks share more than a head, or no head
Weighting = Literal["samples", "uniform"]
Target = Callable[[Group, list[int]], dict[str, Tensor]]  # a shared model, numbers of its clients -> where it should go
_UNION = "union"


def needs(
    aggregation: Aggregation,
    split_model: bool = False,
    parts: tuple[Part, ...] | None = None,
    instead: str = "use method.aggregation = 'same-shape'",
    equal_cuts: bool = False,
    cuts_on_grids: bool = False,
) -> Needs:
    """What networks must be like: layer-wise, tensors of one name have one shape everywhere, and not those of heads
    alone are averaged. With `parts`, of these parts of split models; heads are then others' business.
    All else is as in `Needs`.
    """
    return Needs(
        split_model=split_model,
        nested=aggregation != "same-shape",
        nested_parts=parts,
        more_than_head=aggregation == "layer-wise" and parts is None,
        instead=instead,
        equal_cuts=equal_cuts,
        cuts_on_grids=cuts_on_grids,
    )


def start(
    server: Server, aggregation: Aggregation, buffers: bool = True, parts: Collection[Part] | None = None
) -> None:
    """Seeded initial weights into the server's state; the union takes every tensor from the largest that has it.

    Without `buffers`, of parameters alone: then clients send no others, and BatchNorm's statistics are their own.
    With `parts`, of these parts of split models alone.
    """
    models = {a: _shared(server, a, buffers, parts) for a in server.architectures}
    if aggregation == "same-shape":
        for architecture, weights in models.items():
            server.state[_key("model", architecture)] = weights
        return
    union: dict[str, Tensor] = {}
    for architecture in sorted(models, key=lambda a: sum(t.numel() for t in models[a].values())):
        union |= models[architecture]
        server.state[_key("names", architecture)] = {name: t.new_empty(0) for name, t in models[architecture].items()}
    server.state[_key("model", _UNION)] = union


def zeros(server: Server, aggregation: Aggregation, what: str) -> None:
    """Zeros in the shape of the shared model's parameters into the server's state, for `read` and `add`."""
    names = parameters(server)
    for shared in server.architectures if aggregation == "same-shape" else (_UNION,):
        model = group(server.state, _key("model", shared))
        server.state[_key(what, shared)] = {name: torch.zeros_like(t) for name, t in model.items() if name in names}


def read(server: Server, aggregation: Aggregation, architecture: str, what: str = "model") -> Group:
    """What is shared with one architecture: the server's own tensors, not copies."""
    if aggregation == "same-shape":
        return group(server.state, _key(what, architecture))
    union = group(server.state, _key(what, _UNION))
    return {name: union[name] for name in group(server.state, _key("names", architecture)) if name in union}


def parameters(server: Server) -> frozenset[str]:
    """Names of the parameters of all architectures. All else that is shared are buffers: averaged, and no more."""
    templates = (server.model(architecture, {}) for architecture in server.architectures)
    return frozenset(name for template in templates for name in floats(template, buffers=False))


def owners(server: Server, aggregation: Aggregation, architecture: str) -> dict[str, int]:
    """N_k: how many of the clients present share each tensor of an architecture."""
    counts = Counter(member.architecture for member in server.clients.values())
    names = read(server, aggregation, architecture)
    if aggregation == "same-shape":
        return dict.fromkeys(names, counts[architecture])
    held = {a: group(server.state, _key("names", a)) for a in counts}
    return {name: sum(count for a, count in counts.items() if name in held[a]) for name in names}


def average(
    server: Server,
    aggregation: Aggregation,
    models: Mapping[int, Group],
    weights: Mapping[int, float],
    rate: float = 1.0,
) -> None:
    """Replace the shared weights by the mean of the clients' `models`; what nobody sent keeps its value.

    Args:
        server: holds the shared weights. aggregation: see `start`.
        models: client number -> its weights by name. weights: client number -> its share, before normalisation.
        rate: see `advance`.
    """

    def mean(base: Group, members: list[int]) -> dict[str, Tensor]:
        held, parts = [models[i] for i in members], [weights[i] for i in members]
        return weighted_mean(held, parts) if aggregation == "same-shape" else layer_wise_mean(held, parts, base)

    advance(server, aggregation, models, mean, rate)


def advance(
    server: Server,
    aggregation: Aggregation,
    models: Mapping[int, Group],
    target: Target,
    rate: float = 1.0,
    momentum: float = 0.0,
) -> None:
    """Move every shared model W towards V = `target` (W, its clients): the server's step.

    Parameters: m <- momentum m + (V - W), W <- W + rate m, with m = 0 before the first round; with rate 1 and momentum
    0 W is V, bit for bit. Buffers become V. A tensor that no client sent keeps its value, and its m.

    Args:
        server: holds W, and m if there is momentum. aggregation: see `start`.
        models: client number -> its weights by name.
    """
    names = parameters(server) if rate != 1 or momentum else frozenset()
    for shared, members in _by_model(server, aggregation, models):
        base = group(server.state, _key("model", shared))
        new = target(base, members)
        sent = names & {name for i in members for name in models[i]}
        change = {name: new[name] - base[name] for name in new if name in sent}
        if momentum and change:
            velocity = _key("velocity", shared)
            before = group(server.state, velocity) if velocity in server.state else {}
            change = {name: momentum * before[name] + c if name in before else c for name, c in change.items()}
            server.state[velocity] = {**before, **change}
        server.state[_key("model", shared)] = {**new, **{name: base[name] + rate * c for name, c in change.items()}}


def add(server: Server, aggregation: Aggregation, what: str, changes: Mapping[int, Group]) -> None:
    """Add the clients' `changes` (client number -> tensors by name) to what `zeros` has begun."""
    for shared, members in _by_model(server, aggregation, changes):
        total = dict(group(server.state, _key(what, shared)))
        for name in total:
            total[name] = sum((changes[i][name] for i in members if name in changes[i]), start=total[name])
        server.state[_key(what, shared)] = total


def replace(server: Server, aggregation: Aggregation, architecture: str, tensors: Group) -> None:
    """Put copies of `tensors` in the place of those of their names in what is shared with one architecture."""
    shared = _key("model", architecture if aggregation == "same-shape" else _UNION)
    server.state[shared] = {**group(server.state, shared), **{name: t.clone() for name, t in tensors.items()}}


def broadcast(server: Server, aggregation: Aggregation, client_id: int) -> Message:
    """The client's shared weights as a message: group "model"."""
    return {"model": read(server, aggregation, server.clients[client_id].architecture)}


def upload(client: Client) -> Message:
    """The client's weights and float buffers as "model", its number of training samples (int64) as "n"."""
    return {"model": floats(client.model), "n": torch.tensor(client.n)}


def models(server: Server) -> dict[str, Group]:
    """All shared weights by their names in the server's state: the union's, or one model's per architecture."""
    return {name: group(server.state, name) for name in server.state if name.startswith(_key("model", ""))}


def uploaded(uploads: Mapping[int, Message]) -> dict[int, Group]:
    """The group "model" of every upload."""
    return {client_id: group(message, "model") for client_id, message in uploads.items()}


def shares(uploads: Mapping[int, Message], weighting: Weighting) -> dict[int, float]:
    """Every client's share before normalisation: its number of samples as sent, or 1."""
    return {i: float(tensor(message, "n")) if weighting == "samples" else 1.0 for i, message in uploads.items()}


def _by_model(server: Server, aggregation: Aggregation, ids: Iterable[int]) -> Iterator[tuple[str, list[int]]]:
    """Each shared model that any of the clients `ids` has, with the numbers of those who do."""
    numbers = list(ids)
    if aggregation == "same-shape":
        groups = {a: [i for i in numbers if server.clients[i].architecture == a] for a in server.architectures}
    else:
        groups = {_UNION: numbers}
    yield from ((shared, members) for shared, members in groups.items() if members)


def _key(what: str, architecture: str) -> str:
    return f"{what} {architecture.replace('/', ':')}"  # a name in the state holds no "/", a user's architecture may


def _shared(server: Server, architecture: str, buffers: bool, parts: Collection[Part] | None) -> dict[str, Tensor]:
    initial = server.initial(architecture)
    return {name: initial[name] for name in floats(server.model(architecture, initial), buffers, parts)}


@knobs
class Averaging(Method):
    """FedAvg as a whole, among any networks: what a method that changes one hook of it starts from."""

    differs: ClassVar[str] = "depth: tensors of one name have one shape (same-shape: anything)"
    down: ClassVar[str] = "P"
    up: ClassVar[str] = "P + 1"
    states: ClassVar[str] = "server: w"
    changes: ClassVar[tuple[str, ...]] = ("model",)
    form: ClassVar[Form | None] = {"model": as_sent, "n": SAMPLES}
    starts_blank: ClassVar[bool] = True

    aggregation: Aggregation = "layer-wise"  # "same-shape": within each architecture; "by-name": also a head alone
    weighting: Weighting = "samples"  # "uniform" counts every client once

    @property
    def needs(self) -> Needs:
        return needs(self.aggregation)

    @property
    def scored(self) -> Stage:
        return "received"

    def start(self, server: Server) -> None:
        """Seeded initial weights."""
        start(server, self.aggregation)

    def broadcast(self, server: Server, client_id: int) -> Message:
        """The shared weights of the client's architecture."""
        return broadcast(server, self.aggregation, client_id)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """The mean of what came."""
        average(server, self.aggregation, uploaded(uploads), shares(uploads, self.weighting))

    def receive(self, client: Client, message: Message) -> Context:
        """The weights are the client's."""
        load(client.model, group(message, "model"))
        return {}

    def upload(self, client: Client, trained: Trained) -> Message:
        """Weights and number of samples."""
        return upload(client)
