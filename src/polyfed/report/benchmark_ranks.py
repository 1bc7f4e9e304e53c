"""Methods ranked over settings: mean ranks, Friedman's test, Nemenyi's critical difference (Demsar, JMLR 2006)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Ranking", "rank"]

LEVEL = 0.95
_METHODS = 3  # fewer have no Friedman test
_SETTINGS = 2


@dataclass(frozen=True)
class Ranking:
    """Methods by mean rank, best first.

    Attributes:
        settings: those ranked over, in which every method has a score.
        left_out: settings that have less than half as many methods as the one with most, such as one just begun: they
            would leave few methods to be ranked.
        ranks: method -> its rank in each setting, 1 the best; ties share the mean of theirs.
        p_value: of Friedman's test, corrected for ties, that all methods are equal; None with fewer than three methods
            or two settings, and where all are equal throughout.
        critical_difference: mean ranks that differ by less cannot be told apart (95 %, Nemenyi); None with so few.
        unranked: method -> the settings that lack it, of methods without a rank.
    """

    settings: tuple[str, ...]
    left_out: tuple[str, ...]
    ranks: Mapping[str, tuple[float, ...]]
    p_value: float | None
    critical_difference: float | None
    unranked: Mapping[str, tuple[str, ...]]

    def mean(self, method: str) -> float:
        """A method's mean rank."""
        found = self.ranks[method]
        return sum(found) / len(found)


def rank(scores: Mapping[str, Mapping[str, float]]) -> Ranking:
    """Rank methods in each setting, and over all.

    Args:
        scores: setting -> method -> mean score, the higher the better. Methods that a setting lacks have no rank.
    """
    from scipy.stats import friedmanchisquare, rankdata, studentized_range  # comes with scikit-learn

    most = max(map(len, scores.values()), default=0)
    settings = [name for name, found in scores.items() if found and 2 * len(found) >= most]
    left_out = tuple(name for name, found in scores.items() if found and name not in settings)
    lacking = {method: tuple(name for name in settings if method not in scores[name]) for method in _all(scores)}
    everywhere = [method for method, without in lacking.items() if not without]
    unranked = {method: without for method, without in lacking.items() if without}
    columns = {name: rankdata([-scores[name][method] for method in everywhere]) for name in settings}
    ranks = {m: tuple(float(columns[name][at]) for name in settings) for at, m in enumerate(everywhere)}
    ordered = dict(sorted(ranks.items(), key=lambda item: sum(item[1])))
    if len(everywhere) < _METHODS or len(settings) < _SETTINGS:
        return Ranking(tuple(settings), left_out, ordered, None, None, unranked)
    p_value = None  # where all are equal in every setting
    if any(len(set(column)) > 1 for column in columns.values()):
        by_method = ([scores[name][method] for name in settings] for method in everywhere)
        p_value = float(friedmanchisquare(*by_method).pvalue)
    methods = len(everywhere)
    quantile = float(studentized_range.ppf(LEVEL, methods, math.inf)) / math.sqrt(2)
    critical = quantile * math.sqrt(methods * (methods + 1) / (6 * len(settings)))
    return Ranking(tuple(settings), left_out, ordered, p_value, critical, unranked)


def _all(scores: Mapping[str, Mapping[str, float]]) -> Sequence[str]:
    return [method for found in scores.values() for method in found]
