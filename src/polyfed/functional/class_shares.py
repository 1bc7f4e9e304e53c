"""Scores of a network for other shares of the classes than it was trained with."""

from __future__ import annotations

import torch
from torch import Tensor

LACKING = -1e4  # below all scores of a network; finite, so that a softmax of the others is


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
