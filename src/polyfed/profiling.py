"""Where a round's time went: a stopwatch with sections, of which the innermost open one counts.

    train        local steps                  align      FedHeNN's term in them, but for its backward pass
    prototypes   representation passes and    aggregate  the server's part: planning, aggregation
                 class means                  score      evaluation
    messages     loading, receiving, upload, copying; shared buffers and broadcasting
    other        what else the round does     idle       workers that wait

Off, which it is outside of `profile`, a section costs a fraction of a microsecond. Work that a GPU has only been asked
to do counts where it is waited for. Processor time is counted always, as a whole.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Literal, ParamSpec, TypeVar

Section = Literal["train", "align", "prototypes", "aggregate", "score", "messages", "other", "idle"]
SECTIONS: tuple[Section, ...] = ("train", "align", "prototypes", "aggregate", "score", "messages", "other", "idle")

P = ParamSpec("P")
R = TypeVar("R")


class Stopwatch:
    """Seconds by section, from now on.

    Args:
        base: what counts while no section is open.
    """

    def __init__(self, base: Section = "other") -> None:
        self._seconds: dict[Section, float] = dict.fromkeys(SECTIONS, 0.0)
        self._open = [base]
        self._since = time.perf_counter()

    @property
    def seconds(self) -> dict[Section, float]:
        """So far."""
        self._turn()
        return dict(self._seconds)

    def enter(self, section: Section) -> int:
        """Open a section; what to `leave` to."""
        self._turn()
        self._open.append(section)
        return len(self._open) - 1

    def leave(self, depth: int) -> None:
        """Close what was opened since, however much of it is still open."""
        self._turn()
        del self._open[depth:]

    def merge(self, seconds: Mapping[Section, float]) -> None:
        """Count what a worker has measured, beside this process's own time."""
        for section, more in seconds.items():
            self._seconds[section] += more

    def breakdown(self, seconds: float, workers: int) -> dict[Section, float]:
        """What `workers` did in so many seconds of wall time: adds up to `workers` times these.

        A process that deals work out, and waits meanwhile, is none of the workers: its waiting does not count.
        """
        found = {**self.seconds, "idle": 0.0}
        rest = workers * seconds - sum(found.values())
        found["idle" if workers > 1 else "other"] += rest
        return {section: max(0.0, found[section]) for section in SECTIONS}  # below 0: clocks of several processes

    def _turn(self) -> None:
        now = time.perf_counter()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now


_watch: Stopwatch | None = None
_of_workers = 0.0
_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def profile(on: bool = True, base: Section = "other") -> Iterator[Stopwatch | None]:
    """Sections within the block count on a stopwatch of its own (see there); None where they are not to."""
    global _watch
    before = _watch
    _watch = Stopwatch(base) if on else None
    try:
        yield _watch
    finally:
        _watch = before


def is_profiling() -> bool:
    """Whether sections count."""
    return _watch is not None


def section(name: Section) -> AbstractContextManager[None]:
    """What is done in the block counts for `name`, but for sections within it."""
    return _NOTHING if _watch is None else _opened(_watch, name)


@contextlib.contextmanager
def _opened(watch: Stopwatch, name: Section) -> Iterator[None]:
    depth = watch.enter(name)
    try:
        yield
    finally:
        watch.leave(depth)


def timed(name: Section) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function a section."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            if _watch is None:
                return function(*args, **kwargs)
            with section(name):
                return function(*args, **kwargs)

        return wrapped

    return wrap


def include(seconds: Mapping[Section, float] | None) -> None:
    """Count what a worker has measured, if it has."""
    if _watch is not None and seconds is not None:
        _watch.merge(seconds)


def processor_seconds() -> float:
    """Processor time that this process has used so far, all threads, and the workers whose answers it has."""
    return time.process_time() + _of_workers


def include_processor_seconds(seconds: float) -> None:
    """Count what a worker has used for an answer."""
    global _of_workers
    _of_workers += seconds
