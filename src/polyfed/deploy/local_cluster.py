"""A whole deployment on one machine: a SuperLink, a SuperNode per client, TLS and node authentication, over 127.0.0.1.

What several machines would do, without them: to try a recipe before it is deployed, and to test deployment itself. The
run folder is that of a run in one process, with the same numbers.

    OUT                 the run folder, written by the server app
    OUT-nodes/node-0    what node 0 keeps on its disk; removed with the logs beside it when the run is done
    OUT-nodes/logs      what each program said

Keys, certificates, Flower's own files and the app lie in a temporary folder. Nothing but 127.0.0.1 is called.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import tomli_w

from polyfed.config.recipe import Recipe
from polyfed.deploy import app_template
from polyfed.deploy.process_group import ProcessGroup, free_ports, raise_on_termination
from polyfed.deploy.requirements import OFFLINE, require_package
from polyfed.deploy.run_progress import RunProgress
from polyfed.deploy.tls import AUTHORITY, make_node_key, make_server_certificate
from polyfed.engine.run import History
from polyfed.engine.run_folder import RunFolder
from polyfed.errors import ConfigError, PolyfedError, RunError, RunInterrupted
from polyfed.experiments.build import build_federation
from polyfed.loggers.console import Console
from polyfed.places import make_private, private_files, temporary_folder

__all__ = ["LocalCluster", "RunSummary", "local"]

_QUICK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}  # seconds between two looks for work; Flower's own: 1
_START = 300.0  # seconds that a program has to come up, or to answer; a busy machine takes its time
_PAUSE = 0.2  # seconds between two looks at how the run gets on
_CONNECTION = "local"  # what Flower's configuration calls the server
_HOST = "127.0.0.1"
_ERROR = re.compile(r"(?:polyfed\.errors\.)?\b(ConfigError|RunError): (.+)")  # the last line of a traceback
_KIND = "polyfed-deploy"  # what temporary folders are called
_KEPT = re.compile(r"logs|node-\d+")
_Words = list[str | Path]  # of a command line


@dataclass(frozen=True)
class RunSummary:
    """A finished deployment: result.json, one record per round, the run folder.

    The trained networks are in the folder's models/: `polyfed.experiments.prediction.load_model(run.path, client)`.
    """

    result: Mapping[str, Any]
    history: History
    path: Path


@private_files()
def local(  # noqa: PLR0913 - what a user may choose, each by its name
    recipe: str | Path,
    *,
    nodes: int | None = None,
    method: str | None = None,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    preset: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    deadline: float = 600.0,
    timeout: float | None = None,
    progress: bool = False,
) -> RunSummary:
    """Run a recipe with every client in a node of its own.

    Args:
        recipe: the TOML file.
        nodes: how many clients, in place of ``data.num_clients``.
        method, overrides, seed, preset, resume, overwrite: as for `polyfed.run`. out: default: `Recipe.folder`.
        deadline: seconds that a node has to answer; after them it counts as dropped out for the round.
        timeout: seconds after which the whole run is given up; None: never.
        progress: show how it gets on, on standard error.

    Returns:
        What the run folder holds; a run that is finished already is only read.

    Raises:
        ConfigError: the request is wrong, or flwr is not installed; nothing has been written.
        RunError: the run failed, or did not end in time; says where the programs' logs are.
        RunInterrupted: Ctrl-C, SIGTERM or SIGHUP; whole rounds are kept.

    Whatever happens, all programs have been ended.
    """
    require_package("flwr", "deploy local")
    for what, seconds in (("deadline", deadline), ("timeout", timeout)):
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ConfigError(f"expected --{what} as seconds, more than 0, got {seconds:g}")
    changes = [*overrides, *([] if nodes is None else [f"data.num_clients={nodes}"])]
    chosen = Recipe.load(recipe, changes, method=method, seed=seed, preset=preset, out=out)
    modules = chosen.to_dict()["run"].get("modules")
    if modules is not None:  # they lie beside the recipe, and the nodes read a copy of it in another folder
        changes.append(f"run.modules={json.dumps(modules)}")
    asked: dict[str, Any] = {"method": method, "overrides": changes, "seed": seed, "preset": preset}
    folder = Path(chosen.folder).absolute()
    RunFolder(folder).validate(chosen.to_dict(), resume, overwrite, chosen.planned)
    app_template.app_config(**asked)
    config = {"out": str(folder), "resume": resume, "overwrite": overwrite, "deadline": float(deadline)}
    _told(config)  # whether Flower's command line can be told all this
    federation = build_federation(chosen, out=folder)  # whether data, models and method fit
    if resume and RunFolder(folder).finished(chosen.to_dict()) is not None:
        return _read(folder)
    until = None if timeout is None else time.monotonic() + timeout
    with raise_on_termination(), _kept(folder, resume) as kept, temporary_folder(_KIND) as temporary:
        app_template.create_app(temporary / "app", recipe, **asked)
        follower = RunProgress(folder, federation.facts, Console(quiet=not progress), resume)
        with (
            follower,
            LocalCluster(temporary, kept, len(federation.clients), app_template.command_line(**asked)) as loopback,
        ):
            try:
                loopback.start()
                loopback.run(config, follower.poll, until)
            except KeyboardInterrupt:
                raise RunInterrupted(f"interrupted after {follower.done} whole rounds, which are kept") from None
    return _read(folder)


def _read(folder: Path) -> RunSummary:
    return RunSummary(RunFolder(folder).read_result() or {}, History(RunFolder(folder).records(sealed=False)), folder)


class LocalCluster:
    """A server and its nodes, each a program of its own on this machine; a block that ends them all.

    Args:
        temporary: holds the app (in "app"), and is given keys and Flower's own files.
        kept: is given what nodes keep, and the logs.
        nodes: how many.
        words: see below.

    Attributes:
        words: what nodes are told besides the app's recipe, as on the command line.
    """

    def __init__(self, temporary: Path, kept: Path, nodes: int, words: Sequence[str] = ()) -> None:
        self._app, self._keys, self._home = (temporary / name for name in ("app", "keys", "home"))
        self._kept = kept
        self.nodes = nodes
        self.words = words
        self.port, *self._node_ports = free_ports(1 + nodes)
        self.processes = ProcessGroup(kept / "logs", {**OFFLINE, **_QUICK, **_paths(), "FLWR_HOME": str(self._home)})

    def __enter__(self) -> LocalCluster:
        self.processes.__enter__()
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        # nodes that go one by one would be a round in which all have dropped out, where the server still looks on
        self.processes.stop(first="superlink" if failed else None)

    @property
    def address(self) -> str:
        """Where the server listens."""
        return f"{_HOST}:{self.port}"

    def start(self) -> None:
        """Certificates and keys, the server, its nodes made known to it, the nodes.

        Raises:
            RunError: a program does not start.
        """
        self.prepare()
        self.start_server()
        self.register(range(self.nodes))
        for number in range(self.nodes):
            self.start_node(number)

    def prepare(self) -> None:
        """Write certificates, keys, and where the `flwr` command finds the server."""
        make_server_certificate(self._keys, ["localhost", _HOST])
        for number in range(self.nodes):
            make_node_key(self._keys / f"node-{number}")
        connection = {"address": self.address, "root-certificates": str(self._keys / AUTHORITY)}
        self._home.mkdir(exist_ok=True)
        config = {"superlink": {"default": _CONNECTION, _CONNECTION: connection}}
        (self._home / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")

    def start_server(self) -> Popen[bytes]:
        """Start the server, and wait until it answers.

        Raises:
            RunError: it does not.
        """
        words: _Words = ["deploy", "server", self._keys, "--host", _HOST, "--port", str(self.port)]
        words += ["--database", self._home / "superlink.db"]
        server = self.processes.start("superlink", [*polyfed_command(), *words])
        self.processes.wait_for_answer("superlink", self.port, _START)
        return server

    def register(self, numbers: Iterable[int]) -> None:
        """Make nodes known to the server by their public keys; as many at once as there are cores.

        Raises:
            RunError: the server does not take one.
        """
        waiting = list(numbers)
        many = os.cpu_count() or 1
        while waiting:
            some = waiting[:many]
            waiting = waiting[many:]
            for number in some:
                words: _Words = ["supernode", "register", self._keys / f"node-{number}.pub", _CONNECTION]
                self.processes.start(f"register-{number}", [find_program("flwr"), *words])
            for number in some:
                self.processes.wait_for_success(f"register-{number}", _START)

    def start_node(self, number: int) -> Popen[bytes]:
        """Start the node of a client."""
        return self.processes.start(f"node-{number}", self.node_command(number))

    def node_command(self, number: int) -> _Words:
        """How a client's node is started, with the recipe's network and the data that it deals to the client."""
        config = _told({"client-id": number, "state-dir": str(self._kept / f"node-{number}"), "share-model": True})
        words: _Words = ["deploy", "node", "--recipe", self._app / "recipe.toml", *self.words]
        words += ["--server", self.address, "--authority", self._keys / AUTHORITY, "--node-config", config]
        words += ["--key", self._keys / f"node-{number}", "--port", str(self._node_ports[number])]
        return [*polyfed_command(), *words]

    def run(
        self,
        config: Mapping[str, Any],
        look: Callable[[], None] = lambda: None,
        until: float | None = None,
        app: Path | None = None,
    ) -> None:
        """Run the app, to its end.

        Args:
            config: settings of the run, over those of the app.
            look: called every moment.
            until: when to give up, as `time.monotonic` tells it; None: never.
            app: in place of the one in the temporary folder.

        Raises:
            ConfigError, RunError: the server app's own; or the server ended, or the run was not over in time.
        """
        self.submit(config, app)
        while self.processes.is_running("run"):
            self.processes.check_alive(["superlink"])
            if until is not None and time.monotonic() > until:
                raise RunError(f"the run was not over in time{self.processes.log_tail('run')}")
            look()
            time.sleep(_PAUSE)
        look()
        self.processes.wait_for_success("run", _START)
        if RunFolder(str(config["out"])).read_result() is None:
            raise _failure(self.processes.log("run"), f"the run has failed{self.processes.log_tail('run')}")

    def submit(self, config: Mapping[str, Any], app: Path | None = None) -> None:
        """Start the app, and a program "run" that says what the server app says and ends with it."""
        words: _Words = ["run", app or self._app, _CONNECTION, "--stream", "-c", _told(config)]
        self.processes.start("run", [find_program("flwr"), *words])


def _failure(log: Path, otherwise: str) -> PolyfedError:
    """The error with which the server app ended, as it said it."""
    said = log.read_text(encoding="utf-8", errors="replace")
    matches = list(filter(None, map(_ERROR.search, said.splitlines())))
    if not matches:
        return RunError(otherwise)
    kind, text = matches[-1].groups()
    error = ConfigError if kind == "ConfigError" else RunError
    return error(text.strip())


def _told(config: Mapping[str, Any]) -> str:
    """Settings as Flower reads them on a command line.

    Raises:
        ConfigError: a text with a quotation mark, for which Flower has no form there.
    """
    for value in config.values():
        if isinstance(value, str) and any(mark in value for mark in '"\\\n'):
            raise ConfigError(f"expected a path without quotation marks and backslashes, got '{value}'")
    return " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in config.items())


def polyfed_command() -> _Words:
    """The command of the polyfed that runs."""
    return [sys.executable, "-m", "polyfed"]


def find_program(name: str) -> Path:
    """One of Flower's programs: beside this Python, else wherever the system finds it.

    Raises:
        ConfigError: it is not there.
    """
    beside = Path(sys.executable).with_name(name)
    found = beside if beside.exists() else shutil.which(name)
    if found is None:
        raise ConfigError(f"expected the program {name} beside {sys.executable}, as flwr brings it, got none")
    return Path(found)


def _paths() -> dict[str, str]:
    """Where programs and modules are found: Flower's programs call each other by name, and models may be one's own."""
    programs = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    installed = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]
    places = [Path(place).resolve() for place in sys.path]  # "" is where we are
    own = [p for p in places if p.is_dir() and not any(p.is_relative_to(prefix) for prefix in installed)]
    return {"PATH": os.pathsep.join(programs), "PYTHONPATH": os.pathsep.join(map(str, own))}


@contextlib.contextmanager
def _kept(folder: Path, resume: bool) -> Iterator[Path]:
    """The folder beside a run's in which nodes keep what is theirs; it goes when the block ends well.

    Raises:
        ConfigError: there are other files in it, or what the nodes of a run that is to go on have kept is not there.
    """
    place = folder.with_name(f"{folder.name}-nodes")
    entries = list(place.iterdir()) if place.is_dir() else []
    if place.exists() and not all(entry.is_dir() and _KEPT.fullmatch(entry.name) for entry in entries):
        raise ConfigError(f"expected an empty or new folder for what nodes keep, got {place} with other files in it")
    if resume and not entries and (folder / "rounds.jsonl").exists():
        raise ConfigError(
            f"expected what the nodes of {folder} have kept in {place}, got none: it goes when such a run is finished, "
            "which then has no more rounds; begin anew with --overwrite"
        )
    if not resume and entries:
        shutil.rmtree(place)
    make_private(place)
    yield place
    shutil.rmtree(place)
