"""Scores as probabilities: a temperature for scores that are too far apart, and other shares of the classes.

Shapes: N rows, C classes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyfed.functional.closed_forms import log_posterior

USUAL = 0.5  # t where no rows say better
LACKING = -1e4  # below all scores of a network; finite, so that a softmax of the others is
_CANDIDATES = tuple(2 ** (-k / 4) for k in range(25))  # from 1 to 1/64


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
