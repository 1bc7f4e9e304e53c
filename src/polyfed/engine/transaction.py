"""What a federation is between two rounds; a round changes it as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.client import Client
from polyfed.core.message import State, shallow_copy
from polyfed.core.server import Server
from polyfed.engine.executors.jobs import JobResult
from polyfed.engine.plugin import Plugin
from polyfed.engine.weight_store import WeightRow, client_row
from polyfed.engine.work_in_flight import WorkInFlight
from polyfed.errors import RunError


@dataclass(frozen=True)
class Snapshot:
    """A federation between two rounds.

    weights: None for a client that has none yet. work: under way. made_of: see `RunResult`.
    """

    round: int
    server: State
    weights: Mapping[int, WeightRow | None]
    states: Mapping[int, State]
    work: Sequence[WorkInFlight] = ()
    made_of: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Transaction:
    """The state of server and clients: begin a round, commit what comes of its jobs, or undo all of it.

    Tensors of a state are replaced, never written into, so that references are enough to go back.

    Attributes:
        server, clients: whose state it is. plugins: may hold work back. history: the records so far.
        present: number of a round -> who is in the federation then. made_of: see `RunResult`.
        is_open: whether a round has begun that is neither through nor undone.
    """

    server: Server
    clients: Sequence[Client]
    plugins: Sequence[Plugin]
    history: list[dict[str, Any]]
    present: Callable[[int], list[int]]
    made_of: Callable[[], Mapping[str, Any]]

    def __post_init__(self) -> None:
        self._begun = Snapshot(0, {}, {}, {})
        self._before: dict[
            int, tuple[WeightRow | None, State]
        ] = {}  # weights and state before this round, for clients that it has changed
        self.is_open = False

    def begin(self, number: int) -> None:
        """Begin round `number`."""
        self._before = {}
        self.is_open = True
        self._begun = Snapshot(number - 1, shallow_copy(self.server.state), {}, {}, self.work)

    def commit(self, outcomes: Sequence[JobResult]) -> None:
        """Let clients take over the results of their jobs."""
        for outcome in outcomes:
            client = self.clients[outcome.client_id]
            self._before.setdefault(client.id, (client_row(client), client.state))
            client.weights, client.state = outcome.weights, outcome.state
            client.version += 1

    def check_untouched(self, written: Iterable[int]) -> None:
        """Whether nobody has written into uploads, of which the weights that clients took over may be a part.

        Args:
            written: whose upload the server has written into.

        Raises:
            RunError: somebody has.
        """
        rows = {number: client_row(self.clients[number]) for number in self._before}
        for number in (*written, *(number for number, row in rows.items() if row is not None and not row.is_intact)):
            raise RunError(f"{self.clients[number].title}'s upload was written into; copy what is to be changed")

    def end(self) -> None:
        """The round counts; what was before is forgotten, or rows that nobody needs would stay."""
        self.is_open = False
        self._before = {}

    def undo(self) -> None:
        """Be again what the federation was when the round began."""
        weights = {client_id: row for client_id, (row, _) in self._before.items()}
        states = {client_id: own for client_id, (_, own) in self._before.items()}
        begun = self._begun
        self.restore(Snapshot(begun.round, begun.server, weights, states, begun.work))
        self.is_open = False

    def snapshot(self, number: int) -> Snapshot:
        """The present state, after round `number`."""
        weights = {client.id: client_row(client) for client in self.clients}
        states = {client.id: client.state for client in self.clients}
        server = shallow_copy(self.server.state)
        return Snapshot(number, server, weights, states, self.work, self.made_of())

    def restore(self, snapshot: Snapshot) -> None:
        """Be what the federation was then; of clients, those that the snapshot names. Later records are forgotten."""
        server = self.server
        server.state = shallow_copy(snapshot.server)
        server.round = snapshot.round
        server.exchange = "train"
        server.set_available(self.present(max(1, snapshot.round)))
        server.log.clear()
        for plugin in self.plugins:
            plugin.work = [one for one in snapshot.work if plugin.holds_work]
        del self.history[snapshot.round :]
        for number, weights in snapshot.weights.items():
            client = self.clients[number]
            client.weights = weights
            client.state = shallow_copy(snapshot.states[number])
            client.version += 1

    @property
    def work(self) -> list[WorkInFlight]:
        """What plugins know to be under way."""
        return [one for plugin in self.plugins for one in plugin.work]
