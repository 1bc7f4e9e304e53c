"""Figures over seeds, and what it took to reach a target accuracy. What is not known is None, never NaN.

A 95 % interval is Student's: the mean plus or minus its *margin*, t(0.975, n - 1) s / sqrt(n), with s the sample
standard deviation (n - 1) over n seeds. Two rows are compared seed by seed: the mean of the differences on the seeds
that both have, with the margin of these differences. One seed has neither spread nor margin: both are None, not zero.
Two seeds have no margin either, as theirs would be 12.7 deviations over sqrt(2): `SEEDS` are the fewest that have one.

Where each seed splits the same rows anew into rows to train on and test rows, runs of different seeds share rows, and
s / sqrt(n) is too small. There the standard error is s sqrt(1 / n + r), with r the ratio of test rows to all others
(Nadeau and Bengio, Inference for the generalization error, Machine Learning 2003): `resplit_ratio`.

A difference is distinguishable where its interval leaves out zero. The row with the highest mean leads a column where
its difference to each other row is.

A target is reached in the first round, counted from 1, after which the mean accuracy over clients is at least the
target, among the rounds that were scored (FedGH's Table 3 and FedIN's tables count so). Bytes and seconds are those of
all rounds up to it. An accuracy may fall below the target again: the first time still counts.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyfed.records.main_score import MainScore
from polyfed.report.run_records import RunRecord

if TYPE_CHECKING:
    import pandas as pd

LEVEL = 0.95
SEEDS = 3  # fewer say nothing of chance
BySeed = Mapping[int, float | None]  # seed -> main score
_RESPLIT = re.compile(r"(\d+):(\d+):(\d+)")


# numbers that may not be known ------------------------------------------------------------------------------------
def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def finite_ones(values: Iterable[Any]) -> list[float]:
    """Those of the values that are finite numbers."""
    return [number for number in map(finite, values) if number is not None]


def mean_of(values: Sequence[Any]) -> float | None:
    """The mean, exact when all are equal (bytes stay whole numbers); None unless every value is known."""
    known = finite_ones(values)
    if not known or len(known) < len(values):
        return None
    return known[0] if all(value == known[0] for value in known) else statistics.fmean(known)


def sum_of(values: Sequence[Any]) -> float | None:
    """The sum; None unless every value is known."""
    known = finite_ones(values)
    return sum(known) if len(known) == len(values) else None


def whole(value: float | None) -> float | None:
    """A whole number as such, as bytes and counts are."""
    return int(value) if value is not None and value == int(value) else value


# over seeds -------------------------------------------------------------------------------------------------------
def scores_by_seed(runs: Sequence[RunRecord], stage: str) -> dict[int, float | None]:
    """Seed -> the main score in a stage, as the runs report it."""
    return {run.seed: finite(run.figures.get((run.result.main_score.name, stage))) for run in runs}


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, of scores or of differences seed by seed, with its sample deviation and its margin.

    resplit: the ratio by which the variance of a mean is larger than of independent runs (`resplit_ratio`).
    """

    mean: float | None = None
    std: float | None = None
    margin: float | None = None
    seeds: tuple[int, ...] = ()
    resplit: float = 0.0

    @classmethod
    def of(cls, values: BySeed, resplit: float = 0.0) -> Estimate:
        """That of some scores; what is not known of every seed is None.

        >>> round(Estimate.of({0: 1.0, 1: 2.0, 2: 3.0}).margin, 4)  # 4.3027 * 1 / sqrt(3)
        2.4841
        >>> round(Estimate.of({0: 1.0, 1: 2.0, 2: 3.0}, resplit=2 / 3).margin, 4)  # 4.3027 * sqrt(1 / 3 + 2 / 3)
        4.3027
        """
        known = finite_ones(values.values())
        count = len(known)
        std = margin = None
        if count == len(values) and count > 1:
            std = statistics.stdev(known)
        if std is not None and count >= SEEDS:
            margin = _quantile(count) * std * math.sqrt(1 / count + resplit)
        return cls(mean_of(list(values.values())), std, margin, tuple(values), resplit)

    @classmethod
    def difference(cls, mine: BySeed, other: BySeed, resplit: float = 0.0) -> Estimate:
        """That of the differences, mine minus the other, on the seeds that both have."""
        differences: dict[int, float | None] = {}
        for seed in [seed for seed in mine if seed in other]:
            a, b = mine[seed], other[seed]
            differences[seed] = None if a is None or b is None else a - b
        return cls.of(differences, resplit)

    @classmethod
    def gain(cls, mine: BySeed, other: BySeed, score: MainScore, resplit: float = 0.0) -> Estimate:
        """How much better than another a row is; what lowers the RMSE is a gain above zero."""
        upper, lower = (other, mine) if score.lower_is_better else (mine, other)
        return cls.difference(upper, lower, resplit)

    def named(self, name: str) -> dict[str, float | None]:
        """As columns of a table: NAME, NAME_std and NAME_margin."""
        return {name: self.mean, f"{name}_std": self.std, f"{name}_margin": self.margin}

    @property
    def standard_error(self) -> float | None:
        """Of the mean; None where there are too few seeds to say."""
        if self.std is None or self.margin is None:
            return None
        return self.std * math.sqrt(1 / len(self.seeds) + self.resplit)

    @property
    def is_distinguishable(self) -> bool | None:
        """Whether it is more than chance that this is not zero; None where there are too few seeds to say."""
        if self.mean is None or self.margin is None:
            return None
        return abs(self.mean) > self.margin

    @property
    def p_value(self) -> float | None:
        """Of Student's two-sided test that this is zero; None where there are too few seeds to say.

        >>> round(Estimate.of({0: 1.0, 1: 2.0, 2: 3.0}).p_value, 4)  # t = 2 sqrt(3), two degrees of freedom
        0.0742
        """
        error = self.standard_error
        if self.mean is None or error is None:
            return None
        if not error:
            return 0.0 if self.mean else 1.0
        from scipy.special import stdtr  # comes with scikit-learn

        return 2 * float(stdtr(len(self.seeds) - 1, -abs(self.mean) / error))


