"""What it is worth to train clients of one network as one: rounds of `vectorized` against the same rounds of `serial`.

    python benchmarks/vectorized.py
    python benchmarks/vectorized.py --device cuda --models lenet --clients 20 --batch-size 10

A federation of clients with random 3 x 32 x 32 images trains without a word to anybody (method local), by either
executor in turn. A line of JSON per network and number of clients: wall seconds per round (medians; the first round,
in which stacking is tried, does not count) and `speedup`, serial over vectorized; then a table. The sizes that are not
given are small on a CPU, where grouped convolutions make it slower: it is meant for GPUs. No figure of a GPU has
been measured yet.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import nn

from polyfed.core.client import Client
from polyfed.core.settings import Training
from polyfed.data.samples import LabeledSamples
from polyfed.engine.federation import Federation
from polyfed.engine.task import Execution, Task
from polyfed.errors import PolyfedError
from polyfed.methods import Local
from polyfed.models import build

SHAPE, CLASSES = (3, 32, 32), 10


def lenet() -> nn.Module:
    """Two convolutions of 6 and 16 channels, layers of 120 and 84: 62 006 parameters."""
    body = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)]
    return nn.Sequential(*body, *head)


class Clock:
    """A tracker that takes the wall time of every round but the first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        """A round is through."""
        if record["round"] > 1:
            self.seconds.append(record["seconds"])

    def start(self, info: Mapping[str, Any]) -> None:
        """Of no interest."""

    def client_done(self, done: int, total: int) -> None:
        """Of no interest."""

    def message(self, text: str) -> None:
        """What could not be stacked: nothing, here."""
        if "one after the other" in text:
            raise SystemExit(text)

    def end(self, result: Mapping[str, Any] | None) -> None:
        """Of no interest."""


def main() -> None:
    """Measure every network with every number of clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=here, help=f"where networks compute [{here}]")
    parser.add_argument("--models", default="lenet,fedgh-cnn5,resnet10-half", metavar="A,B,...", help="[%(default)s]")
    parser.add_argument("--clients", metavar="K,L,...", help="numbers of them [cpu: 1,4,8; else 1,2,4,...,64]")
    parser.add_argument("--samples", type=int, metavar="N", help="of a client [cpu: 40; else 500]")
    parser.add_argument("--batch-size", type=int, default=10, metavar="B", help="[10]")
    parser.add_argument("--rounds", type=int, default=4, metavar="T", help="of either executor [4]")
    asked = parser.parse_args()
    small = asked.device == "cpu"
    counts = asked.clients or ("1,4,8" if small else "1,2,4,8,16,32,64")
    samples = asked.samples or (40 if small else 500)
    if not all(count.isdecimal() and int(count) for count in counts.split(",")) or asked.rounds < 2 or samples < 1:
        parser.error("expected numbers of clients and samples from 1 on, and 2 rounds or more")
    rows = []
    try:
        for name in asked.models.split(","):
            make = lenet if name == "lenet" else lambda name=name: build(name, SHAPE, CLASSES)
            for count in map(int, counts.split(",")):
                training = Training(rounds=asked.rounds, batch_size=asked.batch_size)
                found = measured(make, count, samples, training, asked.device)
                rows.append({"model": name, "device": asked.device, "clients": count, **found})
                print(json.dumps(rows[-1]), flush=True)
    except (PolyfedError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    print(f"\n{'network':20}{'clients':>8}{'serial':>10}{'vectorized':>10}{'speedup':>9}")
    for row in rows:
        print("{model:20}{clients:8}{serial:9.3f}s{vectorized:9.3f}s{speedup:9.2f}".format(**row))


def measured(
    make: Callable[[], nn.Module], count: int, samples: int, training: Training, device: str
) -> dict[str, float]:
    """Seconds per round of either executor, and their ratio."""
    clocks = {"serial": Clock(), "vectorized": Clock()}
    for _ in range(2):
        for executor, clock in clocks.items():
            clients = [Client("network", images(samples, number)) for number in range(count)]
            workers = max(2, count) if executor == "vectorized" else 1
            Federation(
                clients,
                Local(),
                training,
                task=Task(classes=CLASSES),
                executor=Execution(executor, device=device, workers=workers),
                builders={"network": make},
                trackers=[clock],
            ).run()
    serial, vectorized = (median(clock.seconds) for clock in clocks.values())
    return {"serial": serial, "vectorized": vectorized, "speedup": serial / vectorized}


def images(count: int, seed: int) -> LabeledSamples:
    """Random bytes, random classes."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (count, *SHAPE), generator=draws, dtype=torch.uint8)
    return LabeledSamples(x, torch.randint(0, CLASSES, (count,), generator=draws))


if __name__ == "__main__":
    main()
