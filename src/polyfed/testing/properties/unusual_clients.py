"""Clients with few data, BatchNorm, weights that are no numbers, and clients that are not selected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, first_nonfinite, flatten
from polyfed.core.method import Context
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.engine.federation import Federation
from polyfed.testing import fixtures as worlds
from polyfed.testing.fixtures import SHORT, SIZES, received
from polyfed.testing.kit import AggregationScene, ConformanceKit, NotApplicable
from polyfed.testing.spy import Spy


def degenerate_clients(kit: ConformanceKit) -> None:
    """Missing classes, one class, one sample, batches larger than the data: nobody breaks, everybody learns."""
    among = kit.world(sizes=(1, 16, 10, 20, 3, 17))
    begun: dict[int, dict[str, Tensor]] = {}
    still: set[int] = set()

    def receive(call: Callable[..., Context], client: Client, message: Message) -> Context:
        context = call(client, message)
        begun[client.id] = {name: p.detach().clone() for name, p in client.model.named_parameters()}
        return context

    def upload(call: Callable[..., Message], client: Client, trained: Any) -> Message:
        now = client.model.named_parameters()
        if trained.steps and all(torch.equal(p, begun[client.id][name]) for name, p in now):
            still.add(client.id)
        return call(client, trained)

    for size in (8, 64, 1):
        still.clear()
        spy = Spy(kit.method, receive=receive, upload=upload)
        federation = kit.runs(among, spy, Training(rounds=2, local_epochs=1, batch_size=size, lr=0.01))
        kit.all_finite(federation, f"with awkward clients and batches of {size}")
        for record in federation.history:
            if record["refused"]:
                kit.fail(f"with batches of {size} it was refused: {record['refused'][0]}")
        if still:
            kit.fail(
                f"with batches of {size}, client {min(still)} ({among.clients[min(still)].n} samples) learns nothing"
            )


def batchnorm(kit: ConformanceKit) -> None:
    """A model with BatchNorm works, and whoever shares its weights shares its statistics, averaged over all."""
    among = kit.world(one=True, norm=True, sizes=(9, *SIZES[1:]))
    scenes: list[AggregationScene] = []
    kit.aggregations(among, SHORT, scenes.append)
    federation = scenes[-1].federation
    kit.all_finite(federation, "with BatchNorm")
    shared = [name for name in _shared(federation) if name.endswith("running_mean")]
    weights = [name for name in _shared(federation) if name.endswith("norm.weight")]
    if not weights:
        return
    if not shared:
        kit.fail("BatchNorm's weights are shared and its running statistics are not (those of the initial model stay)")
    got = received(federation, 0)
    for name in shared:
        each = [client.weights[name] for client in federation.clients if client.weights is not None]
        if any(torch.equal(got[name], own) for own in each) or not bool(got[name].any()):
            kit.fail(f"'{name}' of the shared model is one client's, or the initial one, not the mean over clients")
        lowest = torch.stack(each).amin(0) - 1e-6
        highest = torch.stack(each).amax(0) + 1e-6
        if not bool(((got[name] >= lowest) & (got[name] <= highest)).all()):
            kit.fail(f"'{name}' of the shared model lies outside the clients' own")


def _shared(federation: Federation) -> list[str]:
    """Tensors that are equal in what all clients receive, and have changed since the start."""
    every = [received(federation, client.id) for client in federation.clients]
    start = federation.server.initial_state(federation.clients[0].architecture)
    return [
        name
        for name, tensor in every[0].items()
        if all(name in other and torch.equal(tensor, other[name]) for other in every[1:])
        and not (name in start and torch.equal(tensor, start[name]))
    ]


def begins_alike(kit: ConformanceKit) -> None:
    """What the server sends alike to all in the end it sends alike at first: means of weights drawn apart are noise."""
    first: dict[int, dict[str, Tensor]] = {}
    last: dict[int, dict[str, Tensor]] = {}

    def broadcast(call: Callable[..., Message], server: Server, number: int) -> Message:
        message = call(server, number)
        if server.exchange == "train":
            first.setdefault(number, flatten(message))
            last[number] = flatten(message)
        return message

    kit.runs(kit.usual, Spy(kit.method, broadcast=broadcast))
    for name in set.intersection(*(set(sent) for sent in last.values())):
        begun = [sent[name] for sent in first.values() if name in sent]
        if len(begun) == len(last) and _all_equal([sent[name] for sent in last.values()]) and not _all_equal(begun):
            kit.fail(f"'{name}' is one for all after the first round and began otherwise for each")


def _all_equal(tensors: Sequence[Tensor]) -> bool:
    return all(torch.equal(tensors[0], other) for other in tensors[1:])


def nan_is_rejected(kit: ConformanceKit) -> None:
    """A client whose loss is NaN is refused and counted; it stays as it was, and the others go on."""
    sick = kit.runs(kit.world(prepare={1: lambda x: x * float("nan")}))
    for record in sick.history:
        if [entry["client"] for entry in record["refused"]] != [1]:
            kit.fail(f"client 1 sees NaN only; refused in round {record['round']} were {record['refused'] or 'none'}")
    if sick.clients[1].weights is not None or sick.clients[1].state:
        kit.fail("a refused client has kept something of the refused round")
    found = {name: t for name, t in worlds.state(sick).items() if not name.startswith("client 1:")}
    if bad := first_nonfinite({"all": found}):
        kit.fail(f"one client's NaN reached '{bad}'")
    if any(client.weights is None for client in sick.clients if client.id != 1):
        kit.fail("a healthy client did not learn beside one with NaN")


def unselected_are_left_alone(kit: ConformanceKit) -> None:
    """Who is not drawn neither sends nor receives, and stays as it was."""
    if any(one.who != "selected" for one in kit.method.exchanges(1)):
        raise NotApplicable("an exchange of every round goes to all clients")
    training = Training(rounds=1, batch_size=8, lr=0.1, client_fraction=0.5)
    federation = kit.run(training=training)
    record = federation.history[0]
    if sorted(map(int, record["bytes_by_client"])) != record["clients"]:
        kit.fail(f"drawn were {record['clients']}, bytes went to {sorted(record['bytes_by_client'])}")
    for client in federation.clients:
        if (client.weights is not None) != (client.id in record["clients"]) or (
            client.state and client.id not in record["clients"]
        ):
            kit.fail(f"client {client.id} changed without being drawn, or was drawn and did not change")
