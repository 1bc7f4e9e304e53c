"""A server that waits for so many uploads, and not for all clients: buffered asynchrony on the simulated clock.

FedBuff (Nguyen et al., AISTATS 2022, arXiv:2106.06639). K is `devices.buffer_size`; `training.client_fraction` of the
clients are at work at any time (the paper's concurrency). A round is a step of the server.

Client k:  receives w^r from round r, trains, uploads;  Delta_k = w_k - w^r.
Server:    round t ends with the K-th upload:  w^(t+1) = w^t + sum over these of p_k s(t - r) Delta_k,
           s(tau) = 1 / sqrt(1 + tau);  p_k are the method's.
Whose upload arrives makes room for a client that is drawn of those not at work, and begins at once with w^t.

Deviations from the paper: (1) Who has uploaded, or began after this round did, rests until the next one, so that a
buffer has one upload of a client. (2) p_k is the method's, as by training samples; "uniform" is the paper's 1 / K.
(3) A client whose work is rejected takes a place in the buffer. (4) By `Method.staleness_weighting`, s is a factor of
what the method weighs uploads by that are no changes of weights, or 1 where uploads of any age count alike.
Where all devices are alike and K and the clients at work are all, rounds are those of a server that waits for all.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from polyfed.core.message import Group, Message, freeze, members
from polyfed.core.method import Method
from polyfed.core.randomness import generator
from polyfed.core.settings import Training
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.plugin import Setup
from polyfed.engine.round_state import Round
from polyfed.engine.uploads import base_tensors, has_upload
from polyfed.engine.work_in_flight import WorkInFlight
from polyfed.errors import ConfigError
from polyfed.plugins.settings import Devices


class Starters(NamedTuple):
    """Who begins in a round: at once, and as others' uploads arrive."""

    at_once: list[int]
    then: list[int]


class Filled(NamedTuple):
    """A full buffer. arrived: in order. seconds: until then. left: client -> seconds until its upload arrives."""

    arrived: list[int]
    seconds: float
    left: dict[int, float]


def draw_starters(
    training: Training, seed: int, number: int, present: Sequence[int], at_work: Sequence[int], size: int
) -> Starters:
    """Draw who begins in round `number` of those present who are not at work; with nobody at work, as of any round."""
    idle = [client for client in present if client not in at_work]
    order = [
        idle[place] for place in torch.randperm(len(idle), generator=generator(seed, "selection", number)).tolist()
    ]
    free = max(0, training.cohort_size(len(present)) - len(at_work))
    return Starters(order[:free], order[free : free + size - 1])


def fill_buffer(left: Mapping[int, float], then: Sequence[tuple[int, float]], size: int) -> Filled:
    """Let time pass until `size` uploads have arrived, or all.

    Args:
        left: client -> seconds until its upload arrives, in the order in which they began, which decides ties.
        then: client and seconds of work of those who begin one by one, as uploads arrive.

    >>> fill_buffer({0: 5.0, 1: 1.0}, [(2, 2.0)], size=2)
    Filled(arrived=[1, 2], seconds=3.0, left={0: 2.0})
    """
    waiting = list(then)
    queue = [(seconds, place, client) for place, (client, seconds) in enumerate(left.items())]
    heapq.heapify(queue)
    begun = len(queue)
    arrived: list[int] = []
    now = 0.0
    while queue and len(arrived) < size:
        now, _, client = heapq.heappop(queue)
        arrived.append(client)
        if waiting and len(arrived) < size:
            client, seconds = waiting.pop(0)
            heapq.heappush(queue, (now + seconds, begun, client))
            begun += 1
    others = sorted(queue, key=lambda one: one[1])
    return Filled(arrived, now, {client: seconds - now for seconds, _, client in others})


