"""The gains of a setting's methods over Local, taken apart: of the seeds' accuracies that its figures hold."""

from __future__ import annotations

from dataclasses import dataclass

from polyfed.report.benchmark_results import RowResult, SettingResult
from polyfed.report.decomposition import BySeed, take_apart
from polyfed.report.statistics import Paired, paired_difference
from polyfed.report.text_tables import interval, scored
from polyfed.results.main_score import MainScore

__all__ = ["Gain", "Gains", "gain_between", "gain_over", "gain_text", "gains_of"]


@dataclass(frozen=True)
class Gain:
    """A difference in accuracy, paired by seed: its mean and half its 95 % interval; None: not known."""

    mean: float | None
    margin: float | None

    @classmethod
    def of(cls, difference: Paired) -> Gain:
        """The same without its seeds."""
        return cls(difference.mean, difference.margin)

    @property
    def leaves_out_zero(self) -> bool:
        """Whether the interval does."""
        return self.mean is not None and self.margin is not None and abs(self.mean) > self.margin


@dataclass(frozen=True)
class Gains:
    """A method's gain over Local, taken apart (`polyfed.report.decomposition`)."""

    name: str
    gain: Gain
    alone: Gain
    federated: Gain
    way: float | None


def gains_of(setting: SettingResult) -> dict[str, Gains]:
    """Method -> its gains, of the methods that also ran alone, in the order of the rows; none without Local."""
    rows = {row.name: row for row in setting.rows}
    local = setting.row("local")
    if local is None:
        return {}
    pooled = rows["pooled"].by_seed if "pooled" in rows else {}
    found = {}
    for row in setting.methods:
        alone = rows.get(f"{row.name}-alone")
        if alone is not None and alone.control == "alone":
            found[row.name] = _gains(row, alone, local, pooled, setting.main_score)
    return found


def _gains(row: RowResult, alone: RowResult, local: RowResult, pooled: BySeed, score: MainScore) -> Gains:
    parts = take_apart(row.by_seed, alone.by_seed, local.by_seed, pooled, score)
    return Gains(row.name, Gain.of(parts.gain), Gain.of(parts.alone), Gain.of(parts.federated), parts.way)


def gain_over(other: RowResult, row: RowResult, score: MainScore) -> Gain:
    """How much better than another a row is, paired by seed."""
    better, worse = (other, row) if score.lower_is_better else (row, other)
    return Gain.of(paired_difference(better.by_seed, worse.by_seed))


def gain_between(setting: SettingResult, lower: str, upper: str) -> Gain | None:
    """How far the row `upper` lies above the row `lower`; None where either is lacking."""
    below = setting.row(lower)
    above = setting.row(upper)
    return None if below is None or above is None else gain_over(below, above, setting.main_score)


def gain_text(gain: Gain | None, score: MainScore) -> str:
    """For a table: "+2.39 [+1.02, +3.76]", without an interval "+2.39", not known "-"."""
    if gain is None or gain.mean is None:
        return "-"
    told = scored(gain.mean, score, "+")
    return told if gain.margin is None else f"{told} {interval(gain.mean, gain.margin, '+', score)}"
