"""The executor `flower-sim`: clients' work done by Ray's processes, by way of Flower's simulation engine.

For clusters: with RAY_ADDRESS set, the work goes to the machines of that cluster, else to processes on this one. The
round loop, the store of weights and the run folder are those of any run; what a client is travels with every letter
(`errands`), so that the result is that of `serial` bit for bit, and a run goes on with any executor.

Flower and Ray run in a process of their own, which this one ends with all that they have started. The two speak over
a pipe, in letters.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.message import read_only
from polyfed.core.method import Trained
from polyfed.deploy import remote_jobs
from polyfed.deploy.node_registry import Answer
from polyfed.deploy.protocol import Letter, Trouble
from polyfed.deploy.requirements import OFFLINE, expect
from polyfed.engine.executors.base import Job, Outcome, Scores, Scoring
from polyfed.engine.executors.process_pool import Say, cores, obstacle
from polyfed.engine.executors.worker import Crew
from polyfed.errors import RequestError, RunError
from polyfed.profiling import timed

if TYPE_CHECKING:
    from polyfed.deploy.flower_transport import FlowerWire

__all__ = ["FlowerSim"]

_CLUSTER = "RAY_ADDRESS"  # Ray's own variable: of a cluster that is there already
_FOREVER = 30 * 86400.0  # seconds that a letter lives
_LOOK = 0.01  # seconds between two looks for answers
_GRACE = 10.0  # seconds that Ray has to end by itself
_LONGEST = 300  # characters of Ray's troubles that are told
_LENGTH = 8  # bytes that tell how long the head of a letter is
_SHORT = 40  # characters that a folder's name may have, so that Ray can give its sockets names


class FlowerSim:
    """Ray's processes, made when they are first needed, ended by `close`.

    Work whose process died is done again when the others are through, alone, by new ones, as memory may have run out;
    if they die of it again, the client counts as dropped out, or stays without a score.

    Args:
        crew: what is worked on. workers: at most so many at once; None: the cores, on a cluster one per client.
        say: told of what died. settings: of the recipe.

    Raises:
        RequestError: flwr or ray is not installed, there is no recipe, this is not Linux, or the device not the CPU.
    """

    def __init__(self, crew: Crew, workers: int | None, say: Say, settings: Mapping[str, Any] | None) -> None:
        for package in ("flwr", "ray"):
            expect(package, "the executor 'flower-sim'", extra="flower-sim")
        if settings is None or "data" not in settings:
            raise RequestError("expected a recipe for the executor 'flower-sim', came a federation made in Python")
        if reason := obstacle(crew.architectures.device.type):
            raise RequestError(f"expected another executor than 'flower-sim', as {reason}")
        everybody = len(crew.clients)
        self._cluster = _CLUSTER in os.environ
        self.workers = min(workers or (everybody if self._cluster else cores()), everybody)
        chosen = crew.architectures.chosen
        self._crew = crew
        self._say = say
        self._companion = "" if chosen is None else chosen.network
        self._settings = json.dumps(settings)
        self._engine: _Engine | None = None

    @timed("idle")
    def run(self, jobs: Sequence[Job], done: Callable[[int], None]) -> list[Outcome]:
        """See `Executor`."""
        found = self._through(jobs, done)
        outcomes = []
        for job, answer in zip(jobs, found, strict=True):
            if answer is None:
                outcomes.append(Outcome(job.client.id, read_only({}), None, {}, Trained(), dropped=True))
            else:
                outcomes.append(remote_jobs.outcome(job, answer, self._crew.store))
        return outcomes

    @timed("idle")
    def score(self, asked: Sequence[Scoring]) -> list[Scores]:
        """See `Executor`."""
        found = self._through(asked, lambda _: None)
        return [
            {} if answer is None else remote_jobs.scores(what, answer)
            for what, answer in zip(asked, found, strict=True)
        ]

    def close(self) -> None:
        """See `Executor`."""
        if self._engine is not None:
            self._engine.end()
        self._engine = None

    def _through(self, asked: Sequence[Job | Scoring], done: Callable[[int], None]) -> list[Letter | None]:
        """The answers; None where processes died of it, twice."""
        found: dict[int, Letter] = {}

        def keep(place: int, answer: Letter) -> None:
            found[place] = answer
            done(len(found))

        reason = ""
        for place, reason in self._dealt(asked, range(len(asked)), keep).items():
            self._say(f"{_whose(asked[place])} died ({reason}); its work is done again")
            self.close()
            for again in self._dealt(asked, [place], keep):
                self._say(f"{_whose(asked[again])} died again; it counts as dropped out")
                self.close()
        if asked and not found:
            raise RunError(f"no process of Ray could do the work of any client: {reason}")
        return [found.get(place) for place in range(len(asked))]

    def _dealt(
        self, asked: Sequence[Job | Scoring], places: Sequence[int], keep: Callable[[int, Letter], None]
    ) -> dict[int, str]:
        """Have what stands at these places done; those whose process died, and how."""
        if not places:
            return {}
        if self._engine is None:
            self._engine = _Engine(self._settings, self._most, self.workers)
        engine = self._engine
        waiting = deque(places)
        out = 0
        lost: dict[int, str] = {}
        while waiting or out:
            while waiting and out < self._most:
                place = waiting.popleft()
                engine.send(place, remote_jobs.asked(asked[place], self._companion, self._crew.auc))
                out += 1
            place, answer = engine.answer()
            out -= 1
            if isinstance(answer, Trouble):
                lost[place] = answer
            else:
                keep(place, answer)
                if "failed" in answer.facts:  # the run ends: only those before it may end it otherwise
                    waiting = deque(one for one in waiting if one < place)
        return dict(sorted(lost.items()))

    @property
    def _most(self) -> int:
        """Letters under way: here Ray itself has so many processes, and the next letter need not be waited for."""
        return self.workers if self._cluster else 2 * self.workers


def _whose(asked: Job | Scoring) -> str:
    return f"round {asked.round}: the process of client {asked.client.id}"


# the engine, as the run's process sees it ---------------------------------------------------------------------------


class _Engine:
    """A process with Flower's simulation engine and Ray.

    Args:
        settings: of the recipe, in JSON. nodes: how many letters may be under way. actors: processes of Ray.
    """

    def __init__(self, settings: str, nodes: int, actors: int) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="polyfed-"))
        if len(str(self._place)) > _SHORT:
            shutil.rmtree(self._place)
            self._place = Path(tempfile.mkdtemp(prefix="polyfed-", dir="/tmp"))
        self._line, far = Pipe()
        with far, (self._place / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main({far.fileno()})"],
                cwd=self._place,
                env={**os.environ, **_environment(self._place)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[far.fileno()],
                start_new_session=True,  # a Ctrl-C at the terminal is ours to handle
            )
        self._line.send_bytes(json.dumps({"settings": settings, "nodes": nodes, "actors": actors}).encode())

    def send(self, number: int, letter: Letter) -> None:
        """Have a letter answered, under this number."""
        with contextlib.suppress(OSError):  # it has ended, as `answer` will tell
            self._line.send_bytes(_sealed(number, letter))

    def answer(self) -> tuple[int, Answer]:
        """The next answer that comes, with its number.

        Raises:
            RunError: the engine has ended.
        """
        try:
            return _opened(self._line.recv_bytes())
        except (EOFError, OSError):
            self._process.wait()
            said = (self._place / "log").read_text("utf-8", "replace").split("\n")
            last = next((line.strip() for line in reversed(said) if line.strip()), "no word of it")
            raise RunError(f"Flower's simulation has ended: {last[:_LONGEST]}") from None

    def end(self) -> None:
        """End it, and what it has started, at once."""
        self._line.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        with contextlib.suppress(OSError):  # Ray's processes are of its group
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._place, ignore_errors=True)


def _environment(place: Path) -> dict[str, str]:
    """What the engine's process has in its environment besides ours."""
    own = {
        **OFFLINE,
        "FLWR_HOME": str(place),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path),
    }
    if _CLUSTER not in os.environ:  # Ray listens to the network: to those who know a word that is made here
        own |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return own


