"""Processor time of a run: of this process and of the workers whose answers it has."""

from __future__ import annotations

import time

_of_workers = 0.0


def processor_seconds() -> float:
    """Processor time that this process has used so far, all threads, and the workers whose answers it has."""
    return time.process_time() + _of_workers


def include_processor_seconds(seconds: float) -> None:
    """Count what a worker has used for an answer."""
    global _of_workers
    _of_workers += seconds
