"""Time of processors, and one computing thread, with which rounds give the same bits everywhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

_of_workers = 0.0  # seconds


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
