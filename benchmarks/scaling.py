"""How a federation grows: how long it takes to start, and what a round of ten clients costs among many.

    python benchmarks/scaling.py --data-root DIR                    CIFAR-10, or set POLYFED_DATA
    python benchmarks/scaling.py --data digits --start-model digits-cnn1 --round-model digits-cnn1 --clients 50,100
    python benchmarks/scaling.py --scoring 60,250,1000 --classes 10,100,1000       what scoring takes
    python benchmarks/scaling.py --scoring 10000 --participating 100               and over training

First the start: `--start-clients` clients, a fiftieth of whom take part, with `--start-model`; seconds from the start
of this program, Python's own imports and PyTorch's among them, until round 1 begins. Then rounds of `--participating`
clients among as many as `--clients` says, one federation after the other, `--repeats` times; every client has the same
number of rows, so that the work is the same. Nothing is scored, and nothing written.

A line of JSON for the start and for each number of clients, then a table: seconds of processor time per round, the
median of all rounds but the first, and the growth over the smallest federation. About a minute at the defaults.

With `--scoring` only what it takes to score so many clients, by the method's stage: each has ten training and four test
rows of noise, of `--classes` classes and 8 x 8 numbers each (of 3 x 32 x 32 for a network of CIFAR-10). Every second
round is scored: seconds are the difference to the rounds between, and memory is what the process takes beyond its peak
in the first round, in a process of its own for each line.
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

import argparse  # noqa: E402
import contextlib  # noqa: E402
import json  # noqa: E402
import multiprocessing  # noqa: E402
import resource  # noqa: E402
from collections.abc import Mapping  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from polyfed.config.recipe import Recipe  # noqa: E402
from polyfed.core.client import Client  # noqa: E402
from polyfed.core.settings import Evaluation, Training  # noqa: E402
from polyfed.engine.federation import Federation  # noqa: E402
from polyfed.engine.task import Task  # noqa: E402
from polyfed.errors import PolyfedError, RunInterrupted  # noqa: E402
from polyfed.experiments.build import build_federation  # noqa: E402
from polyfed.experiments.data_cache import DataCache  # noqa: E402
from polyfed.registry import METHODS  # noqa: E402

GOAL_START, GOAL_GROWTH = 10.0, 1.2  # seconds; times the smallest


class Watch:
    """A logger that takes the time of the start and of every round, and ends the run after `rounds`."""

    def __init__(self, rounds: int) -> None:
        self.seconds: list[float] = []
        self.began = 0.0
        self.peaks: list[int] = []  # KiB of memory after each round
        self._rounds, self._last = rounds, 0.0

    def start(self, info: Mapping[str, Any]) -> None:
        """Round 1 is about to begin."""
        self.began = time.perf_counter()
        if not self._rounds:
            raise KeyboardInterrupt
        self._last = time.process_time()

    def client_done(self, done: int, total: int) -> None:
        """Of no interest."""

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        """A round is through."""
        now = time.process_time()
        self.seconds.append(now - self._last)
        self.peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        self._last = now
        if len(self.seconds) == self._rounds:
            raise KeyboardInterrupt  # the last round of a run would be scored

    def message(self, text: str) -> None:
        """Of no interest."""

    def end(self, result: Mapping[str, Any] | None) -> None:
        """The run is over."""


def watched(asked: argparse.Namespace, data: DataCache, clients: int, model: str, rows: int, rounds: int) -> Watch:
    """A run of so many rounds; 0: it only starts."""
    share = asked.participating / clients if rounds else 0.02
    recipe = Recipe.from_dict(
        {
            "data": {
                "dataset": asked.data,
                "num_clients": clients,
                "partition": "iid",
                "max_train_per_client": rows,
                "max_test_per_client": 1,
            }
            | ({} if asked.data_root is None else {"root": asked.data_root}),
            "models": {"architectures": [model]},
            "method": {"name": asked.method},
            "training": {"rounds": 1000, "client_fraction": min(1.0, share), "local_epochs": 1, "batch_size": 10},
            "evaluation": {"every_n_rounds": 1000},
            "run": {"executor": "serial"},  # the clock sees this process only
        }
    )
    watch = Watch(rounds)
    try:
        build_federation(recipe, data=data, loggers=[watch]).run()
    except (RunInterrupted, KeyboardInterrupt):
        return watch
    raise AssertionError("a run that is watched is ended by its watch")


def scored(asked: argparse.Namespace, count: int, classes: int) -> dict[str, Any]:
    """What it takes to score so many clients, of so many classes."""
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(0)
    shape = (3, 32, 32) if "cifar" in asked.round_model else (1, 8, 8)
    data = []
    for rows in (10, 4):
        x = torch.randint(0, 256, (count, rows, *shape), dtype=torch.uint8, generator=draws)
        data.append(list(zip(x, torch.randint(0, classes, (count, rows), generator=draws), strict=True)))
    clients = [Client(asked.round_model, *pairs) for pairs in zip(*data, strict=True)]
    training = Training(rounds=1000, client_fraction=asked.participating / count, batch_size=10)
    watch = Watch(asked.rounds)
    federation = Federation(
        clients,
        METHODS[asked.method](),
        training,
        Evaluation(every_n_rounds=2),
        task=Task(classes=classes),
        executor="serial",
        loggers=[watch],
    )
    with contextlib.suppress(RunInterrupted, KeyboardInterrupt):
        federation.run()
    between, scoring = median(watch.seconds[2::2]), median(watch.seconds[1::2])
    return {
        "clients": count,
        "classes": classes,
        "scoring_mib": (watch.peaks[-1] - watch.peaks[0]) / 1024,
        "seconds_scoring": scoring - between,
        "seconds_per_round": between,
    }


def measure_scoring(asked: argparse.Namespace) -> None:
    """A line for each number of clients and of classes."""
    context = multiprocessing.get_context("spawn")
    rows = []
    for count in map(int, asked.scoring.split(",")):
        for classes in map(int, asked.classes.split(",")):
            with context.Pool(1) as process:
                rows.append(process.apply(scored, (asked, count, classes)))
            print(json.dumps(rows[-1]), flush=True)
    print(f"\n{'clients':>8}  {'classes':>8}  {'scoring: MiB':>12}  {'seconds':>8}  over a round without it")
    for row in rows:
        count, classes, mib, seconds, between = row.values()
        print(f"{count:8}  {classes:8}  {mib:12.1f}  {seconds:8.2f}  {seconds / between:22.2f}")


def measure_rounds(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    """A line for the start and for each number of clients."""
    try:
        counts = sorted({int(count) for count in asked.clients.split(",")})
    except ValueError:
        parser.error(f"expected whole numbers of clients, got {asked.clients}")
    if min(counts) < asked.participating or min(asked.participating, asked.rows, asked.rounds - 1, asked.repeats) < 1:
        parser.error("expected at least --participating clients, 1 participating, 1 row, 2 rounds and 1 repeat")
    data, seconds = DataCache(), {count: list[float]() for count in counts}
    try:
        if asked.start_clients:
            watch = watched(asked, data, asked.start_clients, asked.start_model, asked.rows, 0)
            start = round(watch.began - BEGAN, 2)
            print(json.dumps({"clients": asked.start_clients, "seconds_to_start": start}), flush=True)
        for _ in range(asked.repeats):
            for count, taken in seconds.items():
                taken += watched(asked, data, count, asked.round_model, asked.rows, asked.rounds).seconds[1:]
    except PolyfedError as error:
        parser.exit(error.exit_status, f"{error}\n")
    smallest = median(seconds[counts[0]])
    rows = [(count, median(taken), median(taken) / smallest) for count, taken in seconds.items()]
    for count, taken, growth in rows:
        print(json.dumps({"clients": count, "seconds_per_round": taken, "growth": growth}))
    if asked.start_clients:
        print(f"\n{asked.start_clients} clients started after {start} s (goal: {GOAL_START:g})")
    print(f"\n{'clients':>8}  seconds per round  growth (goal: {GOAL_GROWTH})")
    for count, taken, growth in rows:
        print(f"{count:8}  {taken:17.4f}  {growth:.2f}")


def main() -> None:
    """Measure the start, then rounds; or scoring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10", help="a registered data set [cifar10]")
    parser.add_argument("--data-root", metavar="DIR", help="where it lies [$POLYFED_DATA]")
    parser.add_argument("--method", default="fedavg", help="[fedavg]")
    parser.add_argument("--start-clients", type=int, default=500, help="0 leaves the start out [500]")
    parser.add_argument("--start-model", default="fedgh-cnn1", help="[fedgh-cnn1]")
    parser.add_argument("--clients", default="100,1000,5000", metavar="N,N,...", help="[100,1000,5000]")
    parser.add_argument("--participating", type=int, default=10, help="clients in every round [10]")
    parser.add_argument("--round-model", default="fedhenn-cifar10", help="[fedhenn-cifar10]")
    parser.add_argument("--rows", type=int, default=10, help="of every client [10]")
    parser.add_argument("--rounds", type=int, default=15, help="of every run; all but the first count [15]")
    parser.add_argument("--repeats", type=int, default=2, help="runs with every number of clients [2]")
    parser.add_argument("--scoring", metavar="N,N,...", help="measure scoring instead, of so many clients")
    parser.add_argument("--classes", default="10", metavar="C,C,...", help="of --scoring [10]")
    asked = parser.parse_args()
    if asked.scoring:
        measure_scoring(asked)
    else:
        measure_rounds(parser, asked)


if __name__ == "__main__":
    main()
