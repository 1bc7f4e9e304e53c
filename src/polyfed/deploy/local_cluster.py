"""A whole deployment on one machine: a SuperLink, a node per client, TLS and node authentication, over 127.0.0.1.

It tries a recipe before several machines do, and tests deployment itself. The run folder is that of a run in one
process, with the same numbers.

The server app writes the run folder OUT; OUT-logs has each program's output until the run is done. Keys, certificates,
the nodes' state, Flower's own files and the app lie in a temporary folder. Nothing but 127.0.0.1 is called.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any, Self

import tomli_w

from polyfed.config.recipe import Recipe
from polyfed.deploy import OFFLINE, app_template, require_package
from polyfed.deploy.tls import AUTHORITY, make_node_key, make_server_certificate
from polyfed.engine.run import History, Run
from polyfed.engine.run_folder import RunFolder
from polyfed.errors import ConfigError, PolyfedError, RunError
from polyfed.escaping import visible
from polyfed.experiments.build import build_federation
from polyfed.places import make_private, private_files
from polyfed.signals import end_with_parent, raise_on_termination

__all__ = ["LocalCluster", "ProcessGroup", "free_ports", "local"]

_START = 300.0  # seconds that a program has to start; a busy machine takes its time
_PAUSE = 0.2  # seconds between two looks
_CONNECTION = "local"  # what Flower's configuration calls the server
_HOST = "127.0.0.1"
_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception)): (.+)", re.MULTILINE)  # the last line of a traceback
_OURS = {"ConfigError": ConfigError, "RunError": RunError}
_TURNED_AWAY = re.compile(r"^node \d+ is no client: (.+)", re.MULTILINE)  # said by the server app
_TRACEBACK = re.compile(r"^(?:.*raised an exception$|Traceback )", re.MULTILINE)  # what follows is in the log alone
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_MARK = "POLYFED_STARTED_BY"
GRACE_SECONDS = 10.0  # that a program has to end when it is asked to
_Words = list[str | Path]  # of a command line


@private_files()
def local(
    recipe: str | Path,
    *,
    nodes: int | None = None,
    method: str | None = None,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    preset: str | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Run:
    """Run a recipe with every client in a node of its own.

    Args:
        recipe: the TOML file.
        nodes: how many clients, in place of ``data.num_clients``.
        method, overrides, seed, preset, overwrite: as for `polyfed.run`. out: default: `Recipe.folder`.
        progress: show the server app's output, on standard error.

    Returns:
        What the run folder holds. The trained networks are in its models/
        (`polyfed.experiments.prediction.load`).

    Raises:
        ConfigError: the request is wrong, or flwr is not installed; nothing has been written.
        RunError: the run failed; names the programs' logs.

    All programs have ended in any case.
    """
    require_package("flwr", "deploy local")
    changes = [*overrides, *([] if nodes is None else [f"data.num_clients={nodes}"])]
    chosen = Recipe.load(recipe, changes, method=method, seed=seed, preset=preset, out=out)
    folder = Path(chosen.folder).absolute()
    if not overwrite and any((folder / name).exists() for name in ("recipe.toml", "rounds.jsonl")):
        raise ConfigError(f"{folder} already holds a run; replace it with --overwrite (overwrite=True)")
    RunFolder(folder).validate(chosen.to_dict(), False, overwrite, chosen.chosen_method.planned)
    config = {"out": str(folder), "overwrite": overwrite}
    _flower_config(config)  # whether Flower's command line has a form for it
    federation = build_federation(chosen, out=folder)  # whether data, models and method fit
    logs = folder.with_name(f"{folder.name}-logs")
    make_private(logs)
    with (
        raise_on_termination(),
        tempfile.TemporaryDirectory(prefix="polyfed-deploy-", ignore_cleanup_errors=True) as folder_of_keys,
        LocalCluster(Path(folder_of_keys), logs, len(federation.clients)) as cluster,
    ):
        temporary = Path(folder_of_keys)
        (temporary / "recipe.toml").write_text(chosen.dumps(), encoding="utf-8")
        app_template.create_app(temporary / "app", temporary / "recipe.toml")
        cluster.start_all()
        cluster.run(config, _Watch(cluster, progress).look)
    cluster.remove_logs()
    done = RunFolder(folder)
    return Run(done.read_result() or {}, History(done.records(sealed=False)), {}, folder, {})


class _Watch:
    """Shows the server app's output on standard error, if that is wanted, and looks after the nodes."""

    def __init__(self, cluster: LocalCluster, progress: bool) -> None:
        self._cluster = cluster
        self._progress = progress
        self._shown = 0

    def look(self) -> None:
        """Show whole lines that are new, up to a traceback.

        Raises:
            RunError: a node has ended or was turned away, for which the server app would wait without end.
        """
        text = self._cluster.output("run")
        told = _TRACEBACK.split(text, maxsplit=1)[0]
        new = told[self._shown : told.rfind("\n") + 1]
        self._shown += len(new)
        for line in new.splitlines() if self._progress else ():
            print(visible(line), file=sys.stderr, flush=True)
        if away := _TURNED_AWAY.search(text):
            raise RunError(f"a node was turned away: {away[1]}")
        for number in range(self._cluster.nodes):
            self._cluster.check_alive(f"node-{number}")


