"""Ray itself, for the executor `ray`: started on this machine, or the cluster of RAY_ADDRESS. Only this file knows it.

Ray is imported when it is first needed, as it reads its settings from the environment then: no reports of its use, no
dashboard, the loopback interface alone, and a token.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from polyfed.engine.executors.job_requests import WorkerDied
from polyfed.errors import ConfigError, RunError
from polyfed.places import temporary_folder
from polyfed.signals import TERMINATION_SIGNALS

CLUSTER = "RAY_ADDRESS"  # Ray's own variable
_LONGEST = 300  # characters of Ray's errors that are told
_REACHABLE = 10.0  # seconds that a cluster has to be found
_SOON = "5"  # seconds after which Ray's processes here end once their head has
_SHORT = 18  # characters that the place of a folder may have, so that Ray can give its sockets names


def address_of_cluster() -> str | None:
    """Where the cluster is that was named; None: Ray is started here."""
    address = os.environ.get(CLUSTER)
    return None if address in (None, "", "local") else address


class RaySession:
    """Ray: started here, or the cluster that was named. One that the program has started itself is used, and left.

    Args:
        workers: how many actors there will be. on_gpus: each has a GPU.

    Raises:
        RunError: it did not start. ConfigError: the cluster is not there, or has fewer cores or GPUs.
    """

    def __init__(self, workers: int, on_gpus: bool = False) -> None:
        self._on_gpus = on_gpus
        self._folders = contextlib.ExitStack()
        self._is_ours = False
        with _deferred_signals():
            if address_of_cluster() is None:
                self._start(workers)
            else:
                self._join()
        import ray

        total = int(ray.cluster_resources().get("GPU" if on_gpus else "CPU", 0))
        if total < workers:
            self.end()
            what = "GPUs" if on_gpus else "cores"
            raise ConfigError(f"expected at most {total} workers, as Ray has so many {what} here, got {workers}")

    def actor(self, kind: type) -> Any:
        """A new actor of a class, with a core, and a GPU where each has one, where most are free."""
        import ray

        gpus = int(self._on_gpus)
        return ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD")(kind).remote()

    def ready(self, promises: Sequence[Any], seconds: float | None = None) -> list[Any]:
        """The first of what was promised that is there; [] when so many seconds have passed."""
        import ray

        found: list[Any] = ray.wait(list(promises), num_returns=1, timeout=seconds)[0]
        return found

    def received(self, promise: Any) -> bytes:
        """What an actor has promised, when it is there.

        Raises:
            Died: the actor is no more.
        """
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
        open_to_all = self._folders.enter_context(_short_folder()) / "r"  # Ray opens it, and nothing above it
        with _environment(_own_environment()):
            self._init(
                lambda said: RunError(f"Ray did not start: {said}"),
                address="local",
                num_cpus=workers,
                num_gpus=torch.cuda.device_count() if self._on_gpus else 0,
                include_dashboard=False,
                _temp_dir=str(open_to_all),
            )

    def _join(self) -> None:
        address = address_of_cluster() or ""
        check_reachable(address)
        with _environment({"RAY_USAGE_STATS_ENABLED": "0"}):
            self._init(lambda said: ConfigError(f"{CLUSTER}: no cluster at {address}: {said}"), address=address)

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


def check_reachable(address: str) -> None:
    """Whether anybody listens there, for whom Ray itself would wait for minutes.

    Raises:
        ConfigError: nobody does.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():  # "auto": Ray knows where it is
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHABLE).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{CLUSTER}: no cluster at {address}: {error}") from None


def _short_folder() -> contextlib.AbstractContextManager[Path]:
    """A temporary folder whose name is short enough for Ray's sockets."""
    short = len(tempfile.gettempdir()) <= _SHORT
    return temporary_folder("polyfed-ray", None if short else "/tmp")


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
