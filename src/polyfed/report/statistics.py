"""Figures over seeds, and what it took to reach a target accuracy.

A 95 % interval is Student's: the mean plus or minus its *margin*, t(0.975, n - 1) s / sqrt(n), with s the sample
standard deviation (n - 1) over n seeds. Two rows are compared seed by seed: the mean of the differences on the seeds
that both have, with the margin of these differences. One seed has neither spread nor margin: both are None, not zero.
Two seeds have no margin either, as theirs would be 12.7 deviations over sqrt(2): `SEEDS` are the fewest that have one.

A difference is distinguishable where its interval leaves out zero. The row with the highest mean leads a column where
its difference to each other row is.

A target is reached in the first round, counted from 1, after which the mean accuracy over clients is at least the
target, among the rounds that were scored (FedGH's Table 3 and FedIN's tables count so). Bytes and seconds are those of
all rounds up to it. An accuracy may fall below the target again: the first time still counts, and it is told.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.errors import ConfigError
from polyfed.report.run_records import RunRecord
from polyfed.report.text_tables import finite, mean_of, std_of, sum_of
from polyfed.results.schema import RoundRecord

__all__ = [
    "SEEDS",
    "Paired",
    "Target",
    "TargetCost",
    "ToTarget",
    "ci_half_width",
    "first_reach",
    "is_distinguishable",
    "leader",
    "paired_difference",
    "to_target",
]

LEVEL = 0.95
SEEDS = 3  # fewer say nothing of chance
_TARGET = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(%?)\s*(?:of\s+(local|best))?", re.IGNORECASE)


# over seeds -------------------------------------------------------------------------------------------------------
def ci_half_width(values: Sequence[Any]) -> float | None:
    """Half the width of the mean's 95 % interval; None for fewer than `SEEDS` values, and unless every value is known.

    >>> round(ci_half_width([1.0, 2.0, 3.0]), 4)  # 4.3027 * 1 / sqrt(3)
    2.4841
    """
    from scipy.special import stdtrit  # comes with scikit-learn

    std = std_of(values)
    if std is None or len(values) < SEEDS:
        return None
    return float(stdtrit(len(values) - 1, (1 + LEVEL) / 2)) * std / math.sqrt(len(values))


@dataclass(frozen=True)
class Paired:
    """Differences, one minus the other, on the seeds that both have; None is "not known"."""

    seeds: tuple[int, ...] = ()
    mean: float | None = None
    std: float | None = None
    margin: float | None = None


def paired_difference(mine: Mapping[int, float | None], other: Mapping[int, float | None]) -> Paired:
    """Compare seed by seed.

    Args:
        mine, other: seed -> accuracy.
    """
    seeds = tuple(seed for seed in mine if seed in other)
    found = [_minus(mine[seed], other[seed]) for seed in seeds]
    return Paired(seeds, mean_of(found), std_of(found), ci_half_width(found))


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def is_distinguishable(difference: Paired) -> bool | None:
    """Whether a difference is more than chance; None where there are too few seeds to say."""
    if difference.mean is None or difference.margin is None:
        return None
    return abs(difference.mean) > difference.margin


def leader(
    scores: Mapping[str, Mapping[int, float | None]], may_lead: Container[str], lower_is_better: bool = False
) -> str | None:
    """The row with the best mean, where its difference to every other row is distinguishable; else None.

    The one rule of what any table marks as its column's best.

    Args:
        scores: row -> seed -> main score, of all rows that compete; one of which a seed is not known does not count.
        may_lead: those of them that may be marked; the others only stand in the way.
        lower_is_better: whether the lowest mean is the best, not the highest.
    """
    means = {name: mean_of(list(found.values())) for name, found in scores.items()}
    sign = -1 if lower_is_better else 1
    known = {name: sign * mean for name, mean in means.items() if mean is not None}
    best = max(known, key=lambda name: known[name], default=None)
    if best is None or best not in may_lead or len(known) == 1:
        return None
    behind = [paired_difference(scores[best], scores[other]) for other in known if other != best]
    return best if all(is_distinguishable(one) and sign * (one.mean or 0.0) > 0 for one in behind) else None


# to a target ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Target:
    """An accuracy to be reached. share: in (0, 1]. of: "" for the accuracy itself, else "local" or "best".

    >>> [str(Target.parse(text)) for text in ("0.6", "90 %", "95% of local")]
    ['60 %', '90 %', '95 % of local']
    """

    share: float
    of: str = ""

    @classmethod
    def parse(cls, text: str | float) -> Target:
        """``0.6``, ``"60 %"``: an accuracy; ``"90 % of local"``, ``"90 % of best"``: a share of the last accuracy of
        Local, or of the best row.

        Raises:
            ConfigError: something else, or not between 0 and 1 (100 %).
        """
        wanted = "an accuracy such as 0.6 or '60 %', or a share such as '90 % of local' or '90 % of best'"
        found = _TARGET.fullmatch(str(text).strip())
        if found is None:
            raise ConfigError(f"target: expected {wanted}, got '{text}'")
        number, percent_sign, of = found.groups()
        share = float(number) / 100 if percent_sign else float(number)
        if not 0 < share <= 1:
            hint = f"; did you mean '{number} %'?" if not percent_sign and 1 < share <= 100 else ""
            raise ConfigError(f"target: expected {wanted}, got '{text}'{hint}")
        return cls(share, (of or "").lower())

    def __str__(self) -> str:
        return f"{100 * self.share:g} %" + (f" of {self.of}" if self.of else "")

    def accuracy(self, local: float | None, best: float | None) -> float | None:
        """The accuracy in [0, 1] that is asked for; None where it is a share of what is not known."""
        whole = {"": 1.0, "local": local, "best": best}[self.of]
        return None if whole is None else self.share * whole


@dataclass(frozen=True)
class TargetCost:
    """What one run needed. round: from 1. Bytes (up, down, and as the paper counts both), seconds: up to its end.

    simulated_seconds: likewise, None where devices are not simulated.
    lost: whether a later scored round was below the target again.
    """

    round: int
    bytes_up: float | None
    bytes_down: float | None
    bytes_paper: float | None
    seconds: float | None
    simulated_seconds: float | None
    lost: bool

    @property
    def bytes(self) -> float | None:
        """Both ways."""
        return None if self.bytes_up is None or self.bytes_down is None else self.bytes_up + self.bytes_down


def first_reach(run: RunRecord, accuracy: float, stage: str) -> TargetCost | None:
    """When a run first reached an accuracy in a stage; None if it never did."""
    scores = [_mean(record, stage) for record in run.rounds]
    first = next((at for at, score in enumerate(scores) if score is not None and score >= accuracy), None)
    if first is None:
        return None
    spent = run.rounds[: first + 1]
    return TargetCost(
        round=run.rounds[first].round,
        bytes_up=sum_of([record.bytes_up for record in spent]),
        bytes_down=sum_of([record.bytes_down for record in spent]),
        bytes_paper=paper_bytes(spent),
        seconds=sum_of([record.seconds for record in spent]),
        simulated_seconds=sum_of([record.simulated_seconds for record in spent]),
        lost=any(score is not None and score < accuracy for score in scores[first + 1 :]),
    )


def _mean(record: RoundRecord, stage: str) -> float | None:
    """The mean accuracy of a round in a stage; None where it was not scored."""
    return finite(record.mean_accuracy(stage)) if record.evaluated else None


def paper_bytes(records: Sequence[RoundRecord], both_ways: bool = True) -> float | None:
    """Bytes of these rounds, counted as the method's paper counts; as they were sent where that was not recorded.

    both_ways: up and down; else up alone.
    """
    up = sum_of([record.bytes_up_paper for record in records])
    down = sum_of([record.bytes_down_paper for record in records]) if both_ways else 0
    if up is None or down is None:
        up = sum_of([record.bytes_up for record in records])
        down = sum_of([record.bytes_down for record in records]) if both_ways else 0
    return None if up is None or down is None else up + down


@dataclass(frozen=True)
class ToTarget:
    """What a row needed to reach an accuracy. Means and deviations over seeds, None unless all seeds reached it.

    Attributes:
        accuracy: the target, in [0, 1].
        reached, runs: how many of the row's runs reached it, and how many there are.
        lost: how many of those were below it again later.
        rounds, rounds_std: the first round at or above it.
        bytes, bytes_up, bytes_down, bytes_paper: sent up to its end; `bytes` and the paper's count both ways.
        seconds: spent up to its end. simulated_seconds: likewise, on simulated devices; None where there are none.
        by_seed: seed -> the run's round; None where it never got there.
    """

    accuracy: float
    reached: int
    runs: int
    lost: int
    rounds: float | None
    rounds_std: float | None
    bytes: float | None
    bytes_up: float | None
    bytes_down: float | None
    bytes_paper: float | None
    bytes_paper_std: float | None
    seconds: float | None
    simulated_seconds: float | None
    by_seed: Mapping[int, int | None]


def to_target(runs: Sequence[RunRecord], accuracy: float, stage: str) -> ToTarget:
    """What a row's runs needed to reach an accuracy (in [0, 1]) in a stage."""
    every = [first_reach(run, accuracy, stage) for run in runs]
    got = [one for one in every if one is not None]

    def values(key: str) -> list[Any]:
        return [None if one is None else getattr(one, key) for one in every]

    return ToTarget(
        accuracy=accuracy,
        reached=len(got),
        runs=len(every),
        lost=sum(one.lost for one in got),
        rounds=mean_of(values("round")),
        rounds_std=std_of(values("round")),
        bytes=mean_of(values("bytes")),
        bytes_up=mean_of(values("bytes_up")),
        bytes_down=mean_of(values("bytes_down")),
        bytes_paper=mean_of(values("bytes_paper")),
        bytes_paper_std=std_of(values("bytes_paper")),
        seconds=mean_of(values("seconds")),
        simulated_seconds=mean_of(values("simulated_seconds")),
        by_seed={run.seed: None if one is None else one.round for run, one in zip(runs, every, strict=True)},
    )
