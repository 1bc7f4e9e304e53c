"""Which rows a network was trained on, guessed from its losses, and how good a guess is.

Loss threshold (Yeom, Giacomelli, Fredrikson, Jha, CSF 2018): a row of small loss is called a member.

Shapes: N rows, C classes. A higher score means "member"; `member` (N,) is True for those that are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from polyfed.functional.metrics import ranks

_Z95 = 1.959963984540054  # two-sided 95 %


class Interval(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


def loss_scores(logits: Tensor, y: Tensor) -> Tensor:
    """Minus the cross entropy of each row, (N,) float64: the higher, the likelier a member (Yeom et al.)."""
    return -functional.cross_entropy(logits.double(), y, reduction="none")


def auc(scores: Tensor, member: Tensor) -> Interval:
    """The area under the ROC curve, ties counting half, with DeLong's 95 % interval, kept within [0, 1].

    Where DeLong's variance is 0 or unknown (no errors at all, or a side of a single row), the interval reaches
    1 / (rows of the smaller side + 1) to either side.

    Raises:
        ValueError: no member, or nobody else.

    Source: DeLong, DeLong, Clarke-Pearson, Biometrics 44(3), 1988.
    """
    _check(member)
    of = int(member.sum())
    others = int((~member).sum())
    places = ranks(scores)
    above = (places[member] - ranks(scores[member])) / others  # share of the others that each member beats
    below = (places[~member] - ranks(scores[~member])) / of  # share of the members that are below each other row
    value = float(above.mean())
    known = min(of, others) > 1
    error = math.sqrt(float(above.var()) / of + float(below.var()) / others) if known else 0.0
    margin = _Z95 * error or 1 / (min(of, others) + 1)
    return Interval(value, max(0.0, value - margin), min(1.0, value + margin))


def tpr_at_fpr(scores: Tensor, member: Tensor, fpr: float) -> Interval | None:
    """The true positive rate where at most the share `fpr` of the others is called a member; Wilson's 95 % interval.

    The interval is that of the members' share; the threshold counts as given.

    Returns:
        None where there are too few others for such a rate: fewer than 1 / fpr.

    Raises:
        ValueError: no member, or nobody else.
    """
    _check(member)
    others = scores[~member].sort(descending=True).values
    allowed = math.floor(fpr * len(others) + 1e-9)
    if allowed < 1:
        return None
    from scipy.stats import binomtest  # comes with scikit-learn; takes a second

    threshold = others[allowed] if allowed < len(others) else torch.tensor(-math.inf, dtype=others.dtype)
    mine = scores[member]
    count = int((mine > threshold).sum())
    interval = binomtest(count, len(mine)).proportion_ci(method="wilson")
    return Interval(count / len(mine), float(interval.low), float(interval.high))


def _check(member: Tensor) -> None:
    if not bool(member.any()) or bool(member.all()):
        raise ValueError("expected members and others, got one of them alone")
