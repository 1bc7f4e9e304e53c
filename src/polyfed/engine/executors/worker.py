"""A worker: a process forked from the run's own, which carries out one job after the other.

It has data, networks and the method by being forked, and shares the store of the clients' weights, of which it is told
where to read and where to write. Whatever else changes in a run travels with each job, in shared memory, and so does
what comes of it. So a worker keeps nothing, and another one can take its place at any time.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from polyfed import profiling
from polyfed.core.client import Client
from polyfed.core.message import read_only
from polyfed.core.method import Method, Trained
from polyfed.core.model_factory import Architectures
from polyfed.engine.evaluation import Memory, Score
from polyfed.engine.executors.base import Job, Outcome, Scoring, carry_out, placed, score_parts
from polyfed.engine.executors.shared_buffer import Mailbox
from polyfed.engine.weight_store import Row, Store, row_of
from polyfed.errors import PolyfedError, RunError
from polyfed.signals import TERMINATION_SIGNALS

_RUNS_BUSINESS = (signal.SIGINT, *TERMINATION_SIGNALS)  # upon which it ends its workers
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4  # of mallopt
_GRACE = 1.0  # seconds from the end of a worker's line to the end of the process
_TAKE_ME_FIRST = "500"  # of -1000 to 1000: where memory runs out, a worker goes before the run


class Unable(Exception):
    """No worker can be had here; says why."""


class Died(Exception):
    """The worker ended before it answered; says how."""


@dataclass(frozen=True)
class Crew:
    """What workers have by being forked.

    clients: by number. store: of their weights. auc: scores come with the area under the ROC curve.
    """

    method: Method
    architectures: Architectures
    clients: Sequence[Client]
    store: Store
    auc: bool


class Worker:
    """A worker, as the run's process sees it: greet it; then ask it, wait for its line, take the answer.

    Args:
        crew: what it works on. others: the other workers, whose lines it must not hold open.

    Raises:
        Unable: no process can be forked.
    """

    def __init__(self, crew: Crew, others: Sequence[Worker] = ()) -> None:
        self._inbox = Mailbox()
        self._outbox = Mailbox()
        self._store = crew.store
        self._store.open()
        self._asked: Job | Scoring | None = None
        self._fresh: Row | None = None  # for the weights that come of a job
        self.line, theirs = Pipe()
        run = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or closed
                stream.flush()  # or the worker has it to flush, too
        with _no_interruption():
            try:
                with warnings.catch_warnings():  # of threads, which hold nothing that a worker waits for
                    warnings.simplefilter("ignore", DeprecationWarning)
                    self.process = os.fork()
            except OSError as error:
                raise Unable(f"no process can be started: {error.strerror}") from None
            if self.process == 0:
                _live(run, theirs, [self.line, *(other.line for other in others)], crew, self._inbox, self._outbox)
        theirs.close()

    def greet(self) -> None:
        """Wait until it is there.

        Raises:
            Unable: it cannot compute.
        """
        try:
            if trouble := json.loads(self.line.recv_bytes())["trouble"]:
                raise Unable(str(trouble))
        except (EOFError, OSError):
            raise Unable(f"it {self._how()}") from None

    @profiling.timed("messages")
    def ask(self, asked: Job | Scoring, evaluation: int = 0) -> None:
        """Give it something to do; one thing at a time. evaluation: number of that which a scoring belongs to.

        Raises:
            RunError: a message or a state holds something that is no tensor.
        """
        facts = _job_facts(asked) if isinstance(asked, Job) else {**_scoring_facts(asked), "evaluation": evaluation}
        tensors = {"message": asked.message, "state": asked.client.state}
        self._fresh = self._store.fresh(asked.client.architecture, asked.variant) if isinstance(asked, Job) else None
        rows = {"own": _place(row_of(asked.client)), "fresh": _place(self._fresh)}
        request = {**facts, "client": asked.client.id, "tensors": self._inbox.put(tensors), **rows}
        self._asked = asked
        with contextlib.suppress(OSError):  # it is no more, as `answer` will say
            self.line.send_bytes(json.dumps(request).encode())

    @profiling.timed("messages")
    def answer(self) -> tuple[Any, float]:
        """What came of it, an `Outcome` or `Scores`, in tensors of its own; and how many seconds it took.

        Raises:
            Died: it is no more. PolyfedError: that of the work, as if it had been done here.
        """
        try:
            reply = json.loads(self.line.recv_bytes())
        except (EOFError, OSError):
            raise Died(self._how()) from None
        if "error" in reply:
            raise _error(*reply["error"])
        profiling.include(reply.get("timings"))
        tensors = self._outbox.take(reply["tensors"])
        asked, fresh = self._asked, self._fresh
        self._asked = self._fresh = None
        if isinstance(asked, Job):
            return _outcome(asked, reply, tensors, fresh), reply["seconds"]
        return {part: _score(figures) for part, figures in tensors.items()}, reply["seconds"]

    def alive(self) -> bool:
        """Whether the process is still there."""
        try:
            return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # somebody else has looked after it
            return False

    def end(self) -> None:
        """End the process, if it has not ended. It keeps nothing that would be lost."""
        self.line.close()
        self._inbox.close()
        self._outbox.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)

    def _how(self) -> str:
        """How it ended, of which its line has told."""
        late = time.monotonic() + _GRACE
        while self.alive() and time.monotonic() < late:
            time.sleep(0.001)
        with contextlib.suppress(ChildProcessError):
            if found := os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_code == os.CLD_EXITED:
                    return f"ended with status {found.si_status}"
                memory = ", as when memory runs out" if found.si_status == signal.SIGKILL else ""
                return f"was killed by {signal.Signals(found.si_status).name}{memory}"
        return "closed its line"


@contextlib.contextmanager
def _no_interruption() -> Iterator[None]:
    """Ctrl-C and the like wait until the block is over, so that no process is made that nobody knows of."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _RUNS_BUSINESS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# what travels -----------------------------------------------------------------------------------------------------


