"""The job of `benchmarks/htfllib.py`: clients with different networks train by a method, tested after every round.

Needs PyTorch alone. What the networks have in common is the width of the representation and the head, as FedGH and
FedProto ask for; all heads begin alike.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

LR = 0.01
WIDTH = 500  # of the representation
CLASSES = 10
CHANNELS = ((16, 32), (32, 64), (8, 16), (16, 16))  # of both convolutions, by kind of network
SERVER_EPOCHS = 100  # HtFLlib's default, for FedGH's header and FedTGP's prototypes
HEADER_LR = 0.01
ENERGY = (0.95, 0.98)  # of FedKD's compression, first and last
MARGIN = 100.0  # FedTGP's


@dataclass(frozen=True)
class MethodsJob:
    """What is to be done.

    Attributes:
        method: polyfed's name of it.
        inputs, labels: (clients, samples, 3, 32, 32), normalized, and (clients, samples): a client's training images.
        test_inputs, test_labels: what it is tested on after every round.
        batch_size: divides the samples, as HtFLlib leaves out a batch that is not full.
        rounds: each tested once.
    """

    method: str
    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    batch_size: int
    rounds: int

    @property
    def clients(self) -> int:
        """How many, all of whom take part in every round."""
        return len(self.inputs)


def network(number: int) -> nn.Sequential:
    """The network of a client, or of the server where `number` is 0, with the same initial weights each time."""
    first, second = CHANNELS[number % len(CHANNELS)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = nn.Linear(WIDTH, CLASSES)
        torch.manual_seed(1 + number)
        return nn.Sequential(
            nn.Conv2d(3, first, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(25 * second, WIDTH),
            nn.ReLU(),
            head,
        )


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """The words that both programs take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="FILE", help="what `benchmarks/htfllib.py` wrote for both")
    parser.add_argument("--method", required=True)
    parser.add_argument("--batch-size", type=int, default=10, help="[10]")
    parser.add_argument("--rounds", type=int, default=5, help="[5]")
    return parser


def load(words: argparse.Namespace) -> MethodsJob:
    """The job that the command line asks for. Sets one computing thread."""
    torch.set_num_threads(1)
    data = torch.load(words.data, mmap=True, weights_only=True)
    return MethodsJob(words.method, **data, batch_size=words.batch_size, rounds=words.rounds)


def shuffle_nothing() -> None:
    """From now on every permutation that PyTorch draws in this process is the order as it was."""
    torch.randperm = lambda n, **settings: torch.arange(n)


class ProcessorLaps:
    """Processor seconds of this process between one mark and the next."""

    def __init__(self) -> None:
        self._marks = [time.process_time()]

    def mark(self) -> None:
        """A round begins, or is through."""
        self._marks.append(time.process_time())

    def last(self, count: int) -> list[float]:
        """The last `count` laps."""
        laps = [after - before for before, after in itertools.pairwise(self._marks)]
        return laps[-count:]


def report(laps: Sequence[float], accuracies: Sequence[float], files: float = 0.0) -> None:
    """Print the line of JSON.

    Args:
        laps: processor seconds of the rounds that count, scoring included. accuracies: of all rounds, the mean over
            clients. files: processor seconds of a round in reading and writing them.
    """
    print(json.dumps({"seconds": median(laps), "files": files, "accuracies": list(accuracies)}), flush=True)
