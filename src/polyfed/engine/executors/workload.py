"""How much work a federation is, and how many workers may share it."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

from polyfed.engine.executors.executor import ExecutorSetup

_STEP, _SAMPLE = 3e-4, 4e-10  # seconds per training step; per sample and parameter. Rough: for convolutions too little


def available_cores() -> int:
    """How many cores this process may use: those it is bound to, and its share of them where a container has one."""
    count = getattr(os, "process_cpu_count", lambda: len(os.sched_getaffinity(0)))()
    try:
        share, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        quota = math.inf if share == "max" else int(share) / int(period)
    except (OSError, ValueError):
        quota = math.inf
    return max(1, min(count or 1, math.ceil(quota) if math.isfinite(quota) else sys.maxsize))


def worker_count(setup: ExecutorSetup) -> int:
    """How many workers there are to be: as asked for or one for each core, and no more than clients."""
    return min(setup.workers or available_cores(), len(setup.clients))


def seconds_of_training(setup: ExecutorSetup) -> list[float]:
    """Seconds of a round's training by number of client, guessed by rows and the sizes of networks."""
    training = setup.training
    names = {client.architecture for client in setup.clients}
    sizes = {name: sum(p.numel() for p in setup.model_factory.module(name).parameters()) for name in names}
    found = []
    for client in setup.clients:
        rows = len(client.data.train)
        steps = math.ceil(rows / training.batch_size)
        found.append(training.local_epochs * (steps * _STEP + rows * sizes[client.architecture] * _SAMPLE))
    return found