def _place(row: Row | None) -> list[Any] | None:
    """Where a client's row lies."""
    return None if row is None else [row.variant, row.begin]


def _job_facts(job: Job) -> dict[str, Any]:
    names = ("variant", "round", "closing", "place", "scores", "auc", "counted")
    return {"what": "job", **{name: getattr(job, name) for name in names}}


def _scoring_facts(asked: Scoring) -> dict[str, Any]:
    facts = {"variant": asked.variant, "round": asked.round, "version": asked.client.version}
    return {"what": "scoring", "parts": list(asked.parts), "shared": list(asked.shared), **facts}


def _outcome(job: Job, reply: Mapping[str, Any], tensors: Mapping[str, Any], fresh: Row | None) -> Outcome:
    """What came of a job; what did not change is the client's own again."""
    own = job.client
    return Outcome(
        own.id,
        read_only(tensors["message"]),
        fresh if reply["new"] else own.weights,
        own.state if tensors["state"] is None else _filled(tensors["state"], own.state),
        Trained(*reply["trained"]),
        reply["bytes_up"],
        reply["sums"],
        None if tensors["score"] is None else _score(tensors["score"]),
        reply["refused"],
        operations=reply["operations"],
    )


def _figures(score: Score) -> dict[str, Any]:
    """A score in tensors, for `_score`."""
    others = {name: _figures(other) for name, other in score.others.items()}
    return {"confusion": score.confusion, "auc": torch.tensor(score.auc, dtype=torch.float64), "others": others}


def _score(figures: Mapping[str, Any]) -> Score:
    others = {name: _score(other) for name, other in figures["others"].items()}
    return Score(figures["confusion"], float(figures["auc"]), others)


def _filled(state: Mapping[str, Any], own: Any) -> dict[str, Any]:
    """The state with the client's own tensors where there is None."""
    filled = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            filled[name] = _filled(value, own.get(name))
        else:
            filled[name] = own[name] if value is None else value
    return filled


def _changed(state: Mapping[str, Any], before: Any) -> dict[str, Any]:
    """The state with None for the tensors that are the very same as before, under the same name."""
    known = before if isinstance(before, Mapping) else {}
    changed: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            changed[name] = _changed(value, known.get(name))
        else:
            changed[name] = None if value is known.get(name) else value
    return changed


def _error(kind: str, text: str, where: str) -> PolyfedError:
    """The worker's error; where it came from is in the notes."""
    kinds = [PolyfedError]
    found = RunError
    while kinds:
        one = kinds.pop()
        kinds += one.__subclasses__()
        found = one if f"{one.__module__}.{one.__qualname__}" == kind else found  # type: ignore[assignment]
    error = found(text)
    error.add_note(where)
    return error


# the worker's side ------------------------------------------------------------------------------------------------


def _live(
    run: int, line: Connection, closed: Sequence[Connection], crew: Crew, inbox: Mailbox, outbox: Mailbox
) -> None:
    """The life of a worker; it never returns to what its parent was doing."""
    try:
        for number in _RUNS_BUSINESS:  # a terminal and a service's manager tell all processes
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _RUNS_BUSINESS)
        _settle(run)
        for each in closed:
            each.close()  # or nobody would notice that the run has ended
        line.send_bytes(json.dumps({"trouble": _trouble()}).encode())
        _Shift(crew, inbox, outbox).work(line)
    except (EOFError, OSError):  # the run has ended
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    finally:
        os._exit(0)


