"""The executor `ray`: clients' work done by processes of Ray, here or on a cluster. Only this file knows Ray.

With RAY_ADDRESS set, the work goes to the machines of that cluster, else to processes that are started here and end
with the run. Every process is an actor of Ray's with one core. It makes the federation anew, from the recipe, and does
what any worker does (`worker_requests`): so the result is that of `serial` bit for bit, and a run goes on with any
executor.

What polyfed hands to Ray are bytes (`engine.wire`), and nothing of ours is unpickled from them. Ray itself pickles what
it needs to run them: the actor's class, the name of the function that makes the federation, with the recipe's text, and
its own errors. So who can speak to Ray's processes can run code in them. Those that are started here listen on the
loopback interface alone, and to those who know a token that is made for the run; a cluster is guarded by its operator.

Ray is imported when it is first needed, as it reads its settings from the environment then: no reports of its use, no
dashboard, the loopback interface alone, and a token.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polyfed.engine.executors.executor import ExecutorSetup
from polyfed.engine.executors.process_pool import problem_of_processes, tune_process
from polyfed.engine.executors.worker_pool import Worker, WorkerDied, WorkerPool
from polyfed.engine.executors.worker_requests import RequestHandler, check_answer, describe_error
from polyfed.engine.wire import decode, encode
from polyfed.errors import ConfigError, MissingPackage, RunError
from polyfed.places import temporary_folder
from polyfed.signals import TERMINATION_SIGNALS
from polyfed.version import __version__

CLUSTER = "RAY_ADDRESS"  # Ray's own variable
_PATIENCE = 60.0  # seconds that a worker in place of another one may wait for a free core
_LONGEST = 300  # characters of Ray's errors that are shown
_REACHABLE = 10.0  # seconds that a cluster has to be found
_SOON = "5"  # seconds after which Ray's processes here end once their head has
_SHORT = 18  # characters that the place of a folder may have, so that Ray can give its sockets names

Rebuild = Callable[[], Any]  # -> a federation, which this file need not know


class RayExecutor(WorkerPool):
    """Actors of Ray that stay for a run: made when they are first needed, ended by `close`.

    An actor that dies is replaced; where the cluster has no core left for another one, the run goes on with those that
    are there.

    Raises:
        ConfigError: Ray is not installed, this is not Linux, the device is another one than the CPU, nobody has said
            how to make the federation anew, or how many workers of a cluster to take.
    """

    def __init__(self, setup: ExecutorSetup) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingPackage(
                "the executor 'ray' needs the package 'ray'; install it with: pip install 'polyfed[ray]'"
            )
        if problem := problem_of_processes(setup.device):
            raise ConfigError(problem)
        if setup.rebuild is None:
            raise ConfigError(
                "expected a recipe for the executor 'ray', whose processes make the federation anew, got a federation "
                "made in Python; give it polyfed.Execution(executor='ray', rebuild=...)"
            )
        address = address_of_cluster()
        if setup.workers is None and address is not None:
            raise ConfigError(
                f"expected workers with {CLUSTER}={address}: how many of the cluster's cores to take (--workers)"
            )
        if address is not None and address.startswith("ray://"):
            raise ConfigError(f"expected {CLUSTER} as host:port of a cluster that this machine is of, got a client's")
        super().__init__(setup)
        setup.store.keep_in_main_memory()  # as weights travel
        self._rebuild = setup.rebuild
        self._ray: RaySession | None = None

    def hire(self) -> Worker:
        return self._hire()

    def answered(self, busy: Collection[Worker]) -> list[Worker]:
        asked = {worker.pending: worker for worker in busy if isinstance(worker, _RayWorker)}
        return [asked[one] for one in self._session().ready(list(asked))]

    def close(self) -> None:
        super().close()
        if self._ray is not None:
            self._ray.end()
        self._ray = None

    def replace(self, worker: Worker) -> None:
        """Have another worker where a core is free; a node that was lost may be offered for a while."""
        self.running.remove(worker)
        worker.terminate()
        other = self._hire()
        try:
            if other.is_placed(_PATIENCE):
                other.wait_ready()
                self.running.append(other)
                return
        except RunError:  # it died as it began
            pass
        other.terminate()
        if not self.running:
            raise RunError("the last of Ray's workers died, and there is no free core for another one")
        self.workers -= 1
        self.setup.say(f"no core of the cluster is free in place of it; the run goes on with {self.workers} workers")

    def _hire(self) -> _RayWorker:
        return _RayWorker(self._session(), self._rebuild)

    def _session(self) -> RaySession:
        """Ray, started when it is first needed."""
        if self._ray is None:
            self._ray = RaySession(self.workers)
        return self._ray


class _RayWorker(Worker):
    """See `Worker`; it answers when `pending` is ready."""

    def __init__(self, ray: RaySession, rebuild: Rebuild) -> None:
        self._ray = ray
        self._actor = actor = ray.actor(WorkerActor)
        self._alive = True
        self._placed = actor.is_there.remote()
        self.pending = actor.begin.remote(__version__, torch.__version__, str(Path.cwd()), rebuild)

    def is_placed(self, seconds: float) -> bool:
        """Whether it has been given a core, for which it waits no longer than this."""
        return bool(self._ray.ready([self._placed], seconds))

    def wait_ready(self) -> None:
        try:
            answer = decode(self.receive())
        except WorkerDied as how:
            raise RunError(f"a worker of Ray's died as it began: {how}") from None
        check_answer(answer)

    def send(self, request: bytes) -> None:
        self.pending = self._actor.answer.remote(request)

    def receive(self) -> bytes:
        try:
            return self._ray.received(self.pending)
        except WorkerDied:
            self._alive = False
            raise

    def is_alive(self) -> bool:
        return self._alive

    def terminate(self) -> None:
        self._alive = False
        self._ray.kill(self._actor)


class WorkerActor:
    """A worker in a process of Ray's. But for `begin`, it takes bytes; it answers bytes always."""

    def __init__(self) -> None:
        self._handler: RequestHandler | None = None

    def is_there(self) -> bool:
        """Once it has a core."""
        return True

    def begin(self, version: str, torch_version: str, folder: str, rebuild: Rebuild) -> bytes:
        """Make the federation; what went wrong, if anything did.

        Args:
            version, torch_version: of polyfed and PyTorch where the run is. folder: where the run is: relative paths
                mean the same here. rebuild: see `ExecutorSetup`.
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
            self._handler = RequestHandler(rebuild().executor.setup)
            return encode({})
        except Exception as error:
            return encode(describe_error(error))

    def answer(self, request: bytes) -> bytes:
        """Do what is asked."""
        assert self._handler is not None
        return self._handler.reply(request)


# Ray itself ----------------------------------------------------------------------------------------------------------


def address_of_cluster() -> str | None:
    """Where the cluster is that was named; None: Ray is started here."""
    address = os.environ.get(CLUSTER)
    return None if address in (None, "", "local") else address


class RaySession:
    """Ray: started here, or the cluster that was named. One that the program has started itself is used, and left.

    Args:
        workers: how many actors there will be.

    Raises:
        RunError: it did not start. ConfigError: the cluster is not there, or has fewer cores.
    """

    def __init__(self, workers: int) -> None:
        self._folders = contextlib.ExitStack()
        self._is_ours = False
        with _own_handlers():
            if address_of_cluster() is None:
                self._start(workers)
            else:
                self._join()
        import ray

        total = int(ray.cluster_resources().get("CPU", 0))
        if total < workers:
            self.end()
            raise ConfigError(f"expected at most {total} workers, as Ray has so many cores here, got {workers}")

    def actor(self, kind: type) -> Any:
        """A new actor of a class, with a core, where most are free."""
        import ray

        return ray.remote(num_cpus=1, num_gpus=0, max_restarts=0, scheduling_strategy="SPREAD")(kind).remote()

    def ready(self, promises: Sequence[Any], seconds: float | None = None) -> list[Any]:
        """The first of what was promised that is there; [] when so many seconds have passed."""
        import ray

        found: list[Any] = ray.wait(list(promises), num_returns=1, timeout=seconds)[0]
        return found

    def received(self, promise: Any) -> bytes:
        """What an actor has promised, when it is there."""
        import ray

        try:
            data: bytes = ray.get(promise)
            return data
        except ray.exceptions.RayError as error:
            raise WorkerDied(type(error).__name__) from None

    def kill(self, actor: Any) -> None:
        """End an actor."""
        import ray

        with contextlib.suppress(Exception):  # Ray itself may have ended
            ray.kill(actor)

    def end(self) -> None:
        """Leave it; end what was started here."""
        if self._is_ours:
            import ray

            ray.shutdown()
        self._folders.close()

    def _start(self, workers: int) -> None:
        if _is_without_token():
            raise ConfigError(
                "expected Ray to be imported first by the executor 'ray', which gives it a token, got a program that "
                "has imported it before; start it there with ray.init(), or import it later"
            )
        beside = None if len(tempfile.gettempdir()) <= _SHORT else "/tmp"  # names of Ray's sockets may not be longer
        folder = self._folders.enter_context(temporary_folder("polyfed-ray", beside))
        open_to_all = folder / "r"  # Ray opens it, and nothing above it
        with _environment(_own_environment()):
            self._init(
                lambda problem: RunError(f"Ray did not start: {problem}"),
                address="local",
                num_cpus=workers,
                num_gpus=0,
                include_dashboard=False,
                _temp_dir=str(open_to_all),
            )

    def _join(self) -> None:
        address = address_of_cluster() or ""
        check_reachable(address)
        with _environment({"RAY_USAGE_STATS_ENABLED": "0"}):
            self._init(lambda problem: ConfigError(f"{CLUSTER}: no cluster at {address}: {problem}"), address=address)

    def _init(self, error_of: Callable[[str], Exception], **settings: Any) -> None:
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


def check_reachable(address: str) -> None:
    """Whether anybody listens there, for whom Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():  # "auto": Ray knows where it is
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHABLE).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{CLUSTER}: no cluster at {address}: {error}") from None


@functools.cache
def cluster_token() -> str:
    """What Ray's processes must know to be heard; one for the life of this process, as Ray keeps the first."""
    return secrets.token_hex(32)


def _is_without_token() -> bool:
    """Whether Ray has read its settings already, and there was no word of a token in them."""
    ray = sys.modules.get("ray")
    if ray is None or ray.is_initialized() or "RAY_AUTH_MODE" in os.environ:
        return False
    return cluster_token.cache_info().currsize == 0


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
        own |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": cluster_token()}
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
def _own_handlers() -> Iterator[None]:
    """The handlers of signals are those from before after the block: Ray has one of its own for SIGTERM."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in TERMINATION_SIGNALS} if in_main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
