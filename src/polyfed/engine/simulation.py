"""What rounds would take on the devices that clients are said to have (`polyfed.engine.devices`).

In a passage down and up, client k with what is sent to it (d bytes), what it computes (c operations: receiving,
training, what its upload needs) and what it sends (u bytes) takes

    t_k = [d > 0] (latency + 8 d / down) + c / compute + [u > 0] (latency + 8 u / up)   seconds,

times exp(jitter z), z drawn from a normal distribution for each (round, client). The server waits for the slowest that
is heard, at most until the deadline; a round is its passages one after the other, with the server's own time between
them where `server_compute` is set. Nothing of it depends on the machine, on the executor or on how rounds are resumed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from polyfed.core.client import Client
from polyfed.core.method import Method
from polyfed.core.model_factory import Architectures
from polyfed.core.randomness import generator
from polyfed.core.server import Server
from polyfed.engine.devices import Devices, Profile, dealt
from polyfed.engine.executors.base import at_work
from polyfed.engine.operation_counter import Operations, step_memory
from polyfed.errors import RequestError
from polyfed.units import human_bytes

__all__ = ["Clock", "Effort", "Simulation", "Spent", "memory_needs"]


class Effort(NamedTuple):
    """What a client does in a passage: bytes that it is sent, operations, bytes that it sends."""

    down: int
    operations: int
    up: int


class Spent(NamedTuple):
    """The seconds that it takes."""

    down: float = 0.0
    train: float = 0.0
    up: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.down + self.train + self.up


def spent(profile: Profile, effort: Effort, factor: float = 1.0) -> Spent:
    """The seconds of an effort on a device.

    >>> phone = Profile(compute=1e9, memory=1e9, down=8e6, up=8e5, latency=0.1)
    >>> spent(phone, Effort(down=1_000_000, operations=2 * 10**9, up=0))
    Spent(down=1.1, train=2.0, up=0.0)
    """
    down = profile.latency + 8 * effort.down / profile.down if effort.down else 0.0
    up = profile.latency + 8 * effort.up / profile.up if effort.up else 0.0
    return Spent(factor * down, factor * effort.operations / profile.compute, factor * up)


class Simulation:
    """Who has which device; makes the clock of each round.

    Attributes:
        devices: the settings. names: of the clients' profiles, in order; empty where devices are off. needs: bytes that
        each client's training takes. left_out: who takes no part, as its network does not fit its memory.

    Raises:
        RequestError: devices cannot be dealt to so many clients.
    """

    def __init__(self, devices: Devices, clients: int, seed: int) -> None:
        self.devices, self._seed = devices, seed
        self.names: Sequence[str] = dealt(devices, clients, seed)
        self.needs: Sequence[int] = ()
        self.left_out: frozenset[int] = frozenset()

    def profile(self, client_id: int) -> Profile:
        """A client's device."""
        return self.devices.profile(self.names[client_id])

    def availability(self) -> list[float]:
        """Of each client, the probability of being there in a round."""
        return [self.devices.profile(name).availability for name in self.names]

    def fit(self, needs: Sequence[int], networks: Sequence[str]) -> None:
        """Compare what networks need with what devices have, and leave out, or refuse, whom it does not fit.

        Args:
            needs: bytes of each client (`memory_needs`). networks: their names, for the refusal.

        Raises:
            RequestError: some do not fit, and are not to be left out; or nobody's does.
        """
        self.needs = needs
        wide = [number for number, need in enumerate(needs) if need > self.profile(number).memory]
        kinds: dict[str, list[int]] = {}
        for number in wide:
            has, takes = human_bytes(self.profile(number).memory), human_bytes(needs[number])
            kinds.setdefault(f"{self.names[number]}, {has}: {networks[number]} takes {takes}", []).append(number)
        told = "; ".join(f"{', '.join(map(str, who))} ({what})" for what, who in kinds.items())
        if wide and self.devices.unfit == "refuse":
            raise RequestError(
                f"devices: expected networks that fit the clients' memory, came {len(wide)} that do not: clients "
                f"{told}; give them smaller networks or batches, or set devices.unfit = 'leave out'"
            )
        if len(wide) == len(needs):
            raise RequestError(f"devices: expected a client whose network fits its memory, came none: clients {told}")
        self.left_out = frozenset(wide)

    def clock(self, number: int, closing: bool = False) -> Clock:
        """A round's; a closing one has no deadline."""
        return Clock(self, number, None if closing else self.devices.deadline)

    def spent(self, number: int, client_id: int, effort: Effort) -> Spent:
        """The seconds of a client's effort in a round."""
        factor, jitter = 1.0, self.devices.jitter
        if jitter:
            draw = torch.randn((), generator=generator(self._seed, "jitter", number, client_id), dtype=torch.float64)
            factor = math.exp(jitter * float(draw))
        return spent(self.profile(client_id), effort, factor)


