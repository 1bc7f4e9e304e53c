"""The job that every framework of `benchmarks/rivals.py` does: FedAvg among clients with CNN-1 on their own images.

Each round, every client gets the average, makes one pass over its images in an order of its own with SGD, and the mean
of all weights is the next average. Clients have equally many images, so that weighting by samples changes nothing.
Needs PyTorch alone, as each framework runs in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LR = 0.01
SEED = 0
CHECKED = 50  # images per client on which the last average is scored


@dataclass(frozen=True)
class Job:
    """What is to be done.

    Attributes:
        inputs: (clients, samples, 3, 32, 32), floats, normalized already.
        labels: (clients, samples), classes from 0 to 9.
        batch_size: samples per step.
        rounds: how many count; one more goes before them, in which much is done once.
        workers: processes that train; threads, where `pool` says so.
        pool: "processes" or "threads"; for a framework that has both.
    """

    inputs: Tensor
    labels: Tensor
    batch_size: int
    rounds: int
    workers: int
    pool: str = "processes"

    @property
    def clients(self) -> int:
        """How many, all of whom take part in every round."""
        return len(self.inputs)

    @property
    def samples(self) -> int:
        """Of a client."""
        return self.inputs.shape[1]

    @property
    def steps(self) -> int:
        """Of SGD in a round, over all clients."""
        return self.clients * -(-self.samples // self.batch_size)


def network() -> nn.Sequential:
    """CNN-1 of FedGH's Table 2 (Yi et al., ACM MM 2023) with the same initial weights each time; 2 621 558 numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return nn.Sequential(
            nn.Conv2d(3, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(800, 2000),
            nn.ReLU(),
            nn.Linear(2000, 500),
            nn.ReLU(),
            nn.Linear(500, 10),
        )


def train(model: nn.Module, x: Tensor, y: Tensor, batch_size: int) -> None:
    """One pass in random order: what one writes by hand, and what the users of a framework without a loop write."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for rows in torch.randperm(len(x)).split(batch_size):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


def load(path: str) -> tuple[Tensor, Tensor]:
    """A job's inputs and labels; the file is mapped, so that processes share them."""
    data = torch.load(path, mmap=True, weights_only=True)
    return data["inputs"], data["labels"]


class Laps:
    """Wall seconds between one mark and the next."""

    def __init__(self) -> None:
        self.marks = [time.perf_counter()]

    def mark(self) -> None:
        """A round is through."""
        self.marks.append(time.perf_counter())

    def seconds(self, rounds: int) -> list[float]:
        """Of the last `rounds` laps."""
        laps = [after - before for before, after in zip(self.marks, self.marks[1:], strict=False)]
        return laps[-rounds:]


def asked(description: str | None) -> tuple[Job, str]:
    """The job that the command line asks for, and the file of its data. Sets one computing thread."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="FILE", help="what `benchmarks/rivals.py` wrote for all")
    parser.add_argument("--batch-size", type=int, default=10, help="[10]")
    parser.add_argument("--rounds", type=int, default=2, help="that count; one more goes before [2]")
    parser.add_argument("--workers", type=int, default=1, help="that train [1]")
    parser.add_argument("--pool", choices=("processes", "threads"), default="processes", help="of workers [processes]")
    words = parser.parse_args()
    torch.set_num_threads(1)
    return Job(*load(words.data), words.batch_size, words.rounds, words.workers, words.pool), words.data


def report(job: Job, laps: Laps, average: Mapping[str, Tensor]) -> None:
    """Print the line of JSON: seconds of each round that counts, and what shows that the same work was done.

    moved: the distance between the last average and the initial weights; loss: the last average's mean cross entropy on
    the first images of all clients. Both come out alike for all who take the same steps, in whatever order of samples.

    Args:
        job: which one it was.
        laps: a mark at the end of every round.
        average: the last one; tensors in the order of `network`'s, names may differ.
    """
    start = network()
    first = [tensor.clone() for tensor in start.state_dict().values()]
    last = [tensor.detach().cpu() for tensor in average.values()]
    start.load_state_dict(dict(zip(start.state_dict(), last, strict=True)))
    moved = sum(float((a - b).square().sum()) for a, b in zip(last, first, strict=True)) ** 0.5
    with torch.no_grad():
        z = start(job.inputs[:, :CHECKED].flatten(0, 1))
    loss = float(functional.cross_entropy(z, job.labels[:, :CHECKED].flatten()))
    row: dict[str, Any] = {"round_s": laps.seconds(job.rounds), "steps_per_round": job.steps, "workers": job.workers}
    print(json.dumps({**row, "moved": moved, "loss": loss}), flush=True)
