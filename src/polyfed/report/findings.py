"""The result of a comparison in words: which method leads, and whether that is more than chance.

A difference is distinguishable where the 95 % interval of its mean over seeds (`polyfed.report.statistics`) leaves out
zero. Below `SEEDS` seeds nothing is claimed. Each interval is of one difference, and does not allow for the choice of
the best among many.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyfed.report.comparison_rows import ComparisonRow
from polyfed.report.statistics import SEEDS, Paired, is_distinguishable
from polyfed.report.text_tables import interval, percent

__all__ = ["finding"]

_NAMED = 4  # methods told by name; of more, how many
_NUMBERS = {1: "one seed", 2: "two seeds"}


def finding(rows: Sequence[ComparisonRow]) -> str:
    """One or two sentences: who leads, by how much, and what may be claimed of it."""
    lost = [row for row in rows if row.nothing_learnt]
    known = [row for row in rows if row.accuracy is not None and row not in lost and not row.control]
    if not known:
        return "Nothing was learnt." if lost else "No accuracy is known."
    warning = f" Nothing was learnt by {', '.join(row.name for row in lost)}." if lost else ""
    return f"{_compared(known)}{warning}"


def _compared(known: Sequence[ComparisonRow]) -> str:
    """The finding on rows whose accuracy is known, and was learnt."""
    leader = max(known, key=lambda row: row.accuracy or 0.0)  # the first of equals
    if len(known) == 1:
        return f"{leader.name} reaches {percent(leader.accuracy)} %; there is no other method to compare it with."
    alone = [row for row in known if row.method == "local"]
    if len(alone) != 1:
        return f"{_leads(leader)}, {_from_rival(leader)}"
    local = alone[0]
    others = [row for row in known if row is not local]
    named = leader
    level = f"({percent(local.accuracy)} %)"
    if leader.difference_seeds and leader.seeds != local.seeds:
        level = "on the seeds that both have"
    told = f"{_leads(leader)}, {_points(leader.difference)} Local {level}"
    if leader is local:
        named = max(others, key=lambda row: row.accuracy or 0.0)
        told = f"{_leads(local)}: no method is above it. {named.name} comes next, {_points(named.difference)} it"
    return f"{told}{_claim(_to_local(named), 'Local')}{_told_apart(others, named)}"


def _leads(row: ComparisonRow) -> str:
    return f"{row.name} leads with {percent(row.accuracy)} %"


def _points(difference: float | None) -> str:
    """``"3.40 points above"``."""
    if difference is None:
        return "at an unknown distance from"
    return f"{abs(100 * difference):.2f} points {'above' if difference >= 0 else 'below'}"


def _to_local(row: ComparisonRow) -> Paired:
    return Paired(row.difference_seeds, row.difference, row.difference_std, row.difference_margin)


def _from_rival(leader: ComparisonRow) -> str:
    return f"{_points(leader.against_rival.mean)} {leader.rival}{_claim(leader.against_rival, leader.rival)}"


def _claim(difference: Paired, other: str) -> str:
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
    return f"; over {seeds} seeds this is {said} from {other} (95 % interval {_range(difference)} points)."


def _range(difference: Paired) -> str:
    return interval(difference.mean, difference.margin, "+").strip("[]").replace(",", " to")


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
