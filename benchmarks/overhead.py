"""What the engine itself takes per client and round: a method that does nothing, on a network of 67 numbers.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --clients 500 --rounds 10 --workers 0

Three kinds of nothing: "asked", clients are sent nothing and send nothing, and have no weights of their own; "kept",
they have weights, which stay as they are; "changed", each gets new weights in every round, which have to be kept. The
work itself takes next to no time, so all of a round's seconds count as overhead: the loop over clients, a working copy
with its weights in the network, the judgment of the result, records. With workers, also a message there and back.

A line of JSON for each kind and executor, then a table: milliseconds per client and round, the median of all rounds but
the first, in which much is done once, and the last, which is scored. Once in processor time of this process, on which
busy neighbors have little influence, and once as the clock on the wall shows it. About 20 s at the defaults.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from statistics import median
from typing import Any, ClassVar

import torch
from torch import nn

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Context, Exchange, Method, TrainingResult
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation, Training
from polyfed.engine.federation import Federation
from polyfed.engine.task import Execution
from polyfed.errors import PolyfedError

GOAL = 0.3  # ms of processor time, for "asked" in one process


class Asked(Method):
    """Asks everybody for nothing."""

    ignores_initial_weights = True

    def exchanges(self, round: int) -> tuple[Exchange, ...]:
        """One, in which nobody trains."""
        return (Exchange(trains=False),)

    def broadcast(self, server: Server, client_id: int) -> Message:
        """Nothing."""
        return {}

    def receive(self, client: Client, message: Message) -> Context:
        """Nothing."""
        return {}

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        """Nothing."""
        return {}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Nothing."""


class Changed(Asked):
    """Every client gets other weights in every round."""

    ignores_initial_weights = False
    last: ClassVar[float] = float("inf")  # round with a change

    def receive(self, client: Client, message: Message) -> Context:
        """One number counts the rounds."""
        if client.round <= self.last:
            with torch.no_grad():
                next(client.model.parameters()).view(-1)[0] = client.round
        return {}


class Kept(Changed):
    """Every client gets weights in the first round, and keeps them."""

    last: ClassVar[float] = 1


class Clock:
    """A logger that takes processor time and wall time of every round."""

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []
        self._last = (0.0, 0.0)

    def start(self, info: Mapping[str, Any]) -> None:
        """A run begins."""
        self._last = (time.process_time(), time.perf_counter())

    def client_done(self, done: int, total: int) -> None:
        """Of no interest."""

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        """A round is through."""
        now, last = (time.process_time(), time.perf_counter()), self._last
        self.seconds.append((now[0] - last[0], now[1] - last[1]))
        self._last = now

    def message(self, text: str) -> None:
        """Of no interest."""

    def end(self, result: Mapping[str, Any] | None) -> None:
        """The run is over."""


def milliseconds(method: Method, clients: int, rounds: int, workers: int) -> dict[str, float]:
    """Of a client's part in a round, in processor time and on the wall. workers: 0, all is done by this process."""
    clock = Clock()
    x, y = torch.zeros(4, 4), torch.arange(4) % 3
    federation = Federation(
        [Client("net", (x, y)) for _ in range(clients)],
        method,
        Training(rounds=rounds),
        Evaluation(every_n_rounds=rounds),
        executor=Execution(executor="processes" if workers else "serial", workers=workers or None),
        builders={"net": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))},
        loggers=[clock],
    )
    federation.run()
    processor, wall = (1000 * median(taken) / clients for taken in zip(*clock.seconds[1:-1], strict=True))
    return {"cpu_ms": round(processor, 4), "wall_ms": round(wall, 4)}


def main() -> None:
    """Measure every kind with every executor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100, help="all of whom take part in every round [100]")
    parser.add_argument("--rounds", type=int, default=20, help="of every run [20]")
    parser.add_argument("--workers", type=int, default=2, help="of the second executor; 0: serial only [2]")
    asked = parser.parse_args()
    if asked.clients < 1 or asked.rounds < 3 or asked.workers < 0:
        parser.error("expected at least 1 client, 3 rounds and 0 workers")
    found: list[dict[str, Any]] = []
    for workers in dict.fromkeys([0, asked.workers]):
        for method in (Asked(), Kept(), Changed()):
            try:
                figures = milliseconds(method, asked.clients, asked.rounds, workers)
            except PolyfedError as error:
                parser.exit(error.exit_status, f"{error}\n")
            executor = f"{workers} processes" if workers else "serial"
            found.append({"kind": method.name, "executor": executor, **figures})
            print(json.dumps({**found[-1], "clients": asked.clients}), flush=True)
    print(f"\nms per client and round (goal: {GOAL} of processor time for 'asked', serial)")
    print(f"{'kind':9}{'executor':12}{'processor':>10}{'wall':>8}")
    for row in found:
        print(f"{row['kind']:9}{row['executor']:12}{row['cpu_ms']:10.3f}{row['wall_ms']:8.3f}")


if __name__ == "__main__":
    main()