def _sealed(number: int, letter: Answer) -> bytes:
    if isinstance(letter, Trouble):
        facts: dict[str, Any] = {"number": number, "trouble": str(letter)}
        body = b""
    else:
        facts = {"number": number, "kind": letter.kind, "facts": dict(letter.facts)}
        body = letter.body
    head = json.dumps(facts).encode()
    return b"".join([len(head).to_bytes(_LENGTH, "little"), head, body])


def _opened(data: bytes) -> tuple[int, Answer]:
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    facts = json.loads(data[_LENGTH:end])
    if "trouble" in facts:
        return facts["number"], Trouble(facts["trouble"])
    return facts["number"], Letter(facts["kind"], facts["facts"], data[end:])


# the engine's own process -------------------------------------------------------------------------------------------


def main(handle: int) -> None:
    """Run the engine until the other end of the pipe is closed. handle: our end."""
    from polyfed.deploy.flower_transport import simulate

    line = Connection(handle)
    asked = json.loads(line.recv_bytes())
    letters: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(line, letters), daemon=True).start()
    answer = functools.partial(remote_jobs.work, asked["settings"])
    try:
        simulate(answer, functools.partial(_relay, line, letters), asked["nodes"], asked["actors"])
    except Exception as error:
        while error.__cause__ is not None and isinstance(error.__cause__, Exception):
            error = error.__cause__
        print(" ".join(f"{type(error).__name__}: {error}".split()), flush=True)
    os._exit(1)  # whatever threads there are; Ray's processes end with this one


def _listen(line: Connection, letters: queue.SimpleQueue[bytes]) -> None:
    """Take in what comes at once, so that nobody waits for a full pipe; the end of the line is the end of all."""
    try:
        while True:
            letters.put(line.recv_bytes())
    except (EOFError, OSError):
        shutil.rmtree(Path.cwd(), ignore_errors=True)  # who called may have been killed
        os.killpg(0, signal.SIGKILL)  # ourselves, and what Ray has started on this machine


def _relay(line: Connection, letters: queue.SimpleQueue[bytes], wire: FlowerWire) -> None:
    """Give each letter to a node that is free, and what it answers back."""
    free = sorted(wire.nodes())
    out = dict[str, tuple[int, int]]()
    while True:
        free = free or sorted(wire.nodes() - {node for _, node in out.values()})
        with contextlib.suppress(queue.Empty):
            while free:
                number, letter = _opened(letters.get(timeout=_LOOK))
                assert isinstance(letter, Letter)
                node = free.pop()
                (name,) = wire.send([(node, letter)], _FOREVER)
                out[name] = (number, node)
        time.sleep(0 if free else _LOOK)
        answers = wire.collect(list(out)) if out else {}
        for name, answer in answers.items():
            number, node = out.pop(name)
            free.append(node)
            line.send_bytes(_sealed(number, answer))
