"""Which rows a network was trained on, guessed from its scores: ratios to shadow models, and how good a guess is.

Loss threshold (Yeom, Giacomelli, Fredrikson, Jha, CSF 2018): a row of small loss is called a member. LiRA (Carlini,
Chien, Nasr, Song, Terzis, Tramer, IEEE S&P 2022): the score of a row is compared with that of shadow models trained by
the attacker, with the row ("in") and without it ("out").

Shapes: N rows, C classes, S shadow models. A higher score means "member"; `member` (N,) is True for those that are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from polyfed.functional.metrics import ranks

_MANY = 64  # shadow models from which on each row has a spread of its own, as in LiRA's paper
_SMALLEST = 1e-6  # no spread is taken for smaller
_Z95 = 1.959963984540054  # two-sided 95 %


class Interval(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


def logit_of_true_class(logits: Tensor, y: Tensor) -> Tensor:
    """log(p / (1 - p)) of the true class of logits (N, C), p the softmax; steady where p comes out as 1. (N,) float64.

    Source: Carlini et al., section VI.A.
    """
    scores = logits.double()
    own = functional.one_hot(y, scores.shape[1]).bool()
    odds: Tensor = scores[own] - scores.masked_fill(own, -math.inf).logsumexp(dim=1)
    return odds


def loss_scores(logits: Tensor, y: Tensor) -> Tensor:
    """Minus the cross entropy of each row, (N,) float64: the higher, the likelier a member (Yeom et al.)."""
    return -functional.cross_entropy(logits.double(), y, reduction="none")


def likelihood_ratio(target: Tensor, shadows: Tensor, inside: Tensor) -> Tensor:
    """Online LiRA: log N(t; mu_in, sd_in) - log N(t; mu_out, sd_out), Gaussians fitted to the shadow models' scores.

    With fewer than 64 shadow models on a side the spread is common to all rows, as the paper advises: the root of the
    mean variance.

    Args:
        target: (N,) scores t of the attacked model. shadows: (S, N) of the shadow models.
        inside: (S, N) bool, whether the row was in the shadow model's training data.

    Raises:
        ValueError: a row has fewer than two shadow models on a side.
    """
    t = target.double()
    shadows = shadows.double()
    out_mean, out_sd = _fitted(shadows, ~inside)
    in_mean, in_sd = _fitted(shadows, inside)
    return _log_normal(t, in_mean, in_sd) - _log_normal(t, out_mean, out_sd)


def _fitted(shadows: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and spread of each row's scores, over the models that are `used` for it."""
    count = used.sum(dim=0)
    fewest = int(count.min()) if len(count) else 2
    if fewest < 2:
        raise ValueError(f"expected at least two shadow models for each row and side, got {fewest}")
    mean = shadows.where(used, 0.0).sum(dim=0) / count
    variance = (shadows - mean).square().where(used, 0.0).sum(dim=0) / (count - 1)
    spread = variance if fewest >= _MANY else variance.mean().expand_as(variance)
    return mean, spread.sqrt().clamp(min=_SMALLEST)


def _log_normal(t: Tensor, mean: Tensor, sd: Tensor) -> Tensor:
    """The Gaussian's log density, but for the constant."""
    return -0.5 * ((t - mean) / sd).square() - sd.log()


# how good a guess is ------------------------------------------------------------------------------------------------


def roc(scores: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    """False and true positive rates of all thresholds, from nobody (0, 0) to everybody (1, 1); equal scores together.

    Raises:
        ValueError: no member, or nobody else.
    """
    _check(member)
    _, place = scores.unique(sorted=True, return_inverse=True)
    levels = int(place.max()) + 1
    counts = (torch.bincount(place[who], minlength=levels).flip(0) for who in (member, ~member))
    hits, alarms = (count.cumsum(0).double() for count in counts)
    start = torch.zeros(1, dtype=torch.float64)
    return torch.cat([start, alarms / alarms[-1]]), torch.cat([start, hits / hits[-1]])


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
    threshold = others[allowed] if allowed < len(others) else torch.tensor(-math.inf, dtype=others.dtype)
    mine = scores[member]
    return wilson_interval(int((mine > threshold).sum()), len(mine))


def wilson_interval(count: int, total: int) -> Interval:
    """A share and its 95 % interval by Wilson's score.

    >>> [round(v, 3) for v in wilson_interval(0, 10)]
    [0.0, 0.0, 0.278]
    """
    share = count / total
    z2 = _Z95 * _Z95
    center = (share + z2 / (2 * total)) / (1 + z2 / total)
    margin = _Z95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return Interval(share, max(0.0, center - margin), min(1.0, center + margin))


def _check(member: Tensor) -> None:
    if not bool(member.any()) or bool(member.all()):
        raise ValueError("expected members and others, got one of them alone")
