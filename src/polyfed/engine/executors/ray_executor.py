"""The executor `ray`: clients' work done by processes of Ray, on this machine or on a cluster.

With RAY_ADDRESS set, the work goes to the machines of that cluster, else to processes that are started here and end
with the run. Every process is an actor of Ray's with one core. It makes the federation anew, from the recipe, and does
what any worker does (`job_requests`): so the result is that of `serial` bit for bit, and a run goes on with any
executor.

What polyfed hands to Ray are bytes, facts as JSON and tensors as they lie in memory, and nothing of ours is unpickled
from them. Ray itself pickles what it needs to run them: the actor's class, the name of the function that makes the
federation, with the recipe's text, and its own errors. So whoever can speak to Ray's processes can run code in them.
Those that are started here listen on the loopback interface alone, and to those who know a token that is made for the
run; a cluster is for its keeper to guard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from polyfed import profiling
from polyfed.core.settings import Training
from polyfed.engine.executors.base import Crew, Job, Scoring
from polyfed.engine.executors.job_requests import (
    Died,
    Worker,
    WorkerLoop,
    check_reply,
    described_error,
    read_answer,
    request_facts,
)
from polyfed.engine.executors.process_pool import Estimates, Pool, Rebuild, Say, cores, obstacle
from polyfed.engine.executors.shared_buffer import Parcel
from polyfed.engine.executors.worker import tune_process
from polyfed.engine.weight_store import Row, Store, row_of
from polyfed.errors import RequestError, RunError
from polyfed.signals import TERMINATION_SIGNALS
from polyfed.version import __version__

_CLUSTER = "RAY_ADDRESS"  # Ray's own variable
_PATIENCE = 60.0  # seconds that a worker in place of another one may wait for a free core
_LONGEST = 300  # characters of Ray's errors that are told
_REACHABLE = 10.0  # seconds that a cluster has to be found
_SOON = "5"  # seconds after which Ray's processes here end once their head has
_SHORT = 40  # characters that a folder's name may have, so that Ray can give its sockets names


class RayExecutor(Pool):
    """Actors of Ray that stay for a run: made when they are first needed, ended by `close`.

    An actor that dies is replaced as a worker of `Pool` is; where the cluster has no core left for another one, the
    run goes on with those that are there.

    Args:
        crew: what is worked on. workers: how many actors; None: the cores of this machine. training: how much.
        say: told of actors that died. rebuild: makes the same federation in an actor; Ray pickles it.

    Raises:
        RequestError: Ray is not installed, this is not Linux or the device not the CPU, there is no `rebuild`, or no
            number of workers for a cluster.
    """

    def __init__(
        self, crew: Crew, workers: int | None, training: Training, say: Say, rebuild: Rebuild | None = None
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise RequestError(
                "the executor 'ray' needs the package 'ray'; install it with: pip install 'polyfed[ray]'"
            )
        if reason := obstacle(crew.architectures.device.type):
            raise RequestError(f"expected another executor than 'ray', as {reason}")
        if rebuild is None:
            raise RequestError(
                "expected a recipe for the executor 'ray', whose processes make the federation anew, got a federation "
                "made in Python; give it polyfed.Execution('ray', rebuild=...)"
            )
        if workers is None and _address() is not None:
            raise RequestError(
                f"expected workers with {_CLUSTER}={_address()}: how many of the cluster's cores to take (--workers)"
            )
        if (_address() or "").startswith("ray://"):
            raise RequestError(f"expected {_CLUSTER} as host:port of a cluster that this machine is of, got a client's")
        count = min(workers or cores(), len(crew.clients))
        super().__init__(crew, count, Estimates(crew, training), say)
        self._rebuild = rebuild
        self._ray: _Ray | None = None

    def hire(self) -> Worker:
        """See `Pool`."""
        assert self._ray is not None
        return _RayWorker(self._crew, self._ray.actor(), self._rebuild)

    def answered(self, busy: Collection[Worker]) -> list[Worker]:
        """See `Pool`."""
        import ray

        asked = {worker.pending: worker for worker in busy if isinstance(worker, _RayWorker)}
        ready, _ = ray.wait(list(asked), num_returns=1)
        return [asked[one] for one in ready]

    def close(self) -> None:
        """See `Executor`."""
        super().close()
        if self._ray is not None:
            self._ray.end()
        self._ray = None

    def _staffed(self) -> bool:
        if self._ray is None:
            self._ray = _Ray(self.workers)
        return super()._staffed()

    def _replace(self, worker: Worker) -> None:
        self._staff.remove(worker)
        worker.end()
        other = self.hire()
        assert isinstance(other, _RayWorker)
        if other.is_placed(_PATIENCE):
            other.greet()
            self._staff.append(other)
            return
        other.end()
        if not self._staff:
            raise RunError("the last of Ray's workers died, and there is no free core for another one")
        self.workers -= 1
        self._say(f"no core of the cluster is free in place of it; the run goes on with {self.workers} workers")


class _RayWorker:
    """See `Worker`; it answers when `pending` is ready.

    Args:
        crew: what it works on. actor: of `WorkerActor`. rebuild: see `RayExecutor`.
    """

    def __init__(self, crew: Crew, actor: Any, rebuild: Rebuild) -> None:
        self._store = crew.store
        self._actor = actor
        self._alive = True
        self._asked: Job | Scoring | None = None
        self._placed = actor.is_there.remote()
        self.pending = actor.begin.remote(__version__, torch.__version__, str(Path.cwd()), rebuild)

    def is_placed(self, seconds: float) -> bool:
        """Whether it has been given a core, for which it waits no longer than this."""
        import ray

        ready, _ = ray.wait([self._placed], timeout=seconds)
        return bool(ready)

    def greet(self) -> None:
        """See `Worker`.

        Raises:
            RunError: it died. PolyfedError: it cannot make the federation.
        """
        try:
            reply = json.loads(self._received())
        except Died as how:
            raise RunError(f"a worker of Ray's died as it began: {how}") from None
        check_reply(reply)

    @profiling.timed("messages")
    def ask(self, asked: Job | Scoring, evaluation: int = 0) -> None:
        """See `Worker`."""
        row = row_of(asked.client)
        parcel = Parcel()
        tensors = {
            "message": asked.message,
            "state": asked.client.state,
            "own": None if row is None else row.bytes,
        }
        described = parcel.put(tensors)
        held = None if row is None else row.variant
        request = {**request_facts(asked, evaluation), "tensors": described, "own": held}
        self._asked = asked
        self.pending = self._actor.answer.remote(parcel.seal(request))

    @profiling.timed("messages")
    def answer(self) -> tuple[Any, float]:
        """See `Worker`."""
        parcel = Parcel()
        reply = parcel.open(self._received())
        check_reply(reply)
        asked = self._asked
        assert asked is not None
        tensors = parcel.take(reply["tensors"])
        fresh = None
        if isinstance(asked, Job) and reply["new"]:
            fresh = self._store.fresh(asked.client.architecture, asked.variant)
            _fill(fresh, tensors["weights"])
        self._asked = None
        return read_answer(asked, reply, tensors, fresh), reply["seconds"]

    def alive(self) -> bool:
        """See `Worker`."""
        return self._alive

    def end(self) -> None:
        """See `Worker`."""
        import ray

        self._alive = False
        with contextlib.suppress(Exception):  # Ray itself may have ended
            ray.kill(self._actor)

    def _received(self) -> bytes:
        """What it has sent, when it is there.

        Raises:
            Died: it is no more.
        """
        import ray

        try:
            data: bytes = ray.get(self.pending)
            return data
        except ray.exceptions.RayError as error:
            self._alive = False
            raise Died(type(error).__name__) from None


def _fill(row: Row, content: torch.Tensor) -> Row:
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
                raise RequestError(
                    f"expected polyfed {version} with PyTorch {torch_version} on every machine of the cluster, got "
                    f"{here} on {socket.gethostname()}"
                )
            with contextlib.suppress(OSError):  # a machine may do without the folder
                os.chdir(folder)
            tune_process()
            crew = rebuild().crew
            store = Store(crew.architectures, [])  # of one client's rows at a time
            self._loop = _ActorLoop(dataclasses.replace(crew, store=store), self._inbox, self._outbox)
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

    def own_row(self, request: Mapping[str, Any], tensors: Mapping[str, Any]) -> Row | None:
        """See `WorkerLoop`."""
        if request["own"] is None:
            return None
        return _fill(self._row(request, request["own"]), tensors["own"])

    def fresh_row(self, request: Mapping[str, Any]) -> Row:
        """See `WorkerLoop`."""
        return self._row(request, request["variant"])

    def weights_sent(self, fresh: Row) -> torch.Tensor | None:
        """See `WorkerLoop`."""
        return fresh.bytes

    def _row(self, request: Mapping[str, Any], variant: str) -> Row:
        return self.crew.store.fresh(self.crew.clients[request["client"]].architecture, variant)


# Ray itself -------------------------------------------------------------------------------------------------------


def _address() -> str | None:
    """Where the cluster is that was named; None: Ray is started here."""
    address = os.environ.get(_CLUSTER)
    return None if address in (None, "", "local") else address


class _Ray:
    """Ray: started here, or the cluster that was named. One that the program has started itself is used, and left.

    Args:
        workers: how many actors there will be.

    Raises:
        RunError: it did not start. RequestError: the cluster is not there, or has fewer cores.
    """

    def __init__(self, workers: int) -> None:
        self._folder: Path | None = None
        self._is_ours = False
        with _deferred_signals():
            if _address() is None:
                self._start(workers)
            else:
                self._join()
        import ray

        total = int(ray.cluster_resources().get("CPU", 0))
        if total < workers:
            self.end()
            raise RequestError(f"expected at most {total} workers, as Ray has so many cores here, got {workers}")
        self._class = ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(WorkerActor)

    def actor(self) -> Any:
        """A new actor, where most cores are free."""
        return self._class.remote()

    def end(self) -> None:
        """Leave it; end what was started here."""
        if self._is_ours:
            import ray

            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, workers: int) -> None:
        if _is_without_token():
            raise RequestError(
                "expected Ray to be imported first by the executor 'ray', which gives it a token, got a program that "
                "has imported it before; start it there with ray.init(), or import it later"
            )
        self._folder = _short_folder()
        with _environment(_own_environment()):
            self._init(
                lambda said: RunError(f"Ray did not start: {said}"),
                address="local",
                num_cpus=workers,
                num_gpus=0,
                include_dashboard=False,
                _temp_dir=str(self._folder),
            )

    def _join(self) -> None:
        address = _address() or ""
        _check_reachable(address)
        with _environment({"RAY_USAGE_STATS_ENABLED": "0"}):
            self._init(lambda said: RequestError(f"{_CLUSTER}: no cluster at {address}: {said}"), address=address)

    def _init(self, error_of: Callable[[str], Exception], **settings: Any) -> None:
        """Start Ray or join it, quietly."""
        import ray

        if ray.is_initialized():
            return
        try:
            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **settings)
            self._is_ours = True
        except BaseException as error:
            ray.shutdown()
            self.end()
            if not isinstance(error, Exception):
                raise
            raise error_of(" ".join(str(error).split())[:_LONGEST]) from error


def _check_reachable(address: str) -> None:
    """Whether anybody listens there, for whom Ray itself would wait for minutes.

    Raises:
        RequestError: nobody does.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():  # "auto": Ray knows where it is
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHABLE).close()
    except (OSError, OverflowError) as error:
        raise RequestError(f"{_CLUSTER}: no cluster at {address}: {error}") from None


