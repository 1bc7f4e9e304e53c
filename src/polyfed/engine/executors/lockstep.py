"""Several runs that take turns, and train their clients together where all of them have come to local training.

A run is a program of its own: it has a thread, of which only one works at any time. It hands over nowhere but in
`ask`, between a round's plan and its uploads; so what is one for a process (random generators, filters of warnings)
is never shared by two runs at work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polyfed.profiling import exclude

_of_thread = threading.local()


@dataclass(frozen=True)
class Answer:
    """What a run gets for what it has asked.

    Attributes:
        outcome: raised where it is an exception. seconds, processor_seconds: the run's share of what it took.
    """

    outcome: Any
    seconds: float = 0.0
    processor_seconds: float = 0.0


def present_turn() -> Turn | None:
    """That of the run whose thread this is; None elsewhere."""
    return getattr(_of_thread, "turn", None)


class Turn:
    """A run beside others.

    Attributes:
        asked: what it waits for an answer to. answer: given to it when it goes on. error: by which it ended, if by any.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._thread = threading.Thread(target=self._work, daemon=True)  # a second Ctrl-C waits for nobody
        self._waits = threading.Event()
        self._goes_on = threading.Event()
        self._over = threading.Event()
        self._is_stopped = False
        self.asked: Any = None
        self.answer: Any = None
        self.error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self._over.is_set()

    @property
    def works(self) -> bool:
        """Whether it is at work now."""
        return self._thread.is_alive() and not self._waits.is_set()

    def ask(self, what: Any) -> Any:
        """In its own thread: the outcome of what is asked, once others have had their turns.

        Raises:
            KeyboardInterrupt: the runs are to stop. Or what the answer is.
        """
        began = time.perf_counter()
        used = time.process_time()
        self.asked = what
        if not self._is_stopped:
            self._waits.set()
            self._goes_on.wait()
            self._goes_on.clear()
        if self._is_stopped:
            raise KeyboardInterrupt
        answer = self.answer
        self.asked = self.answer = None  # they hold weights
        exclude(time.perf_counter() - began - answer.seconds, time.process_time() - used - answer.processor_seconds)
        if isinstance(answer.outcome, Exception):
            raise answer.outcome
        return answer.outcome

    def go_on(self) -> None:
        """In the main thread: let it work until it asks again, or ends.

        Raises:
            BaseException: by which it ended.
        """
        self._waits.clear()
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._goes_on.set()
        self._waits.wait()
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """In the main thread: have it end as by Ctrl-C, which keeps its whole rounds."""
        self._is_stopped = True
        self._goes_on.set()
        if self._thread.ident is not None:
            self._over.wait()

    def _work(self) -> None:
        _of_thread.turn = self
        torch.set_num_threads(1)  # in this thread, as `run_loop.single_threaded` has it
        try:
            self._run()
        except BaseException as error:  # raised again in the main thread
            self.error = error
        self._over.set()
        self._waits.set()


def take_turns(
    runs: Sequence[Callable[[], None]],
    carry_out: Callable[[Sequence[Any]], Sequence[Answer]],
    is_quick: Callable[[Any], bool],
) -> None:
    """Have all runs go on side by side to their ends.

    Args:
        carry_out: answers what several have asked. is_quick: what is answered before anybody who asks for more, so
            that a run with more exchanges than others does not fall behind them.

    Raises:
        BaseException: the first that a run has raised, or `carry_out`, or Ctrl-C; all have ended then.
    """
    turns = [Turn(run) for run in runs]
    try:
        for turn in turns:
            turn.go_on()
        while waiting := [turn for turn in turns if not turn.ended]:
            ready = [turn for turn in waiting if is_quick(turn.asked)] or waiting
            for turn, answer in zip(ready, carry_out([turn.asked for turn in ready]), strict=True):
                turn.answer = answer
            del answer  # it holds weights
            for turn in ready:
                turn.go_on()
    finally:
        for turn in sorted(turns, key=lambda turn: not turn.works):  # whoever is at work first: one at a time
            turn.stop()
