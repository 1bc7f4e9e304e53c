"""What rounds would take on the devices that clients are simulated to have (`settings.Devices`).

In an exchange, down and up, client k with what is sent to it (d bytes), what it computes (c operations: receiving,
training, what its upload needs) and what it sends (u bytes) takes

    t_k = [d > 0] (latency + 8 d / down) + c / compute + [u > 0] (latency + 8 u / up)   seconds,

times exp(jitter z), z drawn from a normal distribution for each (round, client). The server waits for the slowest that
is heard, at most until the deadline; or for so many uploads (`polyfed.plugins.upload_buffer`). A round is its exchanges
one after the other; the server's own work takes no time. Nothing of it depends on the machine, on the executor or on
how rounds are resumed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from polyfed.core.randomness import deal, generator
from polyfed.engine.executors.client_work import working_copy
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.operation_counter import training_memory
from polyfed.engine.plugin import Plugin, Setup
from polyfed.engine.round_state import Round
from polyfed.engine.uploads import sent_nbytes
from polyfed.errors import ConfigError
from polyfed.plugins.settings import Devices, Profile
from polyfed.plugins.upload_buffer import UploadBuffer, check_buffer, draw_starters
from polyfed.units import human_bytes


class Duration(NamedTuple):
    """The seconds that a client takes in an exchange."""

    down: float = 0.0
    train: float = 0.0
    up: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.down + self.train + self.up


class DeviceSimulation(Plugin):
    """Who has which device, whose network does not fit it, and what a round would take.

    Attributes:
        names: of the profiles of the clients' devices, by number; empty where devices are off.
        excluded: who takes no part, as its network does not fit its memory.
    """

    name = "devices"
    settings_class = Devices
    holds_work = True

    def __init__(self, settings: Devices | None = None) -> None:
        super().__init__(settings)
        self.names: Sequence[str] = ()
        self.excluded: frozenset[int] = frozenset()
        self._seed = 0
        self._clock = _Clock()
        self._buffer: UploadBuffer | None = None

    def validate(self, setup: Setup) -> None:
        """Deal the devices, and compare what networks need with what devices have."""
        if setup.method.is_alone and self.settings.round_timeout is not None:
            raise ConfigError(
                f"{setup.method.name}, alone: expected no devices.round_timeout, as every client's own server waits "
                f"for it, got {self.settings.round_timeout:g}"
            )
        self._seed = setup.seed
        self._training = setup.training
        if not self.settings.enabled:
            return
        settings = self.settings
        self.names = deal(settings.profiles, settings.assignment, len(setup.clients), setup.seed, "devices")
        self._exclude_oversized(setup)
        check_buffer(self.settings, setup)

    def facts(self) -> dict[str, Any]:
        """The settings, and who is left out."""
        return {**super().facts(), "left_out": sorted(self.excluded)} if self.settings.enabled else super().facts()

    def profile(self, client_id: int) -> Profile:
        """A client's device."""
        profile: Profile = self.settings.profile(self.names[client_id])
        return profile

    def absent(self, number: int) -> Collection[int]:
        """Whose network does not fit its device."""
        return self.excluded

    def select(self, round: Round) -> None:
        """Start the round's clock, and its buffer."""
        self._clock = _Clock()
        round.counts_operations = self.settings.enabled
        self._buffer = self._start_buffer(round)

    def _start_buffer(self, round: Round) -> UploadBuffer | None:
        """The round's buffer, if the server waits for so many uploads; and who begins in it.

        A final round, and one whose clients are given, has none: what is under way is lost.
        """
        size = self.settings.buffer_size
        if size is None:
            return None
        if round.final or round.cohort:
            self.work = []
            round.server.upload_weights = {}
            return None
        at_work = [one.client_id for one in self.work]
        starters = draw_starters(self._training, self._seed, round.number, round.present, at_work, size)
        round.cohort = sorted([*starters.at_once, *starters.then])
        return UploadBuffer(size, starters)

    def after_jobs(
        self, round: Round, jobs: Sequence[TrainJob], sent: Sequence[JobResult], read: Sequence[JobResult]
    ) -> None:
        """Let an exchange take its time; who misses the deadline is late."""
        if not self.settings.enabled:
            return
        clock, timeout = self._clock, self.settings.round_timeout
        limit = math.inf if round.final or timeout is None else timeout
        stragglers: set[int] = set()
        slowest = 0.0
        for job, outcome in zip(jobs, read, strict=True):
            i = outcome.client_id
            taken = self._duration(round, job, outcome)
            before = clock.spent.get(i, Duration())
            clock.spent[i] = Duration(*(a + b for a, b in zip(before, taken, strict=True)))
            clock.operations[i] = clock.operations.get(i, 0) + outcome.operations
            if outcome.dropped or i in round.silenced or i in round.late or self._buffer is not None:
                continue  # nobody waits for it
            slowest = max(slowest, taken.seconds)
            if outcome.bytes_up and taken.seconds > limit:
                stragglers.add(i)
        clock.seconds += limit if stragglers else slowest
        clock.stragglers |= stragglers
        round.late |= stragglers
        round.busy |= stragglers

    def complete(self, round: Round, jobs: Sequence[TrainJob], outcomes: Sequence[JobResult]) -> list[JobResult]:
        """Where uploads are buffered, those that fill the buffer; the others' work stays under way."""
        if self._buffer is None:
            return list(outcomes)
        seconds = {job.client.id: self._clock.spent[job.client.id].seconds for job in jobs}
        done, self.work, waited = self._buffer.fill(round, jobs, outcomes, self.work, seconds)
        self._clock.seconds += waited
        return done

    def record(self, round: Round) -> dict[str, Any]:
        """The simulated times."""
        if not self.settings.enabled:
            return {}
        clock = self._clock
        clients = {str(i): {**clock.spent[i]._asdict(), "operations": clock.operations[i]} for i in sorted(clock.spent)}
        found: dict[str, Any] = {"simulated_seconds": clock.seconds, "simulated_by_client": clients}
        if self.settings.round_timeout is not None:
            found["stragglers"] = sorted(clock.stragglers)
        return found if self._buffer is None else {**found, "aggregated": self._buffer.aggregated}

    def about_client(self, client_id: int) -> dict[str, Any]:
        """Its device."""
        return {"device": self.names[client_id]} if self.settings.enabled else {}

    def _duration(self, round: Round, job: TrainJob, outcome: JobResult) -> Duration:
        """The seconds that a client takes in an exchange."""
        number = job.client.id
        device = self.profile(number)
        factor, jitter = 1.0, self.settings.time_jitter
        if jitter:
            draw = torch.randn((), generator=generator(self._seed, "jitter", round.number, number), dtype=torch.float64)
            factor = math.exp(jitter * float(draw))
        sent = sent_nbytes(round.method, job.message)
        down = device.latency + 8 * sent / device.download_bps if sent else 0.0
        up = device.latency + 8 * outcome.bytes_up / device.upload_bps if outcome.bytes_up else 0.0
        return Duration(factor * down, factor * outcome.operations / device.flops, factor * up)

    def _exclude_oversized(self, setup: Setup) -> None:
        """Leave out, or refuse, those whose network does not fit their device."""
        networks = estimate_memory(setup)
        wide: dict[int, str] = {}  # their variants
        kinds: dict[str, list[int]] = {}
        for number, (name, variant, takes) in enumerate(networks):
            has = self.profile(number).memory_bytes
            if takes > has:
                wide[number] = variant
                kind = f"{self.names[number]}, {human_bytes(has)}: {name} takes {human_bytes(takes)}"
                kinds.setdefault(kind, []).append(number)
        oversized = "; ".join(f"{', '.join(map(str, who))} ({what})" for what, who in kinds.items())
        if wide and self.settings.on_out_of_memory == "refuse":
            raise ConfigError(
                f"devices: expected networks that fit the clients' memory, got {len(wide)} that do not: clients "
                f"{oversized}; give them smaller networks or batches, or set devices.on_out_of_memory = 'leave out'"
            )
        if len(wide) == len(networks):
            raise ConfigError(
                f"devices: expected a client whose network fits its memory, got none: clients {oversized}"
            )
        self.excluded = frozenset(wide) - setup.held_out  # they are in no round anyway, and scored otherwise
        setup.excluded.update({number: wide[number] for number in sorted(self.excluded)})


@dataclass
class _Clock:
    """The simulated time of one round. seconds: since it began. spent, operations: of each client."""

    seconds: float = 0.0
    stragglers: set[int] = field(default_factory=set)
    spent: dict[int, Duration] = field(default_factory=dict)
    operations: dict[int, int] = field(default_factory=dict)


def estimate_memory(setup: Setup) -> list[tuple[str, str, int]]:
    """Each client's network: its name, its variant, and the bytes that it takes in training (`training_memory`).

    What stands beside a client's own network counts as well; what a method holds beside networks does not.
    """
    method = setup.method
    model_factory = setup.model_factory
    known: dict[str, int] = {}
    found = []
    auxiliary = model_factory.auxiliary_model if model_factory.together else ""
    for client in setup.clients:
        variant = method.variant(setup.preview, client.id)
        name = f"{client.architecture} {variant}".rstrip()
        if name not in known:
            own = method.personal_model(working_copy(client, variant, model_factory).model)
            known[name] = training_memory(client, own)
            if auxiliary:
                known[name] += training_memory(client, model_factory.module(auxiliary, alone=True))
            if model_factory.frozen_network is not None:
                known[name] += model_factory.frozen_network.nbytes
        found.append((name, variant, known[name]))
    return found
