"""Closed forms against scikit-learn and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed.functional.class_statistics import add, from_class_means, sum_rows
from polyfed.functional.closed_forms import discriminant, log_posterior, naive_bayes, one_hot_ridge, ridge
from tests.helpers.class_rows import CLASSES, PHI, Y


@pytest.mark.parametrize("shrinkage", [0.01, 0.3])
def test_the_discriminant_is_scikit_learns(shrinkage: float) -> None:
    """Its covariance is shrunk towards tr / D I class by class, which with the rows' own shares is the same."""
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    weight, bias = discriminant(sum_rows(PHI, Y, CLASSES), shrinkage)
    assert not weight[:, 2].any()
    assert not bias[2]
    torch.testing.assert_close(weight.sum(dim=1), torch.zeros(6).double())  # a mean that changes no difference is out
    assert float(bias.sum()) == pytest.approx(0)
    counts = Y.bincount(minlength=CLASSES)
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(PHI.double().numpy(), Y.numpy())
    found = log_posterior(PHI.double() @ weight + bias, counts, counts)
    assert found[:, [0, 1, 3]].numpy() == pytest.approx(theirs.predict_log_proba(PHI.double().numpy()), abs=1e-8)
    assert bool((found[:, 2] == -torch.inf).all())
    weight, bias = discriminant(sum_rows(0.01 * PHI, Y, CLASSES), shrinkage)  # of small features, too
    torch.testing.assert_close(log_posterior(0.01 * PHI.double() @ weight + bias, counts, counts), found)


def test_few_rows_and_rows_that_do_not_vary() -> None:
    """Fewer rows than features; one row for each class, where means are all that is known."""
    weight, bias = discriminant(sum_rows(PHI[:3], torch.tensor([0, 1, 3]), CLASSES), 0.1)
    scores = PHI[:3].double() @ weight + bias
    assert scores[:, [0, 1, 3]].argmax(dim=1).tolist() == [0, 1, 2]
    assert bool(torch.isfinite(discriminant(sum_rows(PHI[:1], Y[:1], CLASSES), 0.1)[0]).all())


def test_class_means_of_one_client_are_compared_by_distance() -> None:
    """Nothing tells how rows vary, and rounding is not taken for it."""
    weight, bias = discriminant(from_class_means(sum_rows(PHI, Y, CLASSES, products=False)), 0.1)
    known = [0, 1, 3]
    means = torch.stack([PHI[label == Y].double().mean(dim=0) for label in known])
    off = -torch.cdist(PHI.double(), means).square() / 2
    found = (PHI.double() @ weight + bias)[:, known]
    torch.testing.assert_close(found.diff(dim=1), off.diff(dim=1))


@pytest.mark.parametrize("shrinkage", [0.01, 0.3])
def test_numbers_are_fitted_by_ridge_regression(shrinkage: float) -> None:
    from sklearn.linear_model import Ridge

    y = PHI[:, 0] * 2 - PHI[:, 1] + 3
    centered = (PHI.double() - PHI.double().mean(0)).numpy()
    alpha = shrinkage / (1 - shrinkage) * float(np.square(centered).sum()) / PHI.shape[1]
    theirs = Ridge(alpha=alpha).fit(PHI.double().numpy(), y.double().numpy())
    weight, bias = ridge(add(sum_rows(PHI[:20], y[:20], 0), sum_rows(PHI[20:], y[20:], 0)), shrinkage)
    assert weight[:, 0].numpy() == pytest.approx(theirs.coef_, abs=1e-8)
    assert float(bias) == pytest.approx(theirs.intercept_, abs=1e-8)


def test_one_hot_classes_are_fitted_by_ridge_regression() -> None:
    from sklearn.linear_model import Ridge

    phi, one_hot = PHI.double().numpy(), np.eye(CLASSES)[Y.numpy()]
    alpha = 0.2 / 0.8 * float(np.square(phi).sum()) / PHI.shape[1]
    theirs = Ridge(alpha=alpha, fit_intercept=False).fit(phi, one_hot)
    weight, bias = one_hot_ridge(add(sum_rows(PHI[:20], Y[:20], CLASSES), sum_rows(PHI[20:], Y[20:], CLASSES)), 0.2)
    assert weight.T.numpy() == pytest.approx(theirs.coef_, abs=1e-8)
    assert not bias.any()


@pytest.mark.parametrize("shrinkage", [0.2, 0.5])
def test_counts_of_words_are_scikit_learns_naive_bayes(shrinkage: float) -> None:
    from sklearn.naive_bayes import MultinomialNB

    counts = torch.randint(5, PHI.shape, generator=torch.Generator().manual_seed(2)).float()
    sums = sum_rows(counts, Y, CLASSES, products=False)
    assert "products" not in sums
    weight, bias = naive_bayes(sums, shrinkage)
    torch.testing.assert_close(weight.exp().sum(dim=0)[[0, 1, 3]], torch.ones(3).double())
    assert not weight[:, 2].any()
    assert torch.equal(bias, torch.zeros(CLASSES).double())
    theirs = MultinomialNB(alpha=shrinkage / (1 - shrinkage)).fit(counts.numpy(), Y.numpy())
    found = log_posterior(counts.double() @ weight + bias, sums["counts"], sums["counts"])
    assert found[:, [0, 1, 3]].numpy() == pytest.approx(theirs.predict_log_proba(counts.numpy()), abs=1e-8)


def test_shares_of_classes_that_nobody_has_sent_do_not_count() -> None:
    scores = torch.zeros(1, 3)
    sent = torch.tensor([4, 4, 0])
    assert log_posterior(scores, sent, torch.tensor([3, 1, 9])).exp()[0].tolist() == pytest.approx([0.75, 0.25, 0])
    assert log_posterior(scores, sent, torch.tensor([0, 0, 9])).exp()[0].tolist() == pytest.approx([0.5, 0.5, 0])