# programs -----------------------------------------------------------------------------------------------------------


class ProcessGroup:
    """Programs that end with the block that holds them, in the order of their start: a server before its nodes.

    A started program may start others, in sessions of their own. All of them inherit a mark in their environment, by
    which those that outlive their parent are found and ended at the end (Linux). environment: laid over ours.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._environment = {**os.environ, **environment, _MARK: mark}
        self._logs = logs
        self._started: dict[str, Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def log(self, name: str) -> Path:
        """The file of a program's output."""
        return self._logs / f"{name}.log"

    def output(self, name: str) -> str:
        """What a program has written so far, without colors."""
        return _COLORS.sub("", self.log(name).read_text(encoding="utf-8", errors="replace"))

    def remove_logs(self) -> None:
        """Remove the programs' logs, and their folder where it is empty then."""
        for name in self._started:
            self.log(name).unlink()
        with contextlib.suppress(OSError):
            self._logs.rmdir()

    def start(self, name: str, command: Sequence[str | Path], folder: Path | None = None) -> Popen[bytes]:
        """Start a program in a session of its own, as a Ctrl-C at the terminal is ours to handle; no shell is used.

        name: of its log; one of this name that has ended makes room. RunError: it cannot be started.
        """
        with self.log(name).open("ab" if name in self._started else "wb") as log:
            try:
                process = Popen(
                    [str(word) for word in command],
                    cwd=folder,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            except OSError as error:
                raise RunError(f"{name} cannot be started ({command[0]}): {error.strerror}") from None
        self._started[name] = process
        return process

    def is_running(self, name: str) -> bool:
        """Whether a program has not ended yet."""
        return self._started[name].poll() is None

    def check_alive(self, name: str) -> None:
        """Raise a RunError with a program's last words if it has ended."""
        if (status := self._started[name].poll()) is not None:
            raise RunError(self._end_of(name, status))

    def wait_for_success(self, name: str, limit: float) -> None:
        """Wait for a program that has to end well within `limit` seconds; RunError: it does not."""
        try:
            status = self._started[name].wait(limit)
        except subprocess.TimeoutExpired:
            raise RunError(f"{name} has not ended within {limit:g} s{self.log_tail(name)}") from None
        if status:
            raise RunError(self._end_of(name, status))

    def wait_for_answer(self, name: str, port: int, limit: float) -> None:
        """Wait until a program accepts connections on a port of this machine; RunError: not within `limit` seconds."""
        deadline = time.monotonic() + limit
        while True:
            self.check_alive(name)
            with contextlib.suppress(OSError), socket.create_connection((_HOST, port), timeout=1):
                return
            if time.monotonic() > deadline:
                raise RunError(f"{name} does not answer within {limit:g} s{self.log_tail(name)}")
            time.sleep(_PAUSE)

    def _end_of(self, name: str, status: int) -> str:
        """How a program ended; the last words of one that was killed say nothing of it."""
        if status < 0:
            return f"{name} was ended by {signal.Signals(-status).name} (see {self.log(name)})"
        return f"{name} has ended, with status {status}{self.log_tail(name)}"

    def log_tail(self, name: str) -> str:
        """A program's last words, for the end of a message, and where the rest is."""
        lines = [line.strip() for line in self.output(name).split("\n") if line.strip()]
        return f": {lines[-1]} (all of it in {self.log(name)})" if lines else f" (see {self.log(name)})"

    def stop(self) -> None:
        """End all of them, and what they have started: the first one, then the others together.

        Were nodes to end before their server, it would record a round in which all have dropped out.
        """
        processes = list(self._started.values())
        for together in (processes[:1], processes[1:]):
            for process in together:
                process.terminate()
            deadline = time.monotonic() + GRACE_SECONDS
            for process in together:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
                    process.wait()
        for number in self.survivors():
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)

    def survivors(self) -> list[int]:
        """The numbers of processes that bear our mark; none where the system does not show environments."""
        mark = f"{_MARK}={self._environment[_MARK]}".encode()
        left = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in place.read_bytes().split(b"\0"):
                    left.append(int(place.parent.name))
        return left