def _settle(run: int) -> None:
    """What a worker sets for itself: it ends with the run, has one computing thread, keeps the memory that it frees."""
    library = ctypes.CDLL(None)
    library.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != run:  # it ended before
        os._exit(0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(_TAKE_ME_FIRST)
    torch.set_num_threads(1)
    if hasattr(library, "gnu_get_libc_version"):  # others have no such settings
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    gc.freeze()  # what was there before is not looked through again, which would copy its memory
    with contextlib.suppress(OSError):  # streams of its own, as another thread may have held those of the run
        sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115


def _trouble() -> str | None:
    """Why this process cannot compute, if it cannot."""
    try:
        x = torch.ones((), requires_grad=True)
        torch.autograd.grad(x * x, x)
    except RuntimeError as error:  # where there is a GPU, PyTorch refuses to after a gradient was taken by the parent
        return " ".join(str(error).split())
    return None


class _Shift:
    """Carries out what comes over the line."""

    def __init__(self, crew: Crew, inbox: Mailbox, outbox: Mailbox) -> None:
        self._crew = crew
        self._inbox = inbox
        self._outbox = outbox
        self._memory = Memory(crew.auc)
        self._evaluation = 0
        for client in crew.clients:
            client.weights = None
            client.state = {}  # they come with each job

    def work(self, line: Connection) -> None:
        """Until the line is closed."""
        while True:
            asked = json.loads(line.recv_bytes())
            began = time.perf_counter()
            try:
                with profiling.watching(profiling.watched(), "messages") as watch:
                    reply = self._job(asked) if asked["what"] == "job" else self._scoring(asked)
                reply["seconds"] = time.perf_counter() - began
                if watch is not None:
                    reply["timings"] = watch.seconds
            except Exception as error:
                kind = type(error) if isinstance(error, PolyfedError) else RunError
                text = str(error) if isinstance(error, PolyfedError) else f"{type(error).__name__}: {error}"
                reply = {"error": [f"{kind.__module__}.{kind.__qualname__}", text, traceback.format_exc()]}
            line.send_bytes(json.dumps(reply).encode())

    def _client(self, asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> Client:
        client: Client = copy.copy(self._crew.clients[asked["client"]])
        client.weights = self._row(asked, "own")
        client.state = tensors["state"]
        client.version = asked.get("version", -1)  # by which representations are remembered, for scores
        return client

    def _row(self, asked: Mapping[str, Any], name: str) -> Row | None:
        """The row that is called so in what was asked."""
        if asked[name] is None:
            return None
        variant, begin = asked[name]
        return self._crew.store.at(self._crew.clients[asked["client"]].architecture, variant, begin)

    def _job(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        tensors = self._inbox.look(asked["tensors"])
        method = self._crew.method
        client = self._client(asked, tensors)
        exchanges = method.closing() if asked["closing"] else method.exchanges(asked["round"])
        exchange = exchanges[asked["place"]]
        flags = {name: asked[name] for name in ("scores", "auc", "counted")}
        job = Job(client, tensors["message"], asked["variant"], exchange, asked["round"], **flags)
        fresh = self._row(asked, "fresh")
        assert fresh is not None
        done = carry_out(job, method, self._crew.architectures, lambda: fresh)
        sent = {
            "message": done.message,
            "state": _changed(done.state, client.state) if done.counts else None,
            "score": None if done.score is None else _figures(done.score),
        }
        try:
            tensors = self._outbox.put(sent)
        except RunError as error:
            raise placed(error, client, "uploading", job.round) from error
        return {
            "trained": [done.trained.steps, done.trained.samples, done.trained.loss],
            "bytes_up": done.bytes_up,
            "sums": done.sums,
            "refused": done.refused,
            "operations": done.operations,
            "new": done.weights is fresh,
            "tensors": tensors,
        }

    def _scoring(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        if asked["evaluation"] != self._evaluation:
            self._memory.forget_content()
            self._evaluation = asked["evaluation"]
        tensors = self._inbox.look(asked["tensors"])
        scoring = Scoring(
            self._client(asked, tensors),
            asked["variant"],
            tensors["message"],
            asked["round"],
            asked["parts"],
            asked["shared"],
        )
        scores = score_parts(scoring, self._crew.method, self._crew.architectures, self._memory)
        return {"tensors": self._outbox.put({part: _figures(score) for part, score in scores.items()})}
