"""What a federation is between two rounds; a round changes it as a whole or not at all.

Tensors of a state are replaced, never written into, so that references are enough to go back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyfed.core.message import State, shallow_copy
from polyfed.engine.plugin import Setup
from polyfed.engine.weight_store import ClientWeights, kept_weights
from polyfed.engine.work_in_flight import WorkInFlight


@dataclass(frozen=True)
class Snapshot:
    """A federation after a round.

    weights: None for a client that has none yet. work: under way.
    """

    round: int
    server: State
    weights: Mapping[int, ClientWeights | None]
    states: Mapping[int, State]
    work: Sequence[WorkInFlight] = ()


def take_snapshot(setup: Setup) -> Snapshot:
    """The present state."""
    weights = {client.id: kept_weights(client) for client in setup.clients}
    states = {client.id: client.state for client in setup.clients}
    work = [one for plugin in setup.plugins for one in plugin.work]
    return Snapshot(len(setup.history), shallow_copy(setup.server.state), weights, states, work)


def restore(setup: Setup, snapshot: Snapshot) -> None:
    """Be what the federation was then. Later records are forgotten."""
    server = setup.server
    server.state = shallow_copy(snapshot.server)
    server.round = snapshot.round
    server.exchange = "train"
    server.set_available(setup.present(max(1, snapshot.round)))
    server.log.clear()
    for plugin in setup.plugins:
        plugin.work = [one for one in snapshot.work if plugin.holds_work]
    del setup.history[snapshot.round :]
    for client in setup.clients:
        client.weights = snapshot.weights[client.id]
        client.state = shallow_copy(snapshot.states[client.id])
        client.version += 1
