"""Which executor carries out a run: the one that is named, or for "auto" the one that pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from polyfed.engine.executors.executor import Executor, ExecutorSetup
from polyfed.engine.executors.process_pool import ProcessPool, problem_of_processes
from polyfed.engine.executors.serial import Serial
from polyfed.engine.executors.vectorized import VectorizedExecutor
from polyfed.engine.executors.worker_pool import seconds_of_training, worker_count
from polyfed.errors import ConfigError, described
from polyfed.registry import EXECUTORS, import_object, is_own

_WORTH = 0.3  # estimated seconds of a run from which workers, which take some 0.1 s to come and go, are worth having


def executor_kind(given: str | type[Executor], beside: Sequence[str] = ()) -> str | type[Executor]:
    """A registered name, or the class of an executor of one's own.

    Args:
        given: a registered name, ``"package.module:Class"``, or a class.
        beside: folders in which the module is looked for, too.

    Raises:
        ConfigError: no such executor, or a class of something else.
    """
    kind = import_object("executor", given, beside) if isinstance(given, str) and is_own(given) else given
    if isinstance(kind, str):
        _ = EXECUTORS[kind]
    elif not isinstance(kind, type) or not issubclass(kind, Executor):
        raise ConfigError(f"executor: expected a name, or a class that extends polyfed.Executor, got {described(kind)}")
    return kind


def make_executor(kind: str | type[Executor], setup: ExecutorSetup) -> Executor:
    """The executor of this kind: a name, or the class of one's own.

    Raises:
        ConfigError: there is none, or it is not possible here.
    """
    kind = executor_kind(kind)
    make = EXECUTORS[kind] if isinstance(kind, str) else kind
    executor: Executor = make(setup)
    return executor


def automatic(setup: ExecutorSetup) -> Executor:
    """On a GPU "vectorized"; else "processes" where workers were asked for, or the work is worth them."""
    if clients_per_batch("auto", setup.device, setup.workers) > 1:
        return VectorizedExecutor(setup)
    cohort = setup.training.cohort_size(len(setup.clients))
    if worker_count(setup) > 1 and cohort > 1:
        seconds = setup.training.rounds * cohort * fmean(seconds_of_training(setup))
        if setup.workers is not None or (seconds >= _WORTH and not problem_of_processes(setup.device)):
            return ProcessPool(setup)
    return Serial(replace(setup, workers=None))


def clients_per_batch(kind: str | type[Executor], device: str, workers: int | None) -> int:
    """How many clients train as one under these settings of a run, at most; 1: they train one by one."""
    if kind == "auto":
        kind = "serial" if device.partition(":")[0] == "cpu" or workers == 1 else "vectorized"
    if isinstance(kind, str) and kind not in EXECUTORS:  # of one's own, in a run folder, which imports nothing
        return 1
    found: type[Executor] = EXECUTORS[kind] if isinstance(kind, str) else kind
    return found.stack_size(workers)