def _short_folder() -> Path:
    """A new folder whose name is short enough for Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="polyfed-"))
    if len(str(folder)) <= _SHORT:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="polyfed-", dir="/tmp"))


@functools.cache
def _token() -> str:
    """What Ray's processes must know to be heard; one for the life of this process, as Ray keeps the first."""
    return secrets.token_hex(32)


def _is_without_token() -> bool:
    """Whether Ray has read its settings already, and there was no word of a token in them."""
    ray = sys.modules.get("ray")
    if ray is None or ray.is_initialized() or "RAY_AUTH_MODE" in os.environ:
        return False
    return _token.cache_info().currsize == 0


def _own_environment() -> dict[str, str]:
    """What Ray's processes here have in their environment besides ours."""
    own = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # of this machine alone: it listens on the loopback interface
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": _SOON,
        "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path),
    }
    if "RAY_AUTH_MODE" not in os.environ:
        own |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _token()}
    return own


@contextlib.contextmanager
def _environment(own: Mapping[str, str]) -> Iterator[None]:
    """Within the block these variables are set."""
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _deferred_signals() -> Iterator[None]:
    """Ctrl-C and the like wait until the block is over, so that no process is started that nobody knows of.

    The handlers are those from before then: Ray has one of its own for SIGTERM.
    """
    came = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, *TERMINATION_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    for number in came:
        signal.raise_signal(number)
