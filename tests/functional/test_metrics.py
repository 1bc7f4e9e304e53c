"""Scores of a classifier against scikit-learn's, and what they say where there is nothing to average."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from polyfed.functional import metrics


def draw(n: int = 60, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(n, classes, generator=g), torch.randint(0, classes, (n,), generator=g)


def test_counts_and_shares_are_scikit_learns() -> None:
    from sklearn import metrics as sklearn

    scores, y = draw()
    predicted = scores.argmax(dim=1)
    pairs = metrics.class_pairs(y, predicted)
    assert metrics.confusion_matrix(pairs, 4).tolist() == sklearn.confusion_matrix(y, predicted).tolist()
    counts = metrics.class_counts(y, predicted, 4, [20, 40])
    for row, (some, taken) in enumerate(zip(y.split([20, 40]), predicted.split([20, 40]), strict=True)):
        assert metrics.accuracy(counts)[row] == pytest.approx(sklearn.accuracy_score(some, taken))
        assert metrics.balanced_accuracy(counts)[row] == pytest.approx(sklearn.balanced_accuracy_score(some, taken))
        assert metrics.f1(counts)[row] == pytest.approx(sklearn.f1_score(some, taken, average="macro"))


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_figures_of_many_sets_are_those_of_each_alone(classes: int) -> None:
    """Bit for bit: whom a client is scored with must not matter."""
    g = torch.Generator().manual_seed(classes)
    sizes = [1, 2, 7, 300, 40]
    y, predicted = torch.randint(0, classes, (2, sum(sizes)), generator=g)
    together = metrics.class_counts(y, predicted, classes, sizes)
    parts = zip(y.split(sizes), predicted.split(sizes), strict=True)
    alone = [metrics.class_counts(some, taken, classes) for some, taken in parts]
    for figure in (metrics.accuracy, metrics.balanced_accuracy, metrics.f1):
        assert figure(together).tolist() == [figure(counts).item() for counts in alone]


def test_classes_that_do_not_occur_are_not_averaged_over() -> None:
    y, predicted = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 3, 1, 1])
    counts = metrics.class_counts(y, predicted, 3)
    assert counts.true.shape == (1, 4)  # a number beyond the classes gets its column
    assert metrics.accuracy(counts) == metrics.balanced_accuracy(counts) == 0.75
    assert metrics.f1(counts) == pytest.approx((2 / 3 + 1) / 2)
    rare = metrics.class_counts(torch.tensor([0, 1, 1, 1, 1]), torch.tensor([0, 0, 1, 1, 1]), 2)
    assert metrics.f1(rare) == pytest.approx((2 / 3 + 6 / 7) / 2)  # one sample is enough
    nobody = metrics.class_counts(y[:0], y[:0], 3)
    for score in (metrics.accuracy, metrics.balanced_accuracy, metrics.f1):
        assert math.isnan(score(nobody))


@pytest.mark.parametrize("classes", [2, 4])
def test_auc_is_scikit_learns(classes: int) -> None:
    from sklearn import metrics as sklearn

    scores, y = draw(classes=classes)
    scores[:20] = scores[20:40]  # ties, between samples of different classes too
    shares = scores.double().softmax(dim=1)
    each = [sklearn.roc_auc_score(y == c, shares[:, c]) for c in range(classes)]
    assert metrics.auc(scores, y) == pytest.approx(np.mean(each), abs=1e-12)


def test_auc_counts_pairs_where_a_class_is_rare_or_unknown() -> None:
    scores = torch.tensor([[3.0, 0.0], [1.0, 0.0], [2.0, 0.0], [2.0, 0.0]])
    assert metrics.auc(scores, torch.tensor([0, 1, 0, 1])) == (3 + 0.5) / 4
    assert metrics.auc(scores, torch.tensor([0, 1, 2, 2])) == pytest.approx((1 + 1) / 2)  # class 2 has no column
    assert math.isnan(metrics.auc(scores, torch.tensor([0, 0, 0, 0])))
    scores[0] = math.nan
    assert math.isnan(metrics.auc(scores, torch.tensor([0, 1, 0, 1])))


def test_auc_tells_probabilities_apart_that_come_out_as_1() -> None:
    scores = torch.tensor([[500.0, 0.0], [400.0, 0.0], [300.0, 0.0], [200.0, 0.0]])
    assert metrics.auc(scores, torch.tensor([0, 0, 1, 1])) == 1.0
    assert metrics.auc(scores, torch.tensor([1, 1, 0, 0])) == 0.0


@pytest.mark.parametrize("bins", [1, 2, 5, 15])
def test_calibration_error_is_that_of_the_definition(bins: int) -> None:
    scores, _ = draw(200, 3)
    share = np.exp(scores.double().numpy())
    share /= share.sum(1, keepdims=True)
    doubtful = torch.from_numpy(share.max(1) < 0.5)  # right; the others wrong: gaps of both signs do not add up
    y = torch.where(doubtful, scores.argmax(1), (scores.argmax(1) + 1) % 3)
    confidence, right = share.max(1), share.argmax(1) == y.numpy()
    error = 0.0
    for b in range(1, bins + 1):
        inside = (confidence > (b - 1) / bins) & (confidence <= b / bins)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert metrics.calibration_error(scores, y, bins) == pytest.approx(error, abs=1e-12)


def test_calibration_error_of_certain_and_of_no_predictions() -> None:
    certain = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])
    assert metrics.calibration_error(certain, torch.tensor([0, 1])) == 0.0
    assert metrics.calibration_error(certain, torch.tensor([0, 0])) == 0.5
    assert math.isnan(metrics.calibration_error(certain[:0], torch.tensor([], dtype=torch.int64)))
    certain[0] = math.nan
    assert math.isnan(metrics.calibration_error(certain, torch.tensor([0, 1])))


def test_the_error_of_numbers_is_scikit_learns() -> None:
    from sklearn import metrics as sklearn

    g = torch.Generator().manual_seed(3)
    y, predicted = (20 * torch.randn(50, generator=g) - 3 for _ in range(2))
    assert metrics.rmse(predicted, y) == pytest.approx(sklearn.root_mean_squared_error(y, predicted))
    assert metrics.r2(predicted, y) == pytest.approx(sklearn.r2_score(y, predicted))
    assert metrics.r2(predicted, y) < 0  # worse than the mean
    assert metrics.r2(y.mean().expand(50), y) == pytest.approx(0, abs=1e-6)
    assert metrics.rmse(y, y) == 0
    assert metrics.r2(y, y) == 1


def test_what_does_not_vary_has_no_r2() -> None:
    same = torch.tensor([2.0, 2.0])
    assert math.isnan(metrics.r2(torch.tensor([1.0, 3.0]), same))
    assert math.isnan(metrics.r2(same[:0], same[:0]))
    assert math.isnan(metrics.rmse(same[:0], same[:0]))
    assert metrics.rmse(torch.tensor([1.0, 3.0]), same) == 1
