"""What a classifier's counts and scores say: accuracy, balanced accuracy, F1, AUC, calibration error; of a regressor's
predictions RMSE, MAE and R2.

A class is averaged over only where it occurs: without a true sample it has no recall, and without a sample of another
class no AUC. Where nothing is left to average, the result is NaN.

Shapes: N samples, C classes, K sets of samples, such as those of K clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NO_PAIRS = torch.zeros((0, 3), dtype=torch.int32)  # see `class_pairs`


class ClassCounts(NamedTuple):
    """Of sets of samples, how often each class is the true one, the predicted one, and both: (K, C) int64 each."""

    true: Tensor
    predicted: Tensor
    right: Tensor


def class_counts(y: Tensor, predicted: Tensor, classes: int, sizes: Sequence[int] | None = None) -> ClassCounts:
    """Count the classes of K sets of samples that follow each other.

    Args:
        y, predicted: (N,) int64 class numbers, 0-based, on the CPU.
        classes: C; more columns are added where a number asks for them.
        sizes: of the sets; default: there is one.
    """
    count = 1 if sizes is None else len(sizes)
    if len(y):
        classes = max(classes, 1 + int(torch.maximum(y.max(), predicted.max())))
    if count > 1:  # every set counts in columns of its own
        first = classes * torch.arange(count).repeat_interleave(torch.tensor(sizes))
        y = first + y
        predicted = first + predicted
    counted = [places.bincount(minlength=count * classes) for places in (y, predicted, y[y == predicted])]
    return ClassCounts(*(each.view(count, classes) for each in counted))


def class_pairs(y: Tensor, predicted: Tensor) -> Tensor:
    """(M, 3) int32: each pair of a true and a predicted class that occurs, and how often it does."""
    pairs, counts = torch.stack([y, predicted], dim=1).unique(dim=0, return_counts=True)
    return torch.cat([pairs, counts[:, None]], dim=1).int()


def confusion_matrix(pairs: Tensor, classes: int) -> Tensor:
    """How often each true class was taken for each class: (C, C) int64; rows are true, columns predicted classes."""
    true, predicted, counts = pairs.long().unbind(dim=1)
    whole = torch.zeros((classes, classes), dtype=torch.int64)
    whole[true, predicted] = counts
    return whole


def accuracy(counts: ClassCounts) -> Tensor:
    """(K,) float64: the share of samples that are right."""
    return counts.right.sum(dim=1).double() / counts.true.sum(dim=1)


def balanced_accuracy(counts: ClassCounts) -> Tensor:
    """(K,) float64: the mean recall of the classes that occur."""
    recalls = counts.right.double() / counts.true  # 0/0 for those that do not occur
    return recalls.nanmean(dim=1)


def f1(counts: ClassCounts) -> Tensor:
    """(K,) float64: the mean over the classes that occur of 2 TP / (2 TP + FP + FN)."""
    each = 2 * counts.right.double() / (counts.true + counts.predicted)
    return each.where(counts.true > 0, torch.nan).nanmean(dim=1)


def auc(scores: Tensor, y: Tensor) -> float:
    """Macro one-vs-rest area under the ROC curve, as a rank statistic of the classes' probabilities; ties count half.

    A class's area is the share of pairs (a sample of the class, another sample) in which the former is given the higher
    probability, the softmax of the scores. What is ranked is its log odds in double precision: the order is the same,
    and stays one where probabilities come out as 1. With two classes both areas are equal, the usual AUC.

    Args:
        scores: (N, K) of the classes 0..K-1; minus infinity rules a class out. y: (N,) int64.

    Returns:
        The mean over the classes of `y` that have a column and that not all samples are of; NaN where there is none,
        or where a row of scores gives no probabilities.
    """
    areas = []
    level = scores.double() - scores.double().max(dim=1, keepdim=True).values
    if bool(level.isnan().any()):
        return float("nan")
    for label in y.unique().tolist():
        mine = y == label
        of = int(mine.sum())
        others = int((~mine).sum())
        if others and label < scores.shape[1]:
            above = float(ranks(_log_odds(level, label))[mine].sum()) - of * (of + 1) / 2
            areas.append(above / (of * others))
    return sum(areas) / len(areas) if areas else float("nan")


def calibration_error(scores: Tensor, y: Tensor, bins: int = 15) -> float:
    """Expected calibration error (Guo et al., ICML 2017, equation 5), with bins of equal width.

    The confidence in a prediction is the softmax of its score. Over the bins ((b - 1) / bins, b / bins] of confidences,
    the mean of |share that is right - mean confidence|, weighted by the samples of each bin.

    Args:
        scores: (N, K) of the classes 0..K-1; minus infinity rules a class out. y: (N,) int64.

    Returns:
        In [0, 1]; NaN without samples, or where a row of scores gives no probabilities.
    """
    share = scores.double().softmax(dim=1)
    if len(y) == 0 or bool(share.isnan().any()):
        return float("nan")
    predicted = scores.argmax(dim=1)
    confidence = share.gather(1, predicted[:, None]).squeeze(1)
    place = ((confidence * bins).ceil().long() - 1).clamp(0, bins - 1)
    excess = (predicted == y).double() - confidence
    gap = torch.zeros(bins, dtype=torch.float64).index_add(0, place, excess)
    return float(gap.abs().sum()) / len(y)


def rmse(predicted: Tensor, y: Tensor) -> float:
    """Root of the mean squared error of numbers (N,), in the unit of y; NaN without samples."""
    return math.sqrt(float((predicted.double() - y.double()).square().mean())) if len(y) else math.nan


def mae(predicted: Tensor, y: Tensor) -> float:
    """Mean absolute error of numbers (N,), in the unit of y; NaN without samples.

    >>> mae(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0]))
    1.5
    """
    return float((predicted.double() - y.double()).abs().mean()) if len(y) else math.nan


def r2(predicted: Tensor, y: Tensor) -> float:
    """Coefficient of determination: 1 - sum (y - predicted)^2 / sum (y - mean of y)^2.

    At most 1; 0 for predicting the mean of y; NaN where y does not vary, or there is no sample.
    """
    y = y.double()
    spread = float((y - y.mean()).square().sum()) if len(y) else 0.0
    error = float((predicted.double() - y).square().sum())
    return 1 - error / spread if spread else math.nan


def _log_odds(scores: Tensor, label: int) -> Tensor:
    """(N,): the score of one class against all others; sorted, so that equal others have equal sums."""
    rest = torch.cat([scores[:, :label], scores[:, label + 1 :]], dim=1)
    odds: Tensor = scores[:, label] - rest.sort(dim=1).values.logsumexp(dim=1)
    return odds


def ranks(values: Tensor) -> Tensor:
    """The places (N,) of the values in ascending order, from 1; equal values share their mean place.

    >>> ranks(torch.tensor([0.5, 0.1, 0.5]))
    tensor([2.5000, 1.0000, 2.5000], dtype=torch.float64)
    """
    _, place, count = values.unique(sorted=True, return_inverse=True, return_counts=True)
    last = count.cumsum(dim=0).double()
    places: Tensor = (last - (count - 1) / 2)[place]
    return places