def _quantile(seeds: int) -> float:
    """Student's t that is exceeded on neither side with a probability of `LEVEL`, for so many seeds."""
    from scipy.special import stdtrit  # comes with scikit-learn

    return float(stdtrit(seeds - 1, (1 + LEVEL) / 2))


def resplit_ratio(data: Mapping[str, Any]) -> float:
    """Test rows over all others, where each seed splits the same rows anew; 0 where test rows are given.

    Rows for validation count among the others: they choose what is trained. Caps are not counted, so that with caps
    the ratio is rather too large; so it is with a common test set that is official beside ``split = "8:1:1"``.

    Args:
        data: ``[data]`` of a recipe, whose `split` says which of both it is; {} of a run that was given its clients.

    >>> resplit_ratio({"split": "6:2:2"}), resplit_ratio({"split": "official:8:2"})
    (0.25, 0.0)
    """
    found = _RESPLIT.fullmatch(str(data.get("split", "")))
    if found is None:
        return 0.0
    train, validation, test = map(int, found.groups())
    return test / (train + validation)


def about_resplit(resplit: float) -> str:
    """What intervals are where seeds split the same rows anew; "" where they do not."""
    if not resplit:
        return ""
    return (
        f"each seed splits the same rows anew, and runs share rows: the variance of a mean is taken as "
        f"s^2 (1/n + {resplit:.2f}), with the ratio of test rows to all others (Nadeau and Bengio, 2003)"
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """P-values adjusted for their number: the k-th smallest of m times m - k + 1, no smaller than those before it.

    None is not counted, and stays.

    >>> holm([0.01, 0.04, None, 0.03, 0.005])
    [0.03, 0.06, None, 0.06, 0.02]
    """
    adjusted: list[float | None] = [None] * len(p_values)
    ordered = sorted((p, at) for at, p in enumerate(p_values) if p is not None)
    highest = 0.0
    for smaller, (p, at) in enumerate(ordered):
        highest = max(highest, min(1.0, (len(ordered) - smaller) * p))
        adjusted[at] = highest
    return adjusted


def leader(
    scores: Mapping[str, BySeed], may_lead: Container[str], lower_is_better: bool = False, resplit: float = 0.0
) -> str | None:
    """The row with the best mean, where its difference to every other row is distinguishable; else None.

    Args:
        scores: row -> its main scores, of all rows that compete; one of which a seed is not known does not count.
        may_lead: those of them that may be marked; the others only stand in the way.
        lower_is_better: whether the lowest mean is the best, not the highest. resplit: see `resplit_ratio`.
    """
    means = {name: mean_of(list(found.values())) for name, found in scores.items()}
    sign = -1 if lower_is_better else 1
    known = {name: sign * mean for name, mean in means.items() if mean is not None}
    best = max(known, key=lambda name: known[name], default=None)
    if best is None or best not in may_lead or len(known) == 1:
        return None
    behind = [Estimate.difference(scores[best], scores[other], resplit) for other in known if other != best]
    return best if all(one.is_distinguishable and sign * (one.mean or 0.0) > 0 for one in behind) else None


# to a target ------------------------------------------------------------------------------------------------------
def to_target(rounds: pd.DataFrame, seeds: Sequence[int], accuracy: float) -> dict[str, dict[int, float | None]]:
    """What a row's runs needed to reach an accuracy (in [0, 1]), seed by seed; None where one has not reached it.

    Args:
        rounds: the row's of `polyfed.report.frames.round_frame`. seeds: of its runs.

    Returns:
        "rounds": the first round at or above it. "bytes" (both ways), "bytes_paper" (as the method's paper counts),
        "seconds", "simulated_seconds": of all rounds up to it.
    """
    summed = {
        "bytes": ("bytes_up", "bytes_down"),
        "bytes_paper": ("paper_up", "paper_down"),
        "seconds": ("seconds",),
        "simulated_seconds": ("simulated_seconds",),
    }
    needed: dict[str, dict[int, float | None]] = {key: dict.fromkeys(seeds) for key in ("rounds", *summed)}
    for seed, own in rounds.groupby("seed"):
        reached = own["round"][own["value"] >= accuracy]
        if len(reached):
            spent = own[own["round"] <= reached.min()]
            needed["rounds"][seed] = int(reached.min())
            for key, columns in summed.items():
                needed[key][seed] = total(spent, *columns)
    return needed


def total(rounds: pd.DataFrame, *columns: str) -> float | None:
    """The sum of columns over rounds, whole where it is; None where some number is not known."""
    found = float(rounds[list(columns)].to_numpy().sum())
    return None if math.isnan(found) else whole(found)
