"""What the figures of a benchmark answer: what are the others' data worth, and which differences are no chance?

In each setting the best row of those that need the other clients and the best of those that need nobody are picked by
their mean validation score over the scored seeds, never by test; their difference is what the others' data are worth
to today's methods. The primary comparisons are named before the runs; their p-values are adjusted for their number
(Holm, Scandinavian Journal of Statistics 1979).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from polyfed.records.main_score import MainScore
from polyfed.records.read import flat_table
from polyfed.report.benchmark_results import RowResult, SettingResult
from polyfed.report.findings import Gains, take_apart
from polyfed.report.statistics import Estimate, finite_ones, holm, mean_of

CLOSED_FORM = "closed-form"  # a linear model: neither a network of the one side nor of the other
# values of `control` by which uploads are of no use
_NEEDS_NOBODY = ("own", "uniform", "labels", "pseudo-labels", "permuted")


# gains of a setting -------------------------------------------------------------------------------------------------


def gains_of(setting: SettingResult) -> dict[str, Gains]:
    """Method -> its gains, of the methods that also ran alone, in the order of the rows; none without Local."""
    local = setting.row("local")
    if local is None:
        return {}
    row = setting.row("pooled-tuned")
    pooled = {} if row is None else row.by_seed
    found = {}
    for row in setting.methods:
        alone = setting.row(f"{row.name}-alone")
        if alone is not None and alone.control == "alone":
            found[row.name] = take_apart(row.by_seed, alone.by_seed, local.by_seed, pooled, setting.main_score)
    return found


def gain_between(setting: SettingResult, lower: str, upper: str) -> Estimate:
    """How far the row `upper` lies above the row `lower`, paired by seed; not known where either is lacking."""
    return _gain(setting, setting.row(lower), setting.row(upper))


# picked by validation -----------------------------------------------------------------------------------------------


class Side(NamedTuple):
    """The rows of a kind in a setting: how many, and the one with the best validation score.

    That is None where some row lacks such scores, as it could be the better one.
    """

    best: RowResult | None
    of: int


@dataclass(frozen=True)
class Worth:
    """What the others' data are worth in a setting.

    Attributes:
        federated: methods that send, as they are meant. without: rows that need nobody else: Local, methods
            alone, controls that make no use of uploads. pooled: networks trained on the rows of all.
        closed_form: mean test score of the closed form, a linear model; closed_form_alone: of each client's own.
        gain: the best federated row over the best one without the others. gain_of_pooled: that of the best pooled row.
    """

    setting: str
    score: MainScore
    federated: Side
    without: Side
    pooled: Side
    closed_form: float | None
    closed_form_alone: float | None
    gain: Estimate
    gain_of_pooled: Estimate


def worth_of(setting: SettingResult) -> Worth:
    """What the others' data are worth in a setting."""
    federated, without, pooled = (_pick(setting, side) for side in ("federated", "without", "pooled"))
    return Worth(
        setting.setting,
        setting.main_score,
        federated,
        without,
        pooled,
        _mean(setting.row(CLOSED_FORM)),
        _mean(setting.row(f"{CLOSED_FORM}-alone")),
        _gain(setting, without.best, federated.best),
        _gain(setting, without.best, pooled.best),
    )


def _side(row: RowResult) -> str:
    if row.method == CLOSED_FORM:
        return ""
    if row.control.startswith("pooled"):
        return "pooled"
    settings = flat_table(row.hyperparameters)
    ignores_uploads = any(key.split(".")[-1] == "control" and value in _NEEDS_NOBODY for key, value in settings.items())
    if row.control == "alone" or row.bytes_up == 0 or ignores_uploads:
        return "without"
    return "" if row.control else "federated"


def _pick(setting: SettingResult, side: str) -> Side:
    rows = [row for row in setting.rows if _side(row) == side]
    scores = finite_ones(mean_of([row.validation.get(str(seed)) for seed in setting.seeds]) for row in rows)
    if not rows or len(scores) < len(rows):
        return Side(None, len(rows))
    return Side(rows[scores.index(setting.main_score.best(scores))], len(rows))


def _gain(setting: SettingResult, lower: RowResult | None, upper: RowResult | None) -> Estimate:
    if lower is None or upper is None:
        return Estimate()
    return Estimate.gain(upper.by_seed, lower.by_seed, setting.main_score)


def _mean(row: RowResult | None) -> float | None:
    return None if row is None else mean_of(list(row.by_seed.values()))


# named before the runs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A primary comparison: how far one row lies above another one in a setting.

    Attributes:
        gain: its p-value is that of the paired t-test. adjusted: the same by Holm, over all primary comparisons that
            have one.
    """

    setting: str
    score: MainScore
    upper: str
    lower: str
    gain: Estimate
    adjusted: float | None


def comparisons(found: Sequence[SettingResult], primary: Sequence[Sequence[str]]) -> list[Comparison]:
    """The primary comparisons of the settings that have both rows. primary: pairs, the upper and the lower row."""
    gains = [
        (one, upper, lower, gain_between(one, lower, upper))
        for upper, lower in primary
        for one in found
        if one.row(upper) is not None and one.row(lower) is not None
    ]
    tested = {at: gain.p_value for at, (*_, gain) in enumerate(gains) if gain.p_value is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    return [
        Comparison(one.setting, one.main_score, upper, lower, gain, adjusted.get(at))
        for at, (one, upper, lower, gain) in enumerate(gains)
    ]
