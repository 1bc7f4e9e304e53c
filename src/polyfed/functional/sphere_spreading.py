"""Directions pushed apart on the unit sphere, like equal charges (the Thomson problem).

Shapes: S rows, D numbers of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LR = 0.1
_DECAY = 0.95  # of the step size, after step 1, 11, 21, ...
_MOMENTUM = 0.9
_NEAREST = 1e-10  # the least squared distance, where two rows coincide


def spread(rows_SD: Tensor, steps: int) -> Tensor:
    """Rows of length 1, pushed apart in so many steps of gradient descent with momentum, in float64.

    With p = row / ||row||, the force on p_i is sum over j != i of (p_i - p_j) / ||p_i - p_j||^2, which lowers the
    energy -sum over pairs of log ||p_i - p_j||;  v <- 0.9 v + lr force,  p <- (p + v) / ||p + v||.  lr is 0.1, times
    0.95 after every tenth step. Up to D + 1 rows end at equal angles, all cosines -1 / (S - 1).

    Args:
        rows_SD: at least one. steps: 0 only brings the rows to length 1; a row of zeros has none.

    Returns:
        (S, D), of the type of `rows_SD`.

    Raises:
        ValueError: there are no rows.

    Source: Lee, Shin and Choi (ProtoNorm), arXiv:2507.04310, prototype alignment; the step sizes are the authors'
    code's.

    >>> round(float(spread(torch.tensor([[3.0, 1.0], [1.0, 1.0]]), 200).prod(0).sum()), 4)  # opposite directions
    -1.0
    """
    if rows_SD.dim() != 2 or not len(rows_SD):
        raise ValueError(f"expected rows (S, D) of S > 0, got {tuple(rows_SD.shape)}")
    p_SD = F.normalize(rows_SD.double(), dim=1)
    v_SD = torch.zeros_like(p_SD)
    lr = _LR
    for step in range(steps):
        v_SD = _MOMENTUM * v_SD + lr * _force(p_SD)
        p_SD = F.normalize(p_SD + v_SD, dim=1)
        if step % 10 == 0:
            lr *= _DECAY
    return p_SD.to(rows_SD.dtype)


def _force(p_SD: Tensor) -> Tensor:
    """Sum over j != i of (p_i - p_j) / ||p_i - p_j||^2, for each i."""
    squared_SS = (2 - 2 * p_SD @ p_SD.T).clamp(min=_NEAREST)
    inverse_SS = (1 / squared_SS).fill_diagonal_(0)
    return inverse_SS.sum(dim=1, keepdim=True) * p_SD - inverse_SS @ p_SD
