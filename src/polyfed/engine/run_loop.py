"""From the last checkpoint to the end of a run: round after round, each whole or undone, and the method's final one."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from polyfed.core.message import contiguous
from polyfed.core.method import Exchange
from polyfed.engine.round import server_stage
from polyfed.engine.round_state import Round
from polyfed.errors import RunInterrupted
from polyfed.profiling import processor_seconds, profile
from polyfed.results.main_score import main_score_of
from polyfed.signals import raise_if_lost
from polyfed.units import human_count

if TYPE_CHECKING:
    from polyfed.engine.federation import Federation

_RECENT = 40  # rounds by which the time left is estimated


class RunLoop:
    """Runs the rounds of a federation that are still to come."""

    def __init__(self, federation: Federation, remarks: Sequence[str] = ()) -> None:
        self._federation = federation
        self._remarks = remarks  # what a user should know before round 1
        self._pace = Pace()
        self._told = 0.0  # when the last round was, by the clock of `time.perf_counter`

    def run(self) -> dict[str, Any]:
        """The rounds after the last checkpoint, and then the result.

        Raises:
            RunError: a client or the server failed. RunInterrupted: Ctrl-C; whole rounds are kept.
        """
        federation = self._federation
        with single_threaded(), contextlib.closing(federation.executor):
            self._begin()
            try:
                self._run_rounds()
                self._run_final()
                result = federation.write_result()
                federation.server.state = contiguous(federation.server.state)
            except KeyboardInterrupt:
                kept = self._keep()  # before others are told, which may take a tracker a while
                federation.tell("end", None)
                raise RunInterrupted(kept) from None
            except BaseException:
                federation.tell("end", None)
                raise
        federation.tell("end", result)
        return result

    def _begin(self) -> None:
        """Be where the last checkpoint is, or at the start; tell who watches."""
        federation = self._federation
        done = federation.checkpointer.restore(self._begin_excluded)
        if done == 0:
            federation.runner.start(federation.present(1))
        folder = federation.folder
        info = {**federation.facts, "start_round": done + 1, "out": None if folder is None else str(folder.path)}
        for way in ("bytes_up", "bytes_down"):
            info[way] = sum(record[way] for record in federation.history)
        federation.tell("start", info)
        for remark in self._remarks:
            federation.tell("message", remark)
        self._told = time.perf_counter()

    def _begin_excluded(self) -> None:
        """Who takes no part keeps the network that it begins with, and is scored with it."""
        federation = self._federation
        for number, variant in federation.setup.excluded.items():
            client = federation.clients[number]
            begun = federation.model_factory.initial_state(client.architecture, variant, number, client.given)
            client.weights = federation.store.allocate(client.architecture, variant).write(begun)
            client.version += 1

    def _run_rounds(self) -> None:
        """The regular rounds that are still to come."""
        checkpointer, every = self._federation.checkpointer, self._federation.output.checkpoint_every
        while not self._is_over():
            raise_if_lost()
            number = len(self._federation.history) + 1
            self._round_or_undo(number)
            if number % every == 0 or self._is_over() or checkpointer.best_round(number) == number:
                checkpointer.save(len(self._federation.history))

    def _run_final(self) -> None:
        """The method's final round, if it has one."""
        federation = self._federation
        done = len(federation.history)
        if self._is_final_done():
            return
        if done < federation.training.rounds:
            score = main_score_of(federation.history[-1]).title
            federation.tell("message", f"round {done}: stopped, as the validation {score} has not become better")
        final = federation.method.final_exchanges()
        if not final:
            return
        federation.checkpointer.show_wanted_round()
        self._round_or_undo(done + 1, final)
        federation.checkpointer.save(len(federation.history))

    def _round_or_undo(self, number: int, final: Sequence[Exchange] = ()) -> None:
        """A whole round or nothing: what is interrupted or fails leaves the federation as it was before."""
        federation = self._federation
        federation.transaction.begin(number)
        try:
            record = self._timed_round(number, final)
            if federation.folder is not None:
                federation.folder.append(record)
            federation.history.append(record)
            federation.transaction.end()
        except BaseException:
            if federation.transaction.is_open:
                federation.transaction.undo()
            raise
        now = time.perf_counter()
        self._pace.add(now - self._told, record["evaluated"])
        self._told = now
        left = self._pace.seconds_left(number, federation.training.rounds, federation.evaluation.every_n_rounds)
        federation.tell("round", record, left)
        self._remark()

    def _timed_round(self, number: int, final: Sequence[Exchange]) -> dict[str, Any]:
        """Run a round; its record with the seconds that it took, on the clock and of processors."""
        federation = self._federation
        began = time.perf_counter()
        used = processor_seconds()
        with profile(federation.execution.profile) as watch:
            due = (
                bool(final)
                or number % federation.evaluation.every_n_rounds == 0
                or number == federation.training.rounds
            )
            round = Round(
                number,
                final=bool(final),
                method=federation.method,
                server=federation.server,
                history=federation.history,
                present=federation.present(number),
                evaluated=due,
            )
            record = federation.runner.run(round, final or federation.method.exchanges(number))
        record["seconds"] = time.perf_counter() - began
        record["processor_seconds"] = processor_seconds() - used
        if watch is not None:
            record["timings"] = watch.breakdown(record["seconds"], federation.executor.workers)
        return record

    def _remark(self) -> None:
        """Tell what the method has to say about the newest round, unless it has spoken in this run before."""
        method = self._federation.method
        *earlier, newest = self._federation.history
        with server_stage("remark", newest["round"]):
            text = method.remark(newest)
            has_spoken = bool(text) and any(method.remark(record) for record in earlier)
        if text and not has_spoken:
            self._federation.tell("message", f"round {newest['round']}: {text}")

    def _keep(self) -> str:
        """Keep the whole rounds of an interrupted run; says so."""
        federation = self._federation
        done = human_count(len(federation.history), "whole round")
        if federation.folder is None:
            return f"interrupted; {done} done, of which nothing is kept without a run folder"
        if federation.history and not federation.transaction.is_open:  # a second Ctrl-C may have stopped the undoing
            federation.tell("message", f"interrupted; writing a checkpoint of {done}")
            federation.checkpointer.save(len(federation.history))
        return f"interrupted; {done} kept in {federation.folder.path}"

    def _is_over(self) -> bool:
        """Whether the last regular round is done; by the records, so that a resumed run stops alike."""
        federation = self._federation
        done = len(federation.history) >= federation.training.rounds
        return done or self._is_final_done() or federation.checkpointer.has_stopped()

    def _is_final_done(self) -> bool:
        history = self._federation.history
        return bool(history) and bool(history[-1]["final_round"])


class Pace:
    """How long rounds take, with the turns of other runs and the checkpoints between them."""

    def __init__(self) -> None:
        self._seconds: dict[bool, deque[float]] = {kind: deque(maxlen=_RECENT) for kind in (False, True)}

    def add(self, seconds: float, evaluated: bool) -> None:
        """A round took so long. evaluated: whether networks were scored in it."""
        self._seconds[evaluated].append(seconds)

    def seconds_left(self, number: int, rounds: int, every: int) -> float:
        """What the rounds after `number` take, of which each `every`th and the last are evaluated.

        Rounds take as long as the later half of those before, as the first ones are slower.
        """
        left = max(0, rounds - number)
        evaluated = min(left, math.ceil(rounds / every) - number // every)
        paces = {kind: fmean(list(own)[len(own) // 2 :]) for kind, own in self._seconds.items() if own}
        usual = max(paces.values())
        return evaluated * paces.get(True, usual) + (left - evaluated) * paces.get(False, usual)


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """One computing thread: the same bits whatever the machine's cores, and no slow-down beside busy neighbors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
