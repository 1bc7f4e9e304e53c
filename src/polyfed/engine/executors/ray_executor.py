"""The executor `ray`: clients' work done by processes of Ray, on this machine or on a cluster.

With RAY_ADDRESS set, the work goes to the machines of that cluster, else to processes that are started here and end
with the run. Every process is an actor of Ray's with one core, and with one GPU where networks compute on these: so a
run uses several. It makes the federation anew, from the recipe, and does what any worker does (`job_requests`): so the
result is that of `serial` bit for bit, and a run goes on with any executor.

What polyfed hands to Ray are bytes, facts as JSON and tensors as they lie in memory, and nothing of ours is unpickled
from them. Ray itself pickles what it needs to run them: the actor's class, the name of the function that makes the
federation, with the recipe's text, and its own errors. So whoever can speak to Ray's processes can run code in them.
Those that are started here listen on the loopback interface alone, and to those who know a token that is made for the
run; a cluster is for its keeper to guard.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from polyfed import profiling
from polyfed.core.settings import Training
from polyfed.engine.evaluation import from_scores_of
from polyfed.engine.executors.base import WorkerContext
from polyfed.engine.executors.job_requests import (
    Worker,
    WorkerDied,
    WorkerLoop,
    check_reply,
    described_error,
    read_answer,
    request_facts,
    request_row,
    request_tensors,
)
from polyfed.engine.executors.jobs import Job, TrainJob
from polyfed.engine.executors.process_pool import (
    Estimates,
    ProcessPool,
    Rebuild,
    Say,
    available_cores,
    unavailable_reason,
)
from polyfed.engine.executors.ray_session import CLUSTER, RaySession, address_of_cluster
from polyfed.engine.executors.shared_buffer import Parcel
from polyfed.engine.executors.worker import tune_process
from polyfed.engine.weight_store import WeightRow, WeightStore
from polyfed.errors import ConfigError, MissingPackage, RunError
from polyfed.version import __version__

_PATIENCE = 60.0  # seconds that a worker in place of another one may wait for a free core


class RayExecutor(ProcessPool):
    """Actors of Ray that stay for a run: made when they are first needed, ended by `close`.

    An actor that dies is replaced as a worker of `ProcessPool` is; where the cluster has no core left for another one,
    the run goes on with those that are there.

    Args:
        context: what is worked on. workers: how many actors; None: the cores of this machine, or its GPUs, where
            networks compute on them. training: how much. say: told of actors that died. rebuild: makes the same
            federation in an actor; Ray pickles it.

    Raises:
        ConfigError: Ray is not installed, this is not Linux, the device is another one than the CPU and NVIDIA's GPUs,
            there is no `rebuild`, or no number of workers for a cluster.
    """

    def __init__(
        self,
        context: WorkerContext,
        workers: int | None,
        training: Training,
        say: Say,
        rebuild: Rebuild | None = None,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingPackage(
                "the executor 'ray' needs the package 'ray'; install it with: pip install 'polyfed[ray]'"
            )
        on_gpus = _on_gpus(context.model_factory.device)
        if rebuild is None:
            raise ConfigError(
                "expected a recipe for the executor 'ray', whose processes make the federation anew, got a federation "
                "made in Python; give it polyfed.Execution('ray', rebuild=...)"
            )
        address = address_of_cluster()
        if workers is None and address is not None:
            kind = "GPUs" if on_gpus else "cores"
            raise ConfigError(
                f"expected workers with {CLUSTER}={address}: how many of the cluster's {kind} to take (--workers)"
            )
        if address is not None and address.startswith("ray://"):
            raise ConfigError(f"expected {CLUSTER} as host:port of a cluster that this machine is of, got a client's")
        here = torch.cuda.device_count() if on_gpus else available_cores()
        super().__init__(context, min(workers or here, len(context.clients)), Estimates(context, training), say)
        context.store.keep_in_main_memory()  # as weights travel
        self._on_gpus = on_gpus
        self._rebuild = rebuild
        self._ray: RaySession | None = None

    def hire(self) -> Worker:
        """See `ProcessPool`."""
        assert self._ray is not None
        return _RayWorker(self._context, self._ray, self._rebuild)

    def answered(self, busy: Collection[Worker]) -> list[Worker]:
        """See `ProcessPool`."""
        assert self._ray is not None
        asked = {worker.pending: worker for worker in busy if isinstance(worker, _RayWorker)}
        return [asked[one] for one in self._ray.ready(list(asked))]

    def close(self) -> None:
        """See `Executor`."""
        super().close()
        if self._ray is not None:
            self._ray.end()
        self._ray = None

    def _with_workers(self) -> bool:
        if self._ray is None:
            self._ray = RaySession(self.workers, self._on_gpus)
        return super()._with_workers()

    def _replace(self, worker: Worker) -> None:
        self.running.remove(worker)
        worker.terminate()
        other = self._another()
        if other is not None:
            self.running.append(other)
            return
        if not self.running:
            raise RunError(f"the last of Ray's workers died, and there is no free {self._needed} for another one")
        self.workers -= 1
        self._say(
            f"no {self._needed} of the cluster is free in place of it; the run goes on with {self.workers} workers"
        )

    @property
    def _needed(self) -> str:
        """What a worker has for itself."""
        return "GPU" if self._on_gpus else "core"

    def _another(self) -> Worker | None:
        """A worker that has begun; None where no core, or no GPU, is free.

        For a while after a node was lost Ray still places workers there, which die as they begin.
        """
        end = time.monotonic() + _PATIENCE
        while (left := end - time.monotonic()) > 0:
            other = self.hire()
            assert isinstance(other, _RayWorker)
            if not other.is_placed(left):
                other.terminate()
                return None
            try:
                other.wait_ready()
            except _DiedAtOnce:
                other.terminate()
            else:
                return other
        return None


def _on_gpus(device: torch.device) -> bool:
    """Whether each worker gets a GPU of its own.

    Raises:
        ConfigError: Ray's workers cannot compute on this device.
    """
    if device.type == "cuda" and device.index is not None:
        raise ConfigError(
            f"expected device 'cuda' with the executor 'ray', whose workers have a GPU each, got '{device}'"
        )
    if reason := unavailable_reason("cpu" if device.type == "cuda" else device.type):
        raise ConfigError(f"expected another executor than 'ray', as {reason}")
    return device.type == "cuda"


class _DiedAtOnce(RunError):
    """A worker died before it had answered once."""


class _RayWorker:
    """See `Worker`; it answers when `pending` is ready.

    Args:
        context: what it works on. ray: where its actor is made. rebuild: see `RayExecutor`.
    """

    def __init__(self, context: WorkerContext, ray: RaySession, rebuild: Rebuild) -> None:
        self._store = context.store
        self._ray = ray
        self._actor = actor = ray.actor(WorkerActor)
        self._alive = True
        self._asked: Job | None = None
        self._placed = actor.is_there.remote()
        self.pending = actor.begin.remote(__version__, torch.__version__, str(Path.cwd()), rebuild)

    def is_placed(self, seconds: float) -> bool:
        """Whether it has been given a core, for which it waits no longer than this."""
        return bool(self._ray.ready([self._placed], seconds))

    def wait_ready(self) -> None:
        """See `Worker`.

        Raises:
            RunError: it died. PolyfedError: it cannot make the federation.
        """
        try:
            reply = json.loads(self._received())
        except WorkerDied as how:
            raise _DiedAtOnce(f"a worker of Ray's died as it began: {how}") from None
        check_reply(reply)

    @profiling.timed("messages")
    def send(self, asked: Job, evaluation: int = 0) -> None:
        """See `Worker`."""
        row = request_row(asked)
        parcel = Parcel()
        described = parcel.write({**request_tensors(asked), "own": None if row is None else row.bytes})
        held = None if row is None else row.variant
        request = {**request_facts(asked, evaluation), "tensors": described, "own": held}
        self._asked = asked
        self.pending = self._actor.answer.remote(parcel.seal(request))

    @profiling.timed("messages")
    def receive(self) -> tuple[Any, float]:
        """See `Worker`."""
        parcel = Parcel()
        reply = parcel.open(self._received())
        check_reply(reply)
        asked = self._asked
        assert asked is not None
        tensors = parcel.read(reply["tensors"])
        fresh = None
        if isinstance(asked, TrainJob) and reply["new"]:
            fresh = self._store.allocate(asked.client.architecture, asked.variant)
            _fill(fresh, tensors["weights"])
        self._asked = None
        return read_answer(asked, reply, tensors, fresh), reply["seconds"]

    def is_alive(self) -> bool:
        """See `Worker`."""
        return self._alive

    def terminate(self) -> None:
        """See `Worker`."""
        self._alive = False
        self._ray.kill(self._actor)

    def _received(self) -> bytes:
        """What it has sent, when it is there.

        Raises:
            Died: it is no more.
        """
        try:
            return self._ray.received(self.pending)
        except WorkerDied:
            self._alive = False
            raise


def _fill(row: WeightRow, content: torch.Tensor) -> WeightRow:
    """Write a whole row, as it lies in another process.

    Raises:
        RunError: it is not as long as the network's rows are here.
    """
    if content.shape != row.bytes.shape:
        raise RunError(f"expected {row.bytes.numel()} bytes of weights of '{row.architecture}', got {content.numel()}")
    row.bytes.copy_(content)
    return row


# the actor --------------------------------------------------------------------------------------------------------


class WorkerActor:
    """A worker in a process of Ray's. But for `begin`, what it is told is bytes; what it says is bytes always."""

    def __init__(self) -> None:
        self._inbox = Parcel()
        self._outbox = Parcel()
        self._loop: WorkerLoop | None = None

    def is_there(self) -> bool:
        """Once it has a core."""
        return True

    def begin(self, version: str, torch_version: str, folder: str, rebuild: Rebuild) -> bytes:
        """Make the federation; what went wrong, if anything did, in JSON.

        Args:
            version, torch_version: of polyfed and PyTorch where the run is. folder: where the run is: relative paths
                mean the same here. rebuild: see `RayExecutor`.
        """
        try:
            here = f"polyfed {__version__} with PyTorch {torch.__version__}"
            if here != f"polyfed {version} with PyTorch {torch_version}":
                raise ConfigError(
                    f"expected polyfed {version} with PyTorch {torch_version} on every machine of the cluster, got "
                    f"{here} on {socket.gethostname()}"
                )
            with contextlib.suppress(OSError):  # a machine may do without the folder
                os.chdir(folder)
            tune_process()
            made = rebuild()
            store = WeightStore(made.model_factory, [])  # of one client's rows at a time
            store.keep_in_main_memory()
            context = WorkerContext(
                made.method, made.model_factory, made.clients, store, from_scores_of(made.evaluation)
            )
            self._loop = _ActorLoop(context, self._inbox, self._outbox)
            return b"{}"
        except Exception as error:
            return json.dumps(described_error(error)).encode()

    def answer(self, request: bytes) -> bytes:
        """Do what is asked."""
        assert self._loop is not None
        reply = self._loop.reply(self._inbox.open(request))
        return self._outbox.seal(reply)


class _ActorLoop(WorkerLoop):
    """Weights come with the request, and go with the answer."""

    def own_row(self, request: Mapping[str, Any], tensors: Mapping[str, Any]) -> WeightRow | None:
        """See `WorkerLoop`."""
        if request["own"] is None:
            return None
        return _fill(self._row(request, request["own"]), tensors["own"])

    def fresh_row(self, request: Mapping[str, Any]) -> WeightRow:
        """See `WorkerLoop`."""
        return self._row(request, request["variant"])

    def weights_sent(self, fresh: WeightRow) -> torch.Tensor | None:
        """See `WorkerLoop`."""
        return fresh.bytes

    def _row(self, request: Mapping[str, Any], variant: str) -> WeightRow:
        return self.context.store.allocate(self.context.clients[request["client"]].architecture, variant)