@dataclass
class UploadBuffer:
    """One round of a server that waits for `size` uploads.

    starters: who begins in it. aggregated: for its record, whose uploads it had, and the rounds they began in.
    """

    size: int
    starters: Starters
    aggregated: list[dict[str, int]] = field(default_factory=list)

    def fill(
        self,
        round: Round,
        jobs: Sequence[TrainJob],
        outcomes: Sequence[JobResult],
        work: Sequence[WorkInFlight],
        seconds: Mapping[int, float],
    ) -> tuple[list[JobResult], list[WorkInFlight], float]:
        """Fill the buffer: what is done, by number of client; what is still under way; how long it took.

        jobs, outcomes: of those who begin. work: of those who began before. seconds: that each of the former takes.
        """
        fresh = {outcome.client_id: outcome for outcome in outcomes}
        before = {one.client_id: one for one in work}
        left = {i: one.seconds for i, one in before.items()} | {i: seconds[i] for i in self.starters.at_once}
        filled = fill_buffer(left, [(i, seconds[i]) for i in self.starters.then], self.size)
        done = []
        weights = {}
        for number in sorted(filled.arrived):
            began = before[number].round if number in before else round.number
            result = fresh[number] if number in fresh else before[number].result
            weight = 1.0 if round.method.staleness_weighting == "alike" else (1 + round.number - began) ** -0.5
            if began < round.number and result.counts and round.method.staleness_weighting == "changes":
                present = round.method.broadcast(round.server, number)
                result = dataclasses.replace(result, message=_applied(round.method, result.message, present, weight))
            if result.counts:
                weights[number] = weight
                self.aggregated.append({"client": number, "from": began})
            done.append(result)
        round.server.upload_weights = weights
        messages = {job.client.id: job.message for job in jobs}
        under_way = [
            dataclasses.replace(before[i], seconds=rest)
            if i in before
            else WorkInFlight(round.number, rest, _held(round.method, fresh[i], messages[i]))
            for i, rest in filled.left.items()
        ]
        return done, under_way, filled.seconds


def _held(method: Method, result: JobResult, received: Message) -> JobResult:
    """A result that outlives its round: of weights the change, without what is already in the round's record."""
    if not result.counts:
        return JobResult(result.client_id, refused=result.refused or "nothing arrived")
    message = result.message
    if method.staleness_weighting == "changes":
        message = _mapped(method, message, received, lambda value, base: value - base.to(value))
    return JobResult(result.client_id, message, result.weights, result.state)


def _applied(method: Method, message: Message, present: Message, weight: float) -> Message:
    """The upload with its change, times its weight, added to the weights that the server would send now."""
    return _mapped(method, message, present, lambda change, base: base.to(change) + weight * change)


def _mapped(method: Method, message: Message, received: Message, function: Callable[..., Any]) -> Message:
    """The message with a function of each changed tensor and its base in the tensor's place."""
    new: dict[str, Any] = dict(message)
    for name in method.delta_entries:
        group: Group = members(message, name)
        base = base_tensors(method, name, group, received)
        if group:
            new[name] = {key: function(t, base[key]) if key in base else t for key, t in group.items()}
    return freeze(new)


# before round 1 -----------------------------------------------------------------------------------------------------


def check_buffer(settings: Devices, setup: Setup) -> None:
    """Whether uploads can be buffered here."""
    size = settings.buffer_size
    if size is None:
        return
    method = setup.method
    name = method.name
    if method.is_alone:
        raise ConfigError(
            f"{name}, alone: expected no devices.buffer_size, as every client's own server has no others to wait for, "
            f"got {size}"
        )
    there = len(setup.present(1))
    if size > there:
        raise ConfigError(f"devices.buffer_size: expected at most the {there} clients of round 1, got {size}")
    _check_others(setup)
    for number in range(1, setup.training.rounds + 1):
        exchanges = method.exchanges(number)
        if len(exchanges) != 1 or exchanges[0].who != "selected":
            raise ConfigError(
                f"devices.buffer_size: expected a method with one exchange a round, of the selected clients, got "
                f"{name}, whose round {number} has {len(exchanges)} of {exchanges[0].who if exchanges else 'nobody'}"
            )
    if not has_upload(method):
        return
    if method.staleness_weighting == "none":
        raise ConfigError(
            f"devices.buffer_size: expected a method whose server takes uploads of earlier rounds, got {name}, whose "
            "server needs those of the present one"
        )


def _check_others(setup: Setup) -> None:
    """Settings that make no sense beside a buffer."""
    settings = {plugin.name: plugin.settings for plugin in setup.plugins}
    for section, key in (("availability", "dropout_rate"), ("privacy", "target_epsilon")):
        if value := getattr(settings[section], key):
            raise ConfigError(
                f"{section}.{key}: expected 0 beside devices.buffer_size, as time decides who takes part in which "
                f"round, got {value:g}"
            )
    if "after_training" in setup.evaluation.stages(setup.method.evaluation_stage):
        raise ConfigError(
            "evaluation: expected the stages 'personal' and 'received' beside devices.buffer_size, got "
            "'after_training', which is not at the end of a round"
        )
