"""A round under way: who takes part, and what it adds up to. Plugins read and change it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polyfed.core.method import Exchange, Method
from polyfed.core.randomness import generator
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.scoring import Score
from polyfed.engine.uploads import sent_nbytes

Records = Sequence[Mapping[str, Any]]


def draw_cohort(training: Training, seed: int, number: int, present: Sequence[int]) -> list[int]:
    """The clients of a round, drawn from those present without replacement, in order of number."""
    order = torch.randperm(len(present), generator=generator(seed, "selection", number))
    return sorted(present[place] for place in order[: training.cohort_size(len(present))].tolist())


@dataclass
class Round:
    """A round under way.

    Attributes:
        number: from 1. final: whether it is the method's round after the last one (`Method.final_exchanges`).
        method, server: of the federation. history: the records of the rounds before.
        present: who is in the federation, in order of number. cohort: who is asked to take part; drawn of those
        present unless it is given.
        unreachable: drop out before anything reaches them. silenced: nothing that they send leaves them.
        late: what they send arrives too late to count. busy: still at work for an earlier exchange of this round.
        failed: whose work was lost, not by their own fault. asked: by any exchange so far.
        changed: have taken over results of this round.
        evaluated: whether clients are scored at its end. counts_operations: whether jobs tell how many they take.
        exchange: the present one. totals: what the round adds up to. notes: of plugins, by name.
    """

    number: int
    final: bool
    method: Method
    server: Server
    history: Records
    present: list[int]
    evaluated: bool
    cohort: list[int] = field(default_factory=list)
    unreachable: set[int] = field(default_factory=set)
    silenced: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    busy: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    counts_operations: bool = False
    exchange: Exchange = field(default_factory=lambda: Exchange("train"))
    totals: RoundTotals = field(default_factory=lambda: RoundTotals())
    notes: dict[str, Any] = field(default_factory=dict)

    def reached(self, ids: Iterable[int]) -> list[int]:
        """Those of `ids` whom a message reaches."""
        return [i for i in ids if i not in self.unreachable]

    def working(self, ids: Iterable[int]) -> list[int]:
        """Those of `ids` who take part in the present exchange."""
        away = self.unreachable | self.failed | self.busy
        return [i for i in ids if i not in away]

    def dropped(self) -> list[int]:
        """Who of those asked has dropped out so far."""
        gone = self.unreachable | self.silenced
        return sorted((self.asked & gone) | self.failed)


class RoundTotals:
    """What a round adds up to, over its exchanges."""

    def __init__(self) -> None:
        self.down: dict[int, int] = {}
        self.up: dict[int, int] = {}
        self.in_paper = [0, 0]
        self.rejected: list[dict[str, Any]] = []
        self.loss = self.samples = self.steps = 0.0
        self.sums: dict[str, float] = {}
        self.scores: dict[int, Score] = {}

    def add(self, job: TrainJob, outcome: JobResult, method: Method, heard: bool) -> None:
        """Count one outcome. Bytes count when sent, also those of a rejected upload, unless nothing left the client."""
        number = outcome.client_id
        self.down[number] = self.down.get(number, 0) + sent_nbytes(method, job.message)
        self.up[number] = self.up.get(number, 0) + (outcome.bytes_up if heard else 0)
        self.in_paper[0] += method.nbytes_in_paper(job.message)
        self.in_paper[1] += method.nbytes_in_paper(outcome.message) if heard and outcome.counts else 0
        if outcome.refused is not None:
            self.rejected.append({"client": number, "reason": outcome.refused})
        if not outcome.counts:
            return
        self.loss += outcome.trained.loss * outcome.trained.samples
        self.samples += outcome.trained.samples
        self.steps += outcome.trained.steps
        for name, value in outcome.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        if outcome.score is not None:
            self.scores[number] = outcome.score

    def record(self) -> dict[str, Any]:
        """The round's part of `rounds.jsonl`; `sums` are the method's own, per training step."""
        return {
            "bytes_up": sum(self.up.values()),
            "bytes_down": sum(self.down.values()),
            "bytes_up_paper": self.in_paper[1],
            "bytes_down_paper": self.in_paper[0],
            "bytes_by_client": {str(n): {"down": self.down[n], "up": self.up[n]} for n in sorted(self.down)},
            "train_loss": self.loss / self.samples if self.samples else None,
            "samples": int(self.samples),
            "refused": self.rejected,
            "sums": {name: value / max(self.steps, 1) for name, value in self.sums.items()},
        }
