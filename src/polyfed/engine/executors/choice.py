"""Which of the executors carries out a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyfed.core.settings import Training, problem_of_workers
from polyfed.engine.executors.client_work import Executor, Serial, WorkerContext
from polyfed.engine.executors.process_pool import ProcessPool, unavailable_reason
from polyfed.engine.executors.vectorized import VectorizedExecutor, clients_per_batch
from polyfed.engine.executors.worker_pool import Estimates, Say, available_cores
from polyfed.errors import ConfigError

_NAMES = ("auto", "serial", "processes", "vectorized", "ray")
_WORTH = 0.3  # estimated seconds of a run from which workers, which take some 0.1 s to come and go, are worth having


def make_executor(
    name: str,
    workers: int | None,
    context: WorkerContext,
    training: Training,
    say: Say,
    rebuild: Callable[[], Any] | None = None,
) -> Executor:
    """The executor of a run.

    Args:
        name: "serial", "processes", "vectorized", or "auto": on device "cpu" "processes" where it is possible, two or
            more clients train in a round, and `workers` asks for it, or the work is so much that it pays; on others
            "vectorized". Or "ray".
        workers: so many at the same time, processes or clients of a stack; None: the cores that this process may use,
            or `vectorized.SIZE`.
        context: what is worked on. training: how much. say: is given a line when a worker had to be replaced, or of
            clients that cannot be stacked. rebuild: makes the same federation in another process, where that is needed.

    Raises:
        ConfigError: no such executor, or it is not possible here.
    """
    if rebuild is not None and name != "ray":
        raise ConfigError(f"expected no rebuild with the executor '{name}', which makes no federation anew, got one")
    if name not in _NAMES:
        known = "', '".join(_NAMES[:-1])
        raise ConfigError(f"expected the executor '{known}' or '{_NAMES[-1]}', got '{name}'")
    if name == "ray":
        from polyfed.engine.executors.ray_executor import RayExecutor

        return RayExecutor(context, workers, training, say, rebuild)
    if problem := problem_of_workers(name, workers):
        raise ConfigError(problem)
    device = context.model_factory.device.type
    if (size := clients_per_batch(name, device, workers)) > 1:
        return VectorizedExecutor(context, size, say)
    asked = name == "processes" or (name == "auto" and (workers or 1) > 1)
    if asked and (reason := unavailable_reason(device)):
        together = "'vectorized' or 'auto', by which clients of one network train as one"
        instead = "'serial' with 1 worker" if device == "cpu" else together
        raise ConfigError(f"expected the executor {instead}, as {reason}")
    count = min(workers or available_cores(), len(context.clients))
    estimates = Estimates(context, training)
    chosen = name == "processes"
    if name == "auto" and count > 1 and training.cohort_size(len(context.clients)) > 1:
        chosen = asked or (unavailable_reason(device) is None and estimates.run() >= _WORTH)
    return ProcessPool(context, count, estimates, say) if chosen else Serial(context)
