"""A method in another setting: every client alone, networks with adapters, personalized, or asked what it would do.

`alone` is the control that says what the other clients are worth: every client is a federation of its own. Networks,
initial weights, batches, random streams and the method stay as they are, and every client has a server of its own,
which knows of nobody else. Nothing leaves a client, so that no byte counts as sent. With one client it is the method,
bit for bit. Where there are more, `Server.state` holds the state of client 3's server under names that begin with
"client 3: ", in one state for checkpoints and for resuming. An auxiliary model (`Method.auxiliary_model`) stays that of
the whole federation.

`adapted`: clients train adapters and heads of frozen networks, which may differ. What the method sends stays as it is.

`personalized`: a method whose paper scores what clients receive, such as FedAvg, is scored by what a client makes of
that. Training stays as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.adapters import add_adapters, any_parameter
from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor, members
from polyfed.core.method import Context, Method, Phase, Requirements, TrainingResult
from polyfed.core.server import Server
from polyfed.core.settings import AdapterSettings, Personalization, Stage, Training, in_turn
from polyfed.core.upload_forms import BY_CLASS
from polyfed.engine.scoring import uses_default_predict
from polyfed.errors import ConfigError
from polyfed.functional.closed_forms import share_shift

# entries of messages and states
_COUNTS = "class counts"
_COUNTS_BY_CLIENT = "class counts by client"
_SHIFT = "class shift"


def alone(method: Method) -> Method:
    """The same method, with the same hyperparameters, where every client is a federation of its own.

    Its class extends the method's; only the half of the server is another.

    Raises:
        ValueError: it is such a method already.
    """
    if method.is_alone:
        raise ValueError(f"expected a method of clients together, got {method!r}, which is alone already")
    return _extend(method, Alone, is_alone=True)


def _extend(method: Method, part: type[Method], **declared: Any) -> Method:
    """The method with `part` before its class, whose declarations stay but for those that are given."""
    kind = type(method)
    kept = ("__doc__", "__module__", "name", "upload_form", "ignores_initial_weights")  # `part` has its own
    described = {name: getattr(kind, name) for name in kept} | declared
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
    beside = method.auxiliary_model
    if method.delta_entries or (beside is not None and not beside.frozen) or any(makes):
        raise ConfigError(
            f"adapters: expected a method that neither sends nor makes networks, such as local, fedgh, fedproto "
            f"or fd, got '{method.name}'; fedlora averages adapters"
        )
    return _extend(method, Adapted, adapters=adapters)


class Adapted(Method):
    """Networks with adapters, for a method that leaves them as they are; stands before the method's own class."""

    def __repr__(self) -> str:
        return f"adapted({super().__repr__()}, {self.adapters!r})"

    def variant(self, server: Server, client_id: int) -> str:
        """The client's rank."""
        adapters = self.adapters
        assert adapters is not None
        return in_turn(adapters.ranks, client_id)

    def build(self, model: Any, variant: str) -> nn.Module:
        """The network with adapters; without a client, those of the first rank."""
        adapters = self.adapters
        assert adapters is not None
        rank = variant or in_turn(adapters.ranks, 0)
        return add_adapters(model, int(rank), adapters.alpha, adapters.layers)

    def phases(self, training: Training) -> Sequence[Phase]:
        """The method's; frozen layers run in eval mode."""
        return [
            phase if phase.trains is not None else dataclasses.replace(phase, trains=any_parameter)
            for phase in super().phases(training)
        ]


