"""Which words occur: features of ids (L,), whole numbers of which 0 is padding.

A word counts once however often it occurs, as whether it does tells more of a short text (Wang and Manning, "Baselines
and bigrams", ACL 2012).

Shapes: N texts, V words.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PADDING = 0  # the id of no word


def find_words(x: Tensor, words: int) -> Tensor:
    """Whether each id occurs, (N, V) floats, 0 or 1; ids from V on share the places of those below."""
    ids = x.flatten(1).long()
    rows = ids.shape[0]  # len(ids) would fix the number where it is exported
    counts = torch.zeros(rows, words, device=ids.device)
    return counts.scatter_add_(1, ids % words, (ids != _PADDING).float()).clamp_(max=1)
