"""The server: its state, the available clients, and its random streams."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from polyfed.core.client import Prepare, PublicData, to_float
from polyfed.core.frozen_network import FrozenNetwork
from polyfed.core.message import Group, State
from polyfed.core.model_factory import ModelFactory
from polyfed.core.randomness import generator
from polyfed.core.settings import Privacy, Training

PublicOutputs = Literal["scores", "representations"]


@dataclass(frozen=True)
class ClientInfo:
    """Facts about a client that the server has."""

    architecture: str
    num_samples: int  # training samples
    columns: tuple[int, ...] = ()  # of its table among the federation's, where clients have different ones


@dataclass(frozen=True)
class PublicPass:
    """One network's pass over public inputs, in eval mode and without gradient (`core.inference`).

    Attributes:
        client_id: number of the client whose network it is. weights: of the network, by name.
        outputs: "scores" (N, C), of inputs prepared as the public data are; or "representations" (N, D), of inputs
            prepared as the clients' own.
        rows: (N,) int64, which of the public inputs, in this order; None: all.
        round: number of the present round.
    """

    client_id: int
    weights: Group
    outputs: PublicOutputs
    rows: Tensor | None
    round: int


class Server:
    """A method's view of the server.

    Attributes:
        state: the method's named tensors, replaced and never modified in place.
        round, rounds: number of the present round (1-based), number of planned rounds.
        exchange: name of the present exchange.
        clients: available clients by number.
        public: public data, or None.
        classes: number of classes of the task.
        training: training settings. privacy: how clients' uploads are bounded and noised.
        prepare: converts stored inputs to model inputs (the first client's, as all are alike).
        input_example: stored inputs without rows (0, ...), for their type and shape.
        column_widths: where clients' tables have different columns, per column of the federation how many categories
            there are, 0 for a number.
        log: numbers for the round's record; emptied after every round.
        upload_weights: by client, see `upload_weight`.
        run_passes: computes passes over public inputs, in order; None: `core.inference` does so by itself.
        device: where uploads and the state lie during a round (`core.message.places_of`): main memory, or a GPU.

    Networks are those of `Method.build`; what `Method.join_models` adds exists on clients only.
    """

    def __init__(
        self,
        clients: Mapping[int, ClientInfo],
        model_factory: ModelFactory,
        *,
        rounds: int,
        classes: int,
        seed: int,
        training: Training | None = None,
        public: PublicData | None = None,
        initial: Mapping[int, nn.Module] | None = None,
        prepare: Prepare = to_float,
        example: Tensor | None = None,
    ) -> None:
        self.state: State = {}
        self.round = 0
        self.rounds = rounds
        self.exchange = "train"
        self.clients = dict(clients)
        self.classes = classes
        self.training = training or Training(rounds=rounds)
        self.privacy = Privacy()
        self.public = public
        self.prepare = prepare
        self.input_example = torch.empty(0) if example is None else example[:0]
        self.column_widths: tuple[int, ...] = ()
        self.log: dict[str, float] = {}
        self.upload_weights: Mapping[int, float] = {}
        self.run_passes: Callable[[Sequence[PublicPass]], list[Tensor]] | None = None
        self.device = torch.device("cpu")
        self._members = dict(clients)
        self._names = tuple(dict.fromkeys(member.architecture for member in clients.values()))
        self._model_factory = model_factory
        self._seed = seed
        self._given = dict(initial or {})

    @property
    def architectures(self) -> list[str]:
        """All architectures in order of first use, including those of clients that join later."""
        return list(self._names)

    @property
    def auxiliary_model(self) -> str:
        """Architecture of the auxiliary model (`Method.auxiliary_model`); "" without one."""
        return self._model_factory.auxiliary_model

    @property
    def frozen_network(self) -> FrozenNetwork:
        """The auxiliary model, of a method whose own is frozen."""
        found = self._model_factory.frozen_network
        assert found is not None
        return found

    @property
    def all_client_ids(self) -> list[int]:
        """Numbers of all clients, including those that join later."""
        return list(self._members)

    def set_available(self, present: Iterable[int]) -> None:
        """Set `clients` to those with the given numbers; called by the engine before every round."""
        numbers = list(present)
        if numbers != list(self.clients):
            self.clients = {number: self._members[number] for number in numbers}

    def of_one(self, client_id: int) -> Server:
        """A server with this client only, and its state as stored by `keep_one`."""
        member = self._members[client_id]
        mark = _mark(client_id)
        own = copy.copy(self)
        own.state = {name.removeprefix(mark): value for name, value in self.state.items() if name.startswith(mark)}
        own.clients = {client_id: member}
        own.log = {}
        own._members = {client_id: member}
        own._names = (member.architecture,)
        return own

    def keep_one(self, client_id: int, own: Server) -> None:
        """Store the state of a server with this client only as a part of this server's state."""
        mark = _mark(client_id)
        others = {name: value for name, value in self.state.items() if not name.startswith(mark)}
        self.state = others | {f"{mark}{name}": value for name, value in own.state.items()}

    def upload_weight(self, client_id: int) -> float:
        """How much a client's upload counts in `Method.aggregate`: 1, or less if it is of an earlier round
        (`Method.staleness_weighting`).
        """
        return self.upload_weights.get(client_id, 1.0)

    def share(self, client_id: int, weighting: str, samples: Tensor | None = None) -> float:
        """How much a client counts in a mean, before normalization: its samples with weighting "samples", else 1.

        samples: as the client sent it; None: as it introduced itself.
        """
        if weighting != "samples":
            return 1.0
        return float(self.clients[client_id].num_samples if samples is None else samples)

    def generator(self, purpose: str, *ids: int) -> torch.Generator:
        """The server's random stream for `purpose` in this round."""
        return generator(self._seed, f"server {purpose}", self.round, *ids)

    def generator_of_run(self, purpose: str) -> torch.Generator:
        """The server's random stream for `purpose`, the same in every round."""
        return generator(self._seed, f"server {purpose}", 0)

    def initial_state(self, architecture: str, variant: str = "") -> dict[str, Tensor]:
        """Initial weights of an architecture for shared models, a function of the seed."""
        return self._model_factory.initial_state(architecture, variant, alone=True)

    def client_weights(self, client_id: int) -> Group:
        """The client's weights last stored by `store_weights`, else its initial weights."""
        kept = self.state.get(f"weights {client_id}")
        if kept is None or isinstance(kept, Tensor):
            architecture = self.clients[client_id].architecture
            return self._model_factory.initial_state(architecture, owner=client_id, given=self._given.get(client_id))
        return kept

    def store_weights(self, client_id: int, weights: Group) -> None:
        """Store a client's uploaded weights in the state, for `client_weights`."""
        self.state[f"weights {client_id}"] = {name: tensor.detach().clone() for name, tensor in weights.items()}

    def has_weights(self, client_id: int) -> bool:
        """Whether weights of the client have been stored."""
        return f"weights {client_id}" in self.state

    def model(self, architecture: str, weights: Group, variant: str = "") -> nn.Module:
        """The architecture's template network with `weights`, in eval mode, for use at the server."""
        return self._model_factory.load(architecture, variant, weights, alone=True).eval()


def _mark(client_id: int) -> str:
    """Prefix of state names that belong to the server of one client."""
    return f"client {client_id}: "