def personalized(method: Method, how: Personalization) -> Method:
    """The same method, with the same hyperparameters, where what a client receives becomes its own before it is scored.

    Its class extends the method's.

    Args:
        how: "tuned", by local training: the stage is "personal"; or "shares", by the client's shares of the classes.

    Raises:
        ConfigError: the method's paper scores something else; or scores are no network's, to which shares can be added.
    """
    if method.evaluation_stage != "received":
        raise ConfigError(
            f"personalize: expected a method that scores what clients receive, such as fedavg, got '{method.name}', "
            f"which scores the stage '{method.evaluation_stage}'"
        )
    if how == "tuned":
        return _extend(method, ScoredTuned, personalize=how)
    if not uses_default_predict(method):
        raise ConfigError(
            f"personalize: expected a method that predicts by the network's output for 'shares', got '{method.name}'"
        )
    form = None if method.upload_form is None else {**method.upload_form, _COUNTS: BY_CLASS}
    return _extend(method, ScoredByShares, personalize=how, upload_form=form)


class ScoredTuned(Method):
    """Scores the client's network after local training on what it received; stands before the method's own class."""

    def __repr__(self) -> str:
        return f"personalized({super().__repr__()}, 'tuned')"

    @property
    def evaluation_stage(self) -> Stage:
        return "personal"


class ScoredByShares(Method):
    """Adds log(pi_kc / pi_c) to the score of class c of what client k receives; stands before the method's own class.

    pi_k: shares of the classes in the client's training rows; pi: in those of all that have sent an upload, and at
    least its own. Sent beside the method's own messages: up the client's counts, C ints; down their sum, C ints. The
    server keeps the newest counts of each client. What a client has trained itself is scored as it is, but for the
    stage "after_training".
    """

    def __repr__(self) -> str:
        return f"personalized({super().__repr__()}, 'shares')"

    @property
    def requirements(self) -> Requirements:
        own = super().requirements
        why = "it adds shares of classes to scores"
        return dataclasses.replace(own, classes=own.classes or why, shared_outputs=own.shared_outputs or why)

    @property
    def fixed_entries(self) -> Mapping[str, str]:
        return {**super().fixed_entries, _COUNTS: "how many rows of each class a client has"}

    @property
    def supports_dp_sgd(self) -> bool:
        """No, as counts of rows are sent as they are."""
        return False

    def broadcast(self, server: Server, client_id: int) -> Message:
        """What the method sends, and the counts of all clients."""
        message = super().broadcast(server, client_id)
        every = server.state.get(_COUNTS)
        return {**message, _COUNTS: every} if message and every is not None else message

    def receive(self, client: Client, message: Message) -> Context:
        """Keep the shift until the client has trained."""
        if _COUNTS in message:
            own = _class_counts(client)
            client.state[_SHIFT] = share_shift(own, get_tensor(message, _COUNTS).cpu().maximum(own))
        return super().receive(client, _without_counts(message))

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """The scores with the shift, if there is one."""
        scores = super().predict(model, x, context)
        return scores + context[_SHIFT].to(scores.device) if _SHIFT in context else scores

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        """What the method sends, and the client's counts."""
        client.state.pop(_SHIFT, None)
        message = super().upload(client, trained)
        return {**message, _COUNTS: _class_counts(client)} if message else message

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Sum the counts, beside what the method does."""
        super().aggregate(server, {number: _without_counts(message) for number, message in uploads.items()})
        new = {str(number): get_tensor(message, _COUNTS) for number, message in uploads.items() if message}
        if new:
            known = {**members(server.state, _COUNTS_BY_CLIENT), **new}
            server.state[_COUNTS_BY_CLIENT] = known
            server.state[_COUNTS] = torch.stack(list(known.values())).sum(dim=0, dtype=torch.int32)


def _class_counts(client: Client) -> Tensor:
    """Training rows of each class: (C,) int32."""
    return torch.bincount(client.data.train.y, minlength=client.classes).int()


def _without_counts(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != _COUNTS}


def preview(method: Method, server: Server, present: Iterable[int] | None = None) -> Server:
    """A copy of the server in round 1, after `start` and `plan`.

    Args:
        server: before round 1. present: who is there; default: whom the server knows.
    """
    trial = copy.copy(server)
    trial.state = {}
    trial.log = {}
    trial.round = 1
    if present is not None:
        trial.set_available(present)
    method.init_server(trial)
    method.start_round(trial, list(trial.clients))
    return trial
