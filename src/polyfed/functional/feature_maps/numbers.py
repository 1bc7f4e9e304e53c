"""Random projections: features of numbers (F,), as of a table's row.

ReLU of a random projection plus a bias; categories are one-hot (Rahimi and Recht, "Random features for large-scale
kernel machines", NeurIPS 2007).

Shapes: N rows, D features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_BIAS = 0.25  # standard deviation of a bias


def draw_projection(
    numbers: int, features: int, generator: torch.Generator, categories: Sequence[int]
) -> dict[str, Tensor]:
    """With categories, `column` says of each projected number what column it is of, `category` which one, -1: none."""
    counts = torch.tensor(categories or [0] * numbers)
    columns = counts.clamp(min=1)
    width = int(columns.sum())
    projection = torch.randn(width, features, generator=generator) / math.sqrt(width)
    drawn = {"projection": projection, "bias": _BIAS * torch.randn(features, generator=generator)}
    if not counts.any():
        return drawn
    column = torch.arange(len(counts)).repeat_interleave(columns)
    category = torch.cat([torch.arange(count) if count else torch.tensor([-1]) for count in counts.tolist()])
    return {**drawn, "column": column, "category": category, "last": counts[column] - 1}


def project(drawn: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The features (N, D) of rows."""
    x = x.flatten(1)
    if "category" in drawn:
        x = x[:, drawn["column"]]
        is_it = torch.minimum(x.long().clamp(min=0), drawn["last"]) == drawn["category"]
        x = torch.where(drawn["category"] < 0, x, is_it.to(x.dtype))
    return torch.relu(x @ drawn["projection"] + drawn["bias"])
