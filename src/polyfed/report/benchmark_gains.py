"""The gains of a setting's methods over Local, taken apart: of the seeds' accuracies that its figures hold."""

from __future__ import annotations

from polyfed.report.benchmark_results import SettingResult
from polyfed.report.decomposition import GainParts, gain_over, take_apart
from polyfed.report.statistics import Paired
from polyfed.report.text_tables import interval, scored
from polyfed.results.main_score import MainScore

__all__ = ["gain_between", "gain_text", "gains_of"]


def gains_of(setting: SettingResult) -> dict[str, GainParts]:
    """Method -> its gains, of the methods that also ran alone, in the order of the rows; none without Local."""
    local = setting.row("local")
    if local is None:
        return {}
    pooled = setting.row("pooled")
    ceiling = {} if pooled is None else pooled.by_seed
    found = {}
    for row in setting.methods:
        alone = setting.row(f"{row.name}-alone")
        if alone is not None and alone.control == "alone":
            found[row.name] = take_apart(row.by_seed, alone.by_seed, local.by_seed, ceiling, setting.main_score)
    return found


def gain_between(setting: SettingResult, lower: str, upper: str) -> Paired | None:
    """How far the row `upper` lies above the row `lower`, paired by seed; None where either is lacking."""
    below = setting.row(lower)
    above = setting.row(upper)
    return None if below is None or above is None else gain_over(above.by_seed, below.by_seed, setting.main_score)


def gain_text(gain: Paired | None, score: MainScore) -> str:
    """For a table: "+2.39 [+1.02, +3.76]", without an interval "+2.39", not known "-"."""
    if gain is None or gain.mean is None:
        return "-"
    told = scored(gain.mean, score, "+")
    return told if gain.margin is None else f"{told} {interval(gain.mean, gain.margin, '+', score)}"
