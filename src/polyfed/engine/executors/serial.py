"""One client after the other: the reference that every other executor must equal."""

from __future__ import annotations

from collections.abc import Sequence

from polyfed.core.randomness import keep_global_rng
from polyfed.engine.executors.client_work import run_job
from polyfed.engine.executors.executor import Done, Executor, ExecutorSetup
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.errors import ConfigError


class Serial(Executor):
    """One client after the other, in this process."""

    in_process = True

    def __init__(self, setup: ExecutorSetup) -> None:
        super().__init__(setup)
        if setup.workers not in (None, 1):
            raise ConfigError(f"expected workers = 1, as the executor 'serial' has one, got {setup.workers}")

    def run(self, jobs: Sequence[TrainJob], done: Done) -> list[JobResult]:
        results = []
        with keep_global_rng():
            for job in jobs:
                results.append(run_job(job, self.setup.method, self.setup.model_factory, self.setup.store))
                done(len(results))
        return results
