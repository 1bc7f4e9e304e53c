"""How sure a model of classes may be: a temperature for scores that order the classes rightly and are too far apart.

Shapes: N rows, C classes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyfed.functional.closed_forms import log_posterior

USUAL = 0.5  # t where no rows say better
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
