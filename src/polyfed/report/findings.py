"""The result of a comparison in words: which method leads, and whether that is more than chance.

A difference is distinguishable where the 95 % interval of its mean over seeds (`polyfed.report.statistics`) leaves out
zero. Below `SEEDS` seeds nothing is claimed. Each interval is of one difference, and does not allow for the choice of
the best among many.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyfed.report.comparison_rows import ComparisonRow
from polyfed.report.statistics import SEEDS, Paired, is_distinguishable
from polyfed.report.text_tables import interval, scored
from polyfed.results.main_score import ACCURACY, MainScore

__all__ = ["finding"]

_NAMED = 4  # methods told by name; of more, how many
_NUMBERS = {1: "one seed", 2: "two seeds"}


def finding(rows: Sequence[ComparisonRow], score: MainScore = ACCURACY) -> str:
    """One or two sentences: who leads, by how much, and what may be claimed of it. score: the main score."""
    lost = [row for row in rows if row.nothing_learnt]
    known = [row for row in rows if row.accuracy is not None and row not in lost and not row.control]
    if not known:
        return "Nothing was learnt." if lost else f"No {score.title} is known."
    warning = f" Nothing was learnt by {', '.join(row.name for row in lost)}." if lost else ""
    return f"{_compared(known, score)}{warning}"


def _best(rows: Sequence[ComparisonRow], score: MainScore) -> ComparisonRow:
    """The first of equals."""
    best = score.best(row.accuracy for row in rows if row.accuracy is not None)
    return next(row for row in rows if row.accuracy == best)


def _level(row: ComparisonRow, score: MainScore) -> str:
    """``"75.12 %"``, ``"RMSE 53.47"``."""
    value = scored(row.accuracy, score)
    return f"{value} %" if score.is_share else f"{score.title} {value}"


def _compared(known: Sequence[ComparisonRow], score: MainScore) -> str:
    """The finding on rows whose main score is known, and was learnt."""
    leader = _best(known, score)
    if len(known) == 1:
        return f"{leader.name} reaches {_level(leader, score)}; there is no other method to compare it with."
    alone = [row for row in known if row.method == "local"]
    if len(alone) != 1:
        return f"{_leads(leader, score)}, {_from_rival(leader, score)}"
    local = alone[0]
    others = [row for row in known if row is not local]
    named = leader
    level = f"({scored(local.accuracy, score)}{score.unit})"
    if leader.difference_seeds and leader.seeds != local.seeds:
        level = "on the seeds that both have"
    told = f"{_leads(leader, score)}, {_points(leader.difference, score)} Local {level}"
    if leader is local:
        named = _best(others, score)
        side = "below" if score.lower_is_better else "above"
        told = f"{_leads(local, score)}: no method is {side} it. {named.name} comes next"
        told += f", {_points(named.difference, score)} it"
    return f"{told}{_claim(_to_local(named), 'Local', score)}{_told_apart(others, named)}"


def _leads(row: ComparisonRow, score: MainScore) -> str:
    return f"{row.name} leads with {_level(row, score)}"


def _points(difference: float | None, score: MainScore) -> str:
    """``"3.40 points above"``."""
    if difference is None:
        return "at an unknown distance from"
    side = "above" if difference >= 0 else "below"
    return f"{score.text(abs(difference))}{' points' if score.is_share else ''} {side}"


def _to_local(row: ComparisonRow) -> Paired:
    return Paired(row.difference_seeds, row.difference, row.difference_std, row.difference_margin)


def _from_rival(leader: ComparisonRow, score: MainScore) -> str:
    distance = _points(leader.against_rival.mean, score)
    return f"{distance} {leader.rival}{_claim(leader.against_rival, leader.rival, score)}"


def _claim(difference: Paired, other: str, score: MainScore) -> str:
    """What may be said of a difference, as the end of a sentence."""
    seeds = len(difference.seeds)
    if seeds == 0:
        return "; the two share no seed, so that nothing can be claimed."
    if seeds < SEEDS:
        return f". With {_NUMBERS[seeds]} nothing can be claimed: it takes three to tell a difference from chance."
    sure = is_distinguishable(difference)
    if sure is None:
        return "; how much of that is chance is not known."
    said = "distinguishable" if sure else "not distinguishable"
    points = " points" if score.is_share else ""
    return f"; over {seeds} seeds this is {said} from {other} (95 % interval {_range(difference, score)}{points})."


def _range(difference: Paired, score: MainScore) -> str:
    return interval(difference.mean, difference.margin, "+", score).strip("[]").replace(",", " to")


def _told_apart(others: Sequence[ComparisonRow], named: ComparisonRow) -> str:
    """Which methods differ from Local beside the one that was named; nothing where none does."""
    found = [row for row in others if row is not named and is_distinguishable(_to_local(row))]
    if not found:
        return ""
    start = "Also distinguishable" if is_distinguishable(_to_local(named)) else "Distinguishable"
    sides = [(row.name, "above" if (row.difference or 0.0) > 0 else "below") for row in found]
    if len(sides) <= _NAMED:
        return f" {start} from Local: {', '.join(f'{name} ({side})' for name, side in sides)}."
    above = sum(side == "above" for _, side in sides)
    return f" {start} from Local: {len(sides)} others, {above} above and {len(sides) - above} below."
