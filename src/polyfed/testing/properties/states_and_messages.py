"""What outlives a call is in states, which nothing writes into; what crosses is counted."""

from __future__ import annotations

import tempfile
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyfed.core.message import Message, clone, flatten, from_bytes, nbytes, to_bytes
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation
from polyfed.engine.federation import Federation
from polyfed.errors import PolyfedError, RunInterrupted
from polyfed.testing import fixtures as worlds
from polyfed.testing.fixtures import SHORT
from polyfed.testing.kit import AggregationScene, ConformanceKit, NotApplicable, copy_server, replaced, subsets
from polyfed.testing.spy import Spy


def nothing_aliased(kit: ConformanceKit) -> None:
    """After a round no tensor of one party shares memory with another's, or with a network that others use."""
    kit.no_offence("alias")


def nothing_written_in_place(kit: ConformanceKit) -> None:
    """Messages, states, contexts and data are replaced and never written into, whoever answers."""
    kit.no_offence("written")

    def look(scene: AggregationScene) -> None:
        for chosen in subsets(sorted(scene.uploads)):
            trial = copy_server(scene.server)
            trial.state = clone(scene.server.state)
            uploads = {number: clone(scene.uploads[number]) for number in chosen}
            given = {"the server's state": trial.state, **{f"the upload of client {i}": m for i, m in uploads.items()}}
            tensors = [(f"{whose}, '{name}'", t) for whose, m in given.items() for name, t in flatten(m).items()]
            before = [tensor.clone() for _, tensor in tensors]
            kit.method.aggregate(trial, uploads)
            for (place, now), was in zip(tensors, before, strict=True):
                if worlds.difference({"": now}, {"": was}) is not None:
                    kit.fail(f"aggregate writes into {place}, when of {sorted(scene.uploads)} only {chosen} answer")

    for scene in kit.scenes:
        look(scene)


def broadcast_without_side_effects(kit: ConformanceKit) -> None:
    """It may be called again, for a retry or for scoring."""
    kit.no_offence("broadcast")


def state_is_explicit(kit: ConformanceKit) -> None:
    """Two rounds, a checkpoint and two more are four rounds bit for bit; the method object keeps nothing."""
    kit.no_offence("state")
    four = SHORT.model_copy(update={"rounds": 4})
    straight = kit.run(training=four)
    with tempfile.TemporaryDirectory(prefix="polyfed-") as place:
        out = Path(place) / "run"
        stopped = kit.usual.federation(kit.method, four, out=out, loggers=[stop := _Stop(3)])
        stop.federation = stopped
        try:
            stopped.run()
        except RunInterrupted:
            pass
        except PolyfedError as error:
            kit.fail(str(error))
        kit.run(seed=7)  # whatever is hidden in the process is now another run's
        resumed = kit.usual.federation(replaced(kit.method) or kit.method, four, out=out)
        try:
            resumed.run(resume=True)
        except PolyfedError as error:
            kit.fail(f"after a checkpoint: {error}")
    kit.same(
        worlds.all_state(straight), worlds.all_state(resumed), "resumed after two of four rounds, it ends otherwise"
    )
    if worlds.records(straight) != worlds.records(resumed):
        kit.fail("resumed after two of four rounds, its records are others")


def goes_on_after_its_end(kit: ConformanceKit) -> None:
    """Two rounds that were all, and two more after them, are four rounds bit for bit; or `planned` says why not."""
    if kit.method.planned:
        raise NotApplicable(f"{kit.method.planned} depends on the number of rounds")
    four = SHORT.model_copy(update={"rounds": 4})
    with tempfile.TemporaryDirectory(prefix="polyfed-") as place:
        out = Path(place) / "run"
        kit.run(out=out)
        longer = kit.usual.federation(kit.method, four, evaluation=Evaluation(every_n_rounds=SHORT.rounds), out=out)
        try:
            longer.run(resume=True)
        except PolyfedError as error:
            kit.fail(f"after its last round: {error}")
    straight = kit.run(training=four, evaluation=Evaluation(every_n_rounds=SHORT.rounds))
    found = worlds.difference(worlds.all_state(straight), worlds.all_state(longer))
    if found is not None:
        kit.fail(
            f"after the two rounds that were planned, two more end otherwise than four at once: {found}; what depends "
            "on the number of rounds (server.rounds, training.rounds) is said in `planned`"
        )


class _Stop:
    """A logger that interrupts a round."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.federation = typing.cast(Federation, None)

    def start(self, info: Mapping[str, Any]) -> None:
        """See `Logger`."""

    def client_done(self, done: int, total: int) -> None:
        """Ctrl-C in the middle of the round."""
        if self.federation.server.round == self.number and done == 2:
            raise KeyboardInterrupt

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        """See `Logger`."""

    def message(self, text: str) -> None:
        """See `Logger`."""

    def end(self, result: Mapping[str, Any] | None) -> None:
        """See `Logger`."""


def scoring_changes_nothing(kit: ConformanceKit) -> None:
    """Scoring every round, and at other stages too, leaves the same weights."""
    every = Evaluation(every_n_rounds=1, extra_stages=["received", "after_training", "personal"])
    often = kit.run(evaluation=every)
    kit.same(worlds.state(kit.base), worlds.state(often), "scoring in every round changes what is learnt")


def bytes_metered(kit: ConformanceKit) -> None:
    """The bytes in the records are those of the messages, which survive serializing."""
    down: dict[int, int] = {}
    up: dict[int, int] = {}
    scoring: list[bool] = []

    def watch(count: dict[int, int]) -> Callable[..., Message]:
        def look(call: Callable[..., Message], first: Any, second: Any) -> Message:
            message = call(first, second)
            number = second if isinstance(second, int) else first.id
            if not scoring:
                count[number] = count.get(number, 0) + nbytes(message)
            kit.same(
                flatten(message), flatten(from_bytes(to_bytes(message))), "a message is not what it was when it arrives"
            )
            return message

        return look

    def aggregate(call: Callable[..., None], server: Server, uploads: Mapping[int, Message]) -> None:
        call(server, uploads)
        if server.exchange == kit.method.exchanges(server.round)[-1].name:
            scoring.append(True)

    spy = Spy(kit.method, broadcast=watch(down), upload=watch(up), aggregate=aggregate)
    federation = kit.runs(kit.usual, spy, SHORT.model_copy(update={"rounds": 1}))
    metered = federation.history[0]["bytes_by_client"]
    for number in down:
        found = metered[str(number)]
        if (found["down"], found["up"]) != (down[number], up[number]):
            kit.fail(f"client {number}: metered {found}, the messages have {down[number]} down and {up[number]} up")


def expected_bytes(kit: ConformanceKit) -> None:
    """The bytes are those of the paper's formula."""
    if kit.expected_bytes is None:
        raise NotApplicable("no formula given")
    federation = kit.scenes[-1].federation
    for number, found in federation.history[-1]["bytes_by_client"].items():
        down, up = kit.expected_bytes(federation.server, int(number))
        if (found["down"], found["up"]) != (down, up):
            kit.fail(f"client {number}: expected {down} bytes down and {up} up by the formula, got {found}")
