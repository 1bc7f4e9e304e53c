"""The executor `ray`: clients' work done by processes of Ray, here or on a cluster. Only this file knows Ray.

With RAY_ADDRESS set, the work goes to the machines of that cluster, else to processes that are started here and end
with the run. Each is an actor of Ray's with one core, which makes the federation anew and then does what any worker
does (`worker_requests`).

polyfed hands bytes to Ray (`engine.wire`), and unpickles nothing of them. Ray itself pickles what it needs to run them:
the actor's class, the function that makes the federation, with the recipe's text, and its own errors. So who can speak
to Ray's processes can run code in them. Those that are started here listen on the loopback interface alone, and to
those who know a token that is made for the run; a cluster is guarded by its operator. Ray is imported when it is first
needed, as it reads such settings from the environment then.
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
        self._rebuild = setup.rebuild
        self._session = contextlib.ExitStack()
        self._ray_is_on = False

    def hire(self) -> Worker:
        if not self._ray_is_on:
            self._session.enter_context(ray_session(self.workers))
            self._ray_is_on = True
        return _RayWorker(self._rebuild)

    def answered(self, busy: Collection[Worker]) -> list[Worker]:
        asked = {worker.pending: worker for worker in busy if isinstance(worker, _RayWorker)}
        return [asked[one] for one in _first_ready(list(asked))]

    def close(self) -> None:
        super().close()
        self._session.close()
        self._ray_is_on = False

    def replace(self, worker: Worker) -> None:
        """Have another worker where a core is free; a node that was lost may be offered for a while."""
        self.running.remove(worker)
        worker.terminate()
        other = _RayWorker(self._rebuild)
        with contextlib.suppress(RunError):  # it died as it began
            if _first_ready([other.placed], _PATIENCE):
                other.wait_ready()
                self.running.append(other)
                return
        other.terminate()
        if not self.running:
            raise RunError("the last of Ray's workers died, and there is no free core for another one")
        self.workers -= 1
        self.setup.say(f"no core of the cluster is free in place of it; the run goes on with {self.workers} workers")


def _first_ready(promises: Sequence[Any], seconds: float | None = None) -> list[Any]:
    """The first of what was promised that is there; [] when so many seconds have passed."""
    import ray

    ready: list[Any] = ray.wait(list(promises), num_returns=1, timeout=seconds)[0]
    return ready


class _RayWorker(Worker):
    """An actor with a core, where most are free.

    Attributes:
        placed: is ready when it has been given its core. pending: when it has answered, or is no more.
    """

    def __init__(self, rebuild: Rebuild) -> None:
        import ray

        kind = ray.remote(num_cpus=1, num_gpus=0, max_restarts=0, scheduling_strategy="SPREAD")(WorkerActor)
        self._actor = kind.remote()
        self.placed = self._actor.is_there.remote()
        self.pending = self._actor.begin.remote(__version__, torch.__version__, str(Path.cwd()), rebuild)

    def wait_ready(self) -> None:
        try:
            check_answer(decode(self.receive()))
        except WorkerDied as how:
            raise RunError(f"a worker of Ray's died as it began: {how}") from None

    def send(self, request: bytes) -> None:
        self.pending = self._actor.answer.remote(request)

    def receive(self) -> bytes:
        import ray

        try:
            data: bytes = ray.get(self.pending)
            return data
        except ray.exceptions.RayError as error:
            raise WorkerDied(type(error).__name__) from None

    def terminate(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # Ray itself may have ended
            ray.kill(self._actor)


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


@contextlib.contextmanager
def ray_session(workers: int) -> Iterator[None]:
    """Ray: started here, or the cluster that was named. One that the program has started itself is used, and left.

    Args:
        workers: how many actors there will be.

    Raises:
        RunError: it did not start. ConfigError: the cluster is not there, or has fewer cores.
    """
    address = address_of_cluster()
    with contextlib.ExitStack() as stack:
        if address is None:
            _check_token()
            beside = (
                None if len(tempfile.gettempdir()) <= _SHORT else "/tmp"
            )  # names of Ray's sockets may not be longer
            made = tempfile.TemporaryDirectory(prefix="polyfed-ray-", dir=beside, ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(made)) / "r"
            settings = {"address": "local", "num_cpus": workers, "num_gpus": 0, "include_dashboard": False}
            settings["_temp_dir"] = str(folder)  # Ray opens it to all, and nothing above it
        else:
            check_reachable(address)
            settings = {"address": address}
        with _environment(_own_environment(address)), _own_handlers():
            import ray

            if not ray.is_initialized():
                stack.callback(ray.shutdown)
                try:
                    ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **settings)
                except Exception as error:
                    problem = " ".join(str(error).split())[:_LONGEST]
                    if address is None:
                        raise RunError(f"Ray did not start: {problem}") from error
                    raise ConfigError(f"{CLUSTER}: no cluster at {address}: {problem}") from error
        total = int(ray.cluster_resources().get("CPU", 0))
        if total < workers:
            raise ConfigError(f"expected at most {total} workers, as Ray has so many cores here, got {workers}")
        yield


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


def _check_token() -> None:
    """Whether Ray's processes here will ask for a token: it has not read its settings yet, or they speak of one."""
    ray = sys.modules.get("ray")
    if ray is None or ray.is_initialized() or "RAY_AUTH_MODE" in os.environ or cluster_token.cache_info().currsize:
        return
    raise ConfigError(
        "expected Ray to be imported first by the executor 'ray', which gives it a token, got a program that has "
        "imported it before; start it there with ray.init(), or import it later"
    )


def _own_environment(address: str | None) -> dict[str, str]:
    """What Ray's processes have in their environment besides ours. address: of a cluster; None: they start here."""
    own = {"RAY_USAGE_STATS_ENABLED": "0"}
    if address is not None:
        return own
    own |= {
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
    before = {name: os.environ[name] for name in own if name in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own.keys() - before.keys():
            os.environ.pop(name, None)
        os.environ.update(before)


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