class LocalCluster(ProcessGroup):
    """A server and so many nodes, each a program of its own on this machine, which end with the block.

    temporary: holds the app (in "app"); for keys, the nodes' state and Flower's own files. logs: folder of log files.
    port, address: where the server listens.
    """

    def __init__(self, temporary: Path, logs: Path, nodes: int) -> None:
        self._folder = temporary
        self._keys = temporary / "keys"
        self._home = temporary / "home"
        self.nodes = nodes
        (self.port,) = free_ports(1)
        self.address = f"{_HOST}:{self.port}"
        super().__init__(logs, {**OFFLINE, **_paths(), "FLWR_HOME": str(self._home)})

    def __enter__(self) -> Self:
        """Write certificates, keys, and where the `flwr` command finds the server."""
        make_server_certificate(self._keys, ["localhost", _HOST])
        for number in range(self.nodes):
            make_node_key(self._keys / f"node-{number}")
        connection = {"address": self.address, "root-certificates": str(self._keys / AUTHORITY)}
        self._home.mkdir(exist_ok=True)
        config = {"superlink": {"default": _CONNECTION, _CONNECTION: connection}}
        (self._home / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
        return self

    def start_all(self) -> None:
        """Start the server and all nodes; RunError: a program does not start."""
        self.start_server()
        self.register(range(self.nodes))
        for number in range(self.nodes):
            self.start_node(number)

    def start_server(self) -> Popen[bytes]:
        """Start the server, and wait until it answers."""
        options: _Words = ["--host", _HOST, "--port", str(self.port), "--database", self._home / "superlink.db"]
        server = self.start("superlink", [*polyfed_command(), "deploy", "server", self._keys, *options])
        self.wait_for_answer("superlink", self.port, _START)
        return server

    def register(self, numbers: Collection[int]) -> None:
        """Register nodes' public keys with the server."""
        for number in numbers:
            key = self._keys / f"node-{number}.pub"
            self.start(f"register-{number}", [find_program("flwr"), "supernode", "register", key, _CONNECTION])
        for number in numbers:
            self.wait_for_success(f"register-{number}", _START)

    def start_node(self, number: int) -> Popen[bytes]:
        """Start the node of a client, with the recipe's network and data."""
        state = str(self._folder / "nodes" / str(number))
        config = _flower_config({"client-id": number, "state-dir": state, "share-model": True})
        options: _Words = ["--recipe", self._folder / "app" / "recipe.toml", "--server", self.address]
        options += ["--authority", self._keys / AUTHORITY, "--key", self._keys / f"node-{number}"]
        return self.start(f"node-{number}", [*polyfed_command(), "deploy", "node", *options, "--node-config", config])

    def run(self, config: Mapping[str, Any], look: Callable[[], None] = lambda: None, app: Path | None = None) -> None:
        """Run the app to its end, with these settings over its own. look: called every moment.

        Raises:
            ConfigError, RunError: the server app's own; or the server ended.
        """
        self.submit(config, app)
        while self.is_running("run"):
            self.check_alive("superlink")
            look()
            time.sleep(_PAUSE)
        look()
        try:
            self.wait_for_success("run", _START)
        except RunError as problem:
            raise self._failure(str(problem)) from None
        if RunFolder(str(config["out"])).read_result() is None:
            raise self._failure(f"the run has failed{self.log_tail('run')}")

    def submit(self, config: Mapping[str, Any], app: Path | None = None) -> None:
        """Start the app, and a program "run" that prints the server app's output and ends with it."""
        options = ["--stream", "-c", _flower_config(config)]
        self.start("run", [find_program("flwr"), "run", app or self._folder / "app", _CONNECTION, *options])

    def _failure(self, otherwise: str) -> PolyfedError:
        """The error with which the server app ended, from its log: polyfed's own, else the last of any kind."""
        found = _ERROR.findall(self.output("run"))
        ours = [_OURS[kind](text.strip()) for kind, text in found if kind in _OURS]
        if ours or not found:
            return ours[-1] if ours else RunError(otherwise)
        kind, text = found[-1]
        return RunError(f"{kind}: {text.strip()} (all of it in {self.log('run')})")


# commands -----------------------------------------------------------------------------------------------------------


def _flower_config(config: Mapping[str, Any]) -> str:
    """Settings as Flower reads them on a command line."""
    for value in config.values():
        if isinstance(value, str) and any(mark in value for mark in '"\\\n'):
            raise ConfigError(f"expected a path without quotation marks and backslashes, got '{value}'")
    return " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in config.items())


def polyfed_command() -> _Words:
    """The command of this polyfed."""
    return [sys.executable, "-m", "polyfed"]


def find_program(name: str) -> Path:
    """One of Flower's programs: beside this Python, else where the system finds it.

    Raises:
        ConfigError: it is not there.
    """
    found = shutil.which(name, path=_paths()["PATH"])
    if found is None:
        raise ConfigError(f"expected the program {name} beside {sys.executable}, as flwr brings it, got none")
    return Path(found)


def _paths() -> dict[str, str]:
    """Where programs and modules are found: Flower's programs call each other by name, and models may be one's own."""
    programs = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    modules = [os.path.abspath(place) for place in sys.path]  # "" is the present folder
    return {"PATH": os.pathsep.join(programs), "PYTHONPATH": os.pathsep.join(modules)}


def free_ports(count: int) -> list[int]:
    """Ports of this machine on which no program listens at the moment."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((_HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]
