"""What reports keep of a round: its totals and its means over clients, nothing that grows with the clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from polyfed.results.schema import RoundRecord

# what did not count, as a record lists it -> in words
LOST = {"refused": "refused", "dropped": "dropped out", "stragglers": "too late"}

Scores = Mapping[str, float | None]  # stage -> the main score, a mean over clients


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """A round, as its `RoundRecord` says, in short.

    Attributes:
        clients: how many trained. lost: how many of each of `LOST`. reasons: of refusals, each with its number.
        scores_by_predictor: the scores by the method's further predictors.
    """

    round: int
    final_round: bool = False
    evaluated: bool = False
    clients: int = 0
    seconds: float | None = None
    simulated_seconds: float | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    bytes_up_paper: int | None = None
    bytes_down_paper: int | None = None
    validation: float | None = None
    lost: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, int] = field(default_factory=dict)
    scores: Scores = field(default_factory=dict)
    scores_by_predictor: Mapping[str, Scores] = field(default_factory=dict)

    @classmethod
    def of(cls, record: RoundRecord) -> RoundFigures:
        """Those of a record."""
        by_stage = record.accuracy_by_predictor
        predictors = dict.fromkeys(name for found in by_stage.values() for name in found)
        return cls(
            round=record.round,
            final_round=record.final_round,
            evaluated=record.evaluated,
            clients=len(record.clients),
            seconds=record.seconds,
            simulated_seconds=record.simulated_seconds,
            bytes_up=record.bytes_up,
            bytes_down=record.bytes_down,
            bytes_up_paper=record.bytes_up_paper,
            bytes_down_paper=record.bytes_down_paper,
            validation=record.validation,
            lost={key: len(getattr(record, key) or ()) for key in LOST},
            reasons=dict(Counter(upload.reason for upload in record.refused)),
            scores={stage: score.mean for stage, score in record.accuracy.items()},
            scores_by_predictor={
                name: {stage: found[name].mean for stage, found in by_stage.items() if name in found}
                for name in predictors
            },
        )

    def mean(self, stage: str) -> float | None:
        """The main score in a stage, a mean over clients; None where it is not known."""
        return self.scores.get(stage)
