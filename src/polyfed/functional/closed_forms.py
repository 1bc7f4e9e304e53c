"""Linear models in closed form, from sums of rows (`class_statistics`): of classes, of numbers, and of counts of words;
and their scores as probabilities: a temperature for scores that are too far apart, and other shares of the classes.

All is float64. Shapes: N rows, D features, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from polyfed.functional.class_statistics import divisor, unpack, within

USUAL = 0.5  # t where no rows say better
LACKING = -1e4  # below all scores of a network; finite, so that a softmax of the others is
_CANDIDATES = tuple(2 ** (-k / 4) for k in range(25))  # from 1 to 1/64


def discriminant(sums: Mapping[str, Tensor], shrinkage: float) -> tuple[Tensor, Tensor]:
    """Linear discriminant analysis with one shrunk covariance for all classes, without the classes' shares.

    mu_c = M_c / n_c,  Sigma = (S - sum_c n_c mu_c mu_c') / N,  A = (1 - s) Sigma + s tr(Sigma) / D I;
    of class means alone, mu_kc = M_kc / n_kc of the K_c clients with rows of class c,
    Sigma = sum_c sum_k n_kc (mu_kc - mu_c)(mu_kc - mu_c)' / sum_c (K_c - 1), and I where each class is at one client;
    W = A^-1 mu',  b_c = - mu_c' W_c / 2;  the mean over classes is taken from both, which changes no difference of
    scores. Classes without rows are left out: they get zeros.

    W (D, C) and b (C,), of the sums of one row at least; s in (0, 1].

    Source: Friedman, "Regularized discriminant analysis", JASA 1989, with lambda = 1 and gamma = s.
    """
    counts = sums["counts"]
    known = counts > 0
    mu_CD = sums["sums"] / torch.where(known, counts, 1).double().unsqueeze(1)
    width = mu_CD.shape[1]
    most = divisor(sums)
    sigma_DD = within(sums) / most if most else torch.zeros(width, width, dtype=torch.float64)
    return discriminant_of(mu_CD, sigma_DD, known, shrinkage)


def discriminant_of(mean_CD: Tensor, covariance_DD: Tensor, known_C: Tensor, shrinkage: float) -> tuple[Tensor, Tensor]:
    """The same of classes' means and their covariance. known_C: which classes there are rows of."""
    mu_CD = mean_CD[known_C]
    w_DC = _solve(covariance_DD, mu_CD.T, shrinkage)
    b_C = -(mu_CD.T * w_DC).sum(dim=0) / 2
    weight_DC = torch.zeros(mean_CD.shape[1], len(known_C), dtype=torch.float64)
    bias_C = torch.zeros(len(known_C), dtype=torch.float64)
    weight_DC[:, known_C] = w_DC - w_DC.mean(dim=1, keepdim=True)
    bias_C[known_C] = b_C - b_C.mean()
    return weight_DC, bias_C


def ridge(sums: Mapping[str, Tensor], shrinkage: float) -> tuple[Tensor, Tensor]:
    """Ridge regression on centered rows: W = (Sigma + s / (1 - s) tr(Sigma) / D I)^-1 cov(phi, y),  b = mean y - mu' W.

    W (D, 1) and b (1,), of sums of numbers to predict; s in (0, 1).
    """
    rows = sums["counts"].sum().double()
    mean = sums["sums"][0] / rows
    second = unpack(sums["products"], len(mean)) / rows - torch.outer(mean, mean)
    return ridge_of(mean, second, shrinkage)


def ridge_of(mean_D: Tensor, covariance_DD: Tensor, shrinkage: float) -> tuple[Tensor, Tensor]:
    """The same of a mean and a covariance; the last of D is the number to predict."""
    width = len(mean_D) - 1
    weight_D1 = (1 - shrinkage) * _solve(covariance_DD[:width, :width], covariance_DD[:width, -1:], shrinkage)
    return weight_D1, mean_D[-1:] - mean_D[:width] @ weight_D1


def one_hot_ridge(sums: Mapping[str, Tensor], shrinkage: float) -> tuple[Tensor, Tensor]:
    """Ridge regression onto one-hot classes, without intercept.

    W = (S / N + s / (1 - s) tr(S / N) / D I)^-1 M' / N,  b = 0

    W (D, C) and b (C,), zeros for classes without rows; s in (0, 1).

    Source: He et al., "AFL: a single-round analytic approach for federated learning", CVPR 2025.
    """
    rows = sums["counts"].sum().double()
    second_DD = unpack(sums["products"], sums["sums"].shape[1]) / rows
    weight_DC = (1 - shrinkage) * _solve(second_DD, sums["sums"].T / rows, shrinkage)
    return weight_DC, torch.zeros(len(sums["counts"]), dtype=torch.float64)


def naive_bayes(sums: Mapping[str, Tensor], shrinkage: float) -> tuple[Tensor, Tensor]:
    """Multinomial naive Bayes of counts, without the classes' shares: W_vc = log p(v | c), b = 0.

    p(v | c) = (M_cv + a) / (sum_v M_cv + a D), a = s / (1 - s): at s = 1/2 every count is one more (Laplace).

    W (D, C) and b (C,), zeros for classes without rows; s in (0, 1).
    """
    known = sums["counts"] > 0
    added = shrinkage / (1 - shrinkage)
    raised_CD = sums["sums"] + added
    weight_DC = (raised_CD / raised_CD.sum(dim=1, keepdim=True)).log().T * known
    return weight_DC, torch.zeros(len(known), dtype=torch.float64)


def _solve(sigma_DD: Tensor, right: Tensor, shrinkage: float) -> Tensor:
    """A^-1 right; where no feature varies, by A = I."""
    width = len(sigma_DD)
    scale = sigma_DD.trace().clamp(min=0) / width
    if scale <= 0:
        return right
    shrunk_DD = (1 - shrinkage) * sigma_DD + shrinkage * scale * torch.eye(width, dtype=torch.float64)
    solved: Tensor = torch.linalg.solve(shrunk_DD, right)
    return solved


def log_posterior(scores_NC: Tensor, known_C: Tensor, prior_C: Tensor) -> Tensor:
    """Log probabilities of classes by linear scores and the classes' shares.

    Args:
        scores_NC: without shares. known_C: shares, or numbers, of the rows that the scores were made of. prior_C: those
            that count.

    Returns:
        (N, C); -inf for classes that one of both has no rows of. Where that is all of them, the shares are those of
        `known_C`.
    """
    usable_C = prior_C * (known_C > 0)
    usable_C = torch.where(usable_C.any(), usable_C, known_C)
    return torch.log_softmax(scores_NC + usable_C.to(scores_NC.dtype).log(), dim=1)


def fit_temperature(scores_NC: Tensor, y_N: Tensor, known_C: Tensor, prior_C: Tensor) -> float:
    """The temperature t, in (0, 1], by which scores are multiplied before the classes' shares are added.

    The largest sum_i log p(y_i | x_i, t) - log(t / t0)^2 / 2, t0 = 1/2, over t = 1, 2^(-1/4), ..., 1/64. The second
    term, a normal density of log t, decides where there are few rows. Rows of classes that cannot be predicted do not
    count.

    Args:
        scores_NC: of rows that the model has not seen, without shares. known_C, prior_C: as for `log_posterior`.

    Source: Guo et al., "On calibration of modern neural networks", ICML 2017, for the scores of a network.
    """
    predictable_C = torch.isfinite(log_posterior(scores_NC.new_zeros(1, scores_NC.shape[1]), known_C, prior_C)[0])
    counts = predictable_C[y_N]
    scores_NC, y_N = scores_NC[counts], y_N[counts]

    def badness(t: float) -> float:
        log_p_NC = log_posterior(t * scores_NC, known_C, prior_C)
        loss = -log_p_NC.gather(1, y_N.unsqueeze(1)).sum()
        return float(loss) + math.log(t / USUAL) ** 2 / 2

    return min(_CANDIDATES, key=badness)


def share_shift(own_C: Tensor, every_C: Tensor) -> Tensor:
    """log(pi_c / q_c) for each class (C,), to be added to scores: pi_c its share in `own_C`, q_c that in `every_C`.

    If scores are log p(y = c | x) where classes have the shares q, their sum with this is it, but for a constant, where
    they have the shares pi. A class of which there is nothing in `own_C` gets `LACKING`.

    Args:
        own_C, every_C: rows of each class; what `own_C` counts, `every_C` counts, too.

    >>> share_shift(torch.tensor([2, 2, 0]), torch.tensor([2, 6, 2])).exp()  # (1/2) / (1/5), (1/2) / (3/5)
    tensor([2.5000, 0.8333, 0.0000])
    """
    own = own_C.double() / own_C.sum()
    every = every_C.double() / every_C.sum()
    return torch.where(own_C > 0, (own / every).log(), LACKING).float()
