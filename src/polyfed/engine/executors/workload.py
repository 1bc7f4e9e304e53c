"""How much work a federation is, and how many workers may share it."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

from polyfed.core.client import Client
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


class Estimates:
    """How long clients take, guessed by their rows and the sizes of their networks."""

    def __init__(self, setup: ExecutorSetup) -> None:
        self._setup = setup
        names = {client.architecture for client in setup.clients}
        template = setup.model_factory.module
        self._sizes = {name: sum(p.numel() for p in template(name).parameters()) for name in names}

    def seconds(self, client: Client) -> float:
        """Seconds of one round's training."""
        rows = len(client.data.train)
        training = self._setup.training
        steps = -(-rows // training.batch_size)
        return training.local_epochs * (steps * _STEP + rows * self._sizes[client.architecture] * _SAMPLE)

    def run(self) -> float:
        """Seconds of the training of a whole run."""
        clients = self._setup.clients
        mean = sum(map(self.seconds, clients)) / len(clients)
        return self._setup.training.rounds * self._setup.training.cohort_size(len(clients)) * mean
