"""Counts of words: features of ids (L,), whole numbers of which 0 is padding.

Shapes: N texts, V words.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PADDING = 0  # the id of no word


def count_words(x: Tensor, words: int) -> Tensor:
    """How often each id occurs, (N, V) floats; ids from V on share the counts of those below."""
    ids = x.flatten(1).long()
    rows = ids.shape[0]  # len(ids) would fix the number where it is exported
    counts = torch.zeros(rows, words, device=ids.device)
    return counts.scatter_add_(1, ids % words, (ids != _PADDING).float())