class Clock:
    """The simulated time of one round; it stands still where devices are off.

    Attributes:
        seconds: since the round began. stragglers: whose upload did not come before the deadline; they are busy until
        the round is over.
    """

    def __init__(self, simulation: Simulation, number: int, deadline: float | None) -> None:
        self._simulation, self._number, self._deadline = simulation, number, deadline
        self.on = simulation.devices.on
        self.seconds = 0.0
        self.stragglers: set[int] = set()
        self._spent: dict[int, Spent] = {}
        self._operations: dict[int, int] = {}

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Within the block the server works; its time counts where `server_compute` says how fast it is."""
        rate = self._simulation.devices.server_compute if self.on else None
        if rate is None:
            yield
            return
        with Operations() as done:
            yield
        self.seconds += done.count / rate

    def passage(self, efforts: Mapping[int, Effort], waited_for: Collection[int]) -> None:
        """Let a passage pass.

        Args:
            efforts: of all who took part. waited_for: those whose upload the server expects; who drops out, or is late
                for other reasons, is not waited for.
        """
        if not self.on:
            return
        taken = {i: self._simulation.spent(self._number, i, effort) for i, effort in efforts.items()}
        for i, spent_now in taken.items():
            before = self._spent.get(i, Spent())
            self._spent[i] = Spent(*(a + b for a, b in zip(before, spent_now, strict=True)))
            self._operations[i] = self._operations.get(i, 0) + efforts[i].operations
        limit = math.inf if self._deadline is None else self._deadline
        behind = {i for i in taken if i in waited_for and efforts[i].up and taken[i].seconds > limit}
        self.stragglers |= behind
        self.seconds += limit if behind else max((taken[i].seconds for i in taken if i in waited_for), default=0.0)

    def record(self) -> dict[str, Any]:
        """The round's part of `rounds.jsonl`."""
        if not self.on:
            return {}
        clients = {str(i): {**self._spent[i]._asdict(), "operations": self._operations[i]} for i in sorted(self._spent)}
        late = {"stragglers": sorted(self.stragglers)} if self._simulation.devices.deadline is not None else {}
        return {"simulated_seconds": self.seconds, "simulated_by_client": clients, **late}


def memory_needs(
    method: Method, clients: Sequence[Client], architectures: Architectures, server: Server
) -> tuple[list[int], list[str], list[str]]:
    """Bytes that each client's network takes in training (`work.step_memory`), the network's name, and its variant.

    What stands beside a client's own network counts as well; what a method holds beside networks does not. The server
    is as it was afterwards.
    """
    known: dict[str, int] = {}
    needs, names, variants = [], [], []
    server.round = 1
    method.start(server)
    companion = architectures.companion if architectures.together else ""
    for client in clients:
        variant = method.variant(server, client.id)
        name = f"{client.architecture} {variant}".rstrip()
        if name not in known:
            own = method.personal(at_work(client, variant, architectures).model)
            known[name] = step_memory(client, own)
            if companion:
                known[name] += step_memory(client, architectures.template(companion, alone=True))
        needs.append(known[name])
        names.append(name)
        variants.append(variant)
    server.state, server.round = {}, 0
    server.log.clear()
    server.memory.clear()
    return needs, names, variants
