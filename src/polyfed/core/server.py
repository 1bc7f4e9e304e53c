"""The server: its own state, what it knows of the clients, and its streams of random numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.client import Prepare, PublicData, as_floats
from polyfed.core.message import Group, State
from polyfed.core.model_factory import Architectures
from polyfed.core.randomness import generator
from polyfed.core.settings import Training


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows of a client."""

    architecture: str
    n: int  # training samples


class Server:
    """The server half's view of the federation.

    Attributes:
        state: the method's own named tensors, replaced and never written into. round, rounds: 1-based number of the
        present round, and how many are planned. exchange: name of the present passage. clients: who is present, by
        number. public: data that everybody may see, or None. classes: number of classes of the task. training:
        settings. prepare: turns stored inputs into what models take, alike for all (the first client's). example: no
        rows (0, ...) of stored inputs, which tell their type and shape to a method whose server makes inputs.
        log: numbers that the method wants in the round's record; emptied after every round.
        memory: what a method may compute anew at any time, by its purpose and client; never saved.

    Networks are those of `Method.build`: what `Method.join_models` adds exists on clients only.
    """

    def __init__(
        self,
        clients: Mapping[int, ClientInfo],
        architectures: Architectures,
        *,
        rounds: int,
        classes: int,
        seed: int,
        training: Training | None = None,
        public: PublicData | None = None,
        initial: Mapping[int, nn.Module] | None = None,
        prepare: Prepare = as_floats,
        example: Tensor | None = None,
    ) -> None:
        self.state: State = {}
        self.round = 0
        self.rounds = rounds
        self.exchange = "train"
        self.clients = dict(clients)
        self.classes = classes
        self.training = training or Training(rounds=rounds)
        self.public = public
        self.prepare = prepare
        self.input_example = torch.empty(0) if example is None else example[:0]
        self.log: dict[str, float] = {}
        self.cache: dict[tuple[str, int], Any] = {}
        self._members = dict(clients)
        self._names = tuple(dict.fromkeys(member.architecture for member in clients.values()))
        self._architectures = architectures
        self._seed = seed
        self._given = dict(initial or {})

    @property
    def architectures(self) -> list[str]:
        """All architectures, also of clients that join later, in order of first use."""
        return list(self._names)

    @property
    def auxiliary_model(self) -> str:
        """Architecture of the auxiliary model (`Method.auxiliary_model`); "" without one."""
        return self._architectures.auxiliary_model

    @property
    def all_client_ids(self) -> list[int]:
        """Numbers of all clients, also of those that join later."""
        return list(self._members)

    def set_available(self, present: Iterable[int]) -> None:
        """Let `clients` be those of the given numbers; the engine does so before every round."""
        numbers = list(present)
        if numbers != list(self.clients):
            self.clients = {number: self._members[number] for number in numbers}

    def of_one(self, client_id: int) -> Server:
        """A server that knows this client alone, with the part of the state that `keep_one` has kept of it."""
        member = self._members[client_id]
        mark = _mark(client_id)
        own = copy.copy(self)
        own.state = {name.removeprefix(mark): value for name, value in self.state.items() if name.startswith(mark)}
        own.clients = {client_id: member}
        own.log = {}
        own.cache = self.cache.setdefault(("server of one", client_id), {})
        own._members = {client_id: member}
        own._names = (member.architecture,)
        return own

    def keep_one(self, client_id: int, own: Server) -> None:
        """Keep the state of the server that knows this client alone as a part of this one's."""
        mark = _mark(client_id)
        others = {name: value for name, value in self.state.items() if not name.startswith(mark)}
        self.state = others | {f"{mark}{name}": value for name, value in own.state.items()}

    def generator(self, purpose: str, *ids: int) -> torch.Generator:
        """The server's stream for `purpose` in this round."""
        return generator(self._seed, f"server {purpose}", self.round, *ids)

    def initial(self, architecture: str, variant: str = "") -> dict[str, Tensor]:
        """Seeded weights of an architecture that belong to no client: where a shared model starts."""
        return self._architectures.initial(architecture, variant, alone=True)

    def client_weights(self, client_id: int) -> Group:
        """What was last kept of the client's weights (`keep`), else the seeded ones it starts from."""
        kept = self.state.get(f"weights {client_id}")
        if kept is None or isinstance(kept, Tensor):
            architecture = self.clients[client_id].architecture
            return self._architectures.initial(architecture, owner=client_id, given=self._given.get(client_id))
        return kept

    def store_weights(self, client_id: int, weights: Group) -> None:
        """Keep a client's uploaded weights in the state, for `weights`."""
        self.state[f"weights {client_id}"] = {name: tensor.detach().clone() for name, tensor in weights.items()}

    def has_weights(self, client_id: int) -> bool:
        """Whether the client has uploaded weights that were kept."""
        return f"weights {client_id}" in self.state

    def model(self, architecture: str, weights: Group, variant: str = "") -> nn.Module:
        """The template of an architecture holding `weights`, in eval mode, for a pass at the server."""
        return self._architectures.bound(architecture, variant, weights, alone=True).eval()


def _mark(client_id: int) -> str:
    """How the names of a state begin that belongs to the server of one client."""
    return f"client {client_id}: "
