"""Time of rounds and of processors; and one computing thread, with which rounds give the same bits everywhere."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from statistics import fmean

import torch

_of_workers = 0.0  # seconds


class Pace:
    """How long rounds take, with the checkpoints between them; those with and without scores apart."""

    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {False: [], True: []}

    def add(self, seconds: float, evaluated: bool) -> None:
        """A round took so long. evaluated: whether networks were scored in it."""
        self._seconds[evaluated].append(seconds)

    def seconds_left(self, number: int, rounds: int, every: int) -> float:
        """What the rounds after `number` take, of which each `every`th and the last are evaluated; as the last 20."""
        left = max(0, rounds - number)
        evaluated = min(left, math.ceil(rounds / every) - number // every)
        paces = {kind: fmean(seconds[-20:]) for kind, seconds in self._seconds.items() if seconds}
        usual = max(paces.values())
        return evaluated * paces.get(True, usual) + (left - evaluated) * paces.get(False, usual)


def processor_seconds() -> float:
    """Processor time that this process has used so far, all threads, and the workers whose answers it has."""
    return time.process_time() + _of_workers


def include_processor_seconds(seconds: float) -> None:
    """Count what a worker has used for an answer."""
    global _of_workers
    _of_workers += seconds


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """One computing thread: the same bits whatever the machine's cores, and no slow-down beside busy neighbors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
