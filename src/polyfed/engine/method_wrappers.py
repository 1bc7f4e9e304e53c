"""A method in another setting: every client alone, networks with adapters, or asked what it would do in round 1.

`alone` is the control that says what the other clients are worth: every client is a federation of its own. Networks,
initial weights, batches, random streams and the method stay as they are, and every client has a server of its own,
which knows of nobody else. Nothing leaves a client, so that no byte counts as sent. With one client it is the method,
bit for bit. Where there are more, `Server.state` holds the state of client 3's server under names that begin with
"client 3: ", in one state for checkpoints and for resuming. An auxiliary model (`Method.auxiliary_model`) stays that of
the whole federation.

`adapted`: clients train adapters and heads of frozen networks, which may differ. What the method sends stays as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from polyfed.core.adapters import add_adapters, any_parameter
from polyfed.core.message import Message
from polyfed.core.method import Method, Phase
from polyfed.core.server import Server
from polyfed.core.settings import AdapterSettings, Training, in_turn
from polyfed.errors import ConfigError


def alone(method: Method) -> Method:
    """The same method, with the same hyperparameters, where every client is a federation of its own.

    Its class extends the method's; only the half of the server is another.

    Raises:
        ValueError: it is such a method already.
    """
    if method.card.alone:
        raise ValueError(f"expected a method of clients together, got {method!r}, which is alone already")
    return _extend(method, Alone, alone=True)


def _extend(method: Method, part: type[Method], **declared: Any) -> Method:
    """The method with `part` before its class, and a card that declares this, too."""
    kind = type(method)
    card = dataclasses.replace(kind.card, **declared)
    described = {"__doc__": kind.__doc__, "__module__": kind.__module__, "card": card}
    extended: Method = object.__new__(type(kind.__name__, (part, kind), described))
    vars(extended).update(vars(method))
    return extended


class Alone(Method):
    """The server's half of a method, for a server for each client; stands before the method's own class."""

    def __repr__(self) -> str:
        """As it is made."""
        return f"alone({super().__repr__()})"

    def init_server(self, server: Server) -> None:
        """Before round 1: every client's server fills its state."""
        start = super().init_server
        for _, own in own_servers(server, server.all_client_ids):
            start(own)

    def start_round(self, server: Server, selected: Sequence[int]) -> None:
        """Every server that is there plans for its own client, as far as that is selected."""
        plan = super().start_round
        for number, own in own_servers(server, server.clients):
            plan(own, [one for one in selected if one == number])

    def broadcast(self, server: Server, client_id: int) -> Message:
        """What the client's own server sends to it."""
        return super().broadcast(own_server(server, client_id), client_id)

    def variant(self, server: Server, client_id: int) -> str:
        """What the client's own server says of its network."""
        return super().variant(own_server(server, client_id), client_id)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Every server that is there aggregates the upload of its own client, if there is one."""
        aggregate = super().aggregate
        for number, own in own_servers(server, server.clients):
            aggregate(own, {one: message for one, message in uploads.items() if one == number})

    def nbytes_in_paper(self, message: Message) -> int:
        """Nothing crosses."""
        return 0


def own_server(server: Server, client_id: int) -> Server:
    """One client's own server, to be read."""
    return server if len(server.all_client_ids) == 1 else server.of_one(client_id)


def own_servers(server: Server, numbers: Iterable[int]) -> Iterator[tuple[int, Server]]:
    """The own servers of these clients, to be worked with one after the other; what they then are is kept in `server`.

    Numbers that several of them log stand in the record as their mean.
    """
    everybody = server.all_client_ids
    if len(everybody) == 1:
        yield everybody[0], server
        return
    logged: dict[str, list[float]] = {}
    for number in list(numbers):
        own = server.of_one(number)
        yield number, own
        server.keep_one(number, own)
        for name, value in own.log.items():
            logged.setdefault(name, []).append(value)
    for name, values in logged.items():
        server.log[name] = statistics.fmean(values)


def adapted(method: Method, adapters: AdapterSettings) -> Method:
    """The same method, with the same hyperparameters, where clients train adapters and heads of frozen networks.

    Its class extends the method's.

    Raises:
        ConfigError: the method sends weights of networks, or makes networks of its own.
    """
    makes = [
        getattr(method, hook).__func__ is not getattr(Method, hook) for hook in ("variant", "build", "join_models")
    ]
    if method.card.delta_entries or method.auxiliary_model is not None or any(makes):
        raise ConfigError(
            f"adapters: expected a method that neither sends nor makes networks, such as local, fedgh, fedproto, fedsa "
            f"or fd, got '{method.name}'; fedlora averages adapters"
        )
    return _extend(method, Adapted, adapters=adapters)


class Adapted(Method):
    """Networks with adapters, for a method that leaves them as they are; stands before the method's own class."""

    def __repr__(self) -> str:
        return f"adapted({super().__repr__()}, {self.card.adapters!r})"

    def variant(self, server: Server, client_id: int) -> str:
        """The client's rank."""
        adapters = self.card.adapters
        assert adapters is not None
        return in_turn(adapters.ranks, client_id)

    def build(self, model: Any, variant: str) -> nn.Module:
        """The network with adapters; without a client, those of the first rank."""
        adapters = self.card.adapters
        assert adapters is not None
        rank = variant or in_turn(adapters.ranks, 0)
        return add_adapters(model, int(rank), adapters.alpha, adapters.layers)

    def phases(self, training: Training) -> Sequence[Phase]:
        """The method's; frozen layers run in eval mode."""
        return [
            phase if phase.trains is not None else dataclasses.replace(phase, trains=any_parameter)
            for phase in super().phases(training)
        ]


def preview(method: Method, server: Server, present: Iterable[int] | None = None) -> Server:
    """A copy of the server in round 1, after `start` and `plan`.

    Args:
        server: before round 1. present: who is there; default: whom the server knows.
    """
    trial = copy.copy(server)
    trial.state = {}
    trial.log = {}
    trial.cache = {}
    trial.round = 1
    if present is not None:
        trial.set_available(present)
    method.init_server(trial)
    method.start_round(trial, list(trial.clients))
    return trial
