"""Rows of features by class, of which sums are taken."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

CLASSES = 4


def rows(count: int = 90, width: int = 6) -> tuple[Tensor, Tensor]:
    """Features of a mean by class, and classes 0, 1 and 3: nobody has a row of class 2."""
    draws = torch.Generator().manual_seed(0)
    y = torch.tensor([0, 1, 3, 3])[torch.randint(4, (count,), generator=draws)]
    means = torch.randn(CLASSES, width, generator=draws)
    return means[y] + torch.randn(count, width, generator=draws), y


def near(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Whether two sums are equal but for rounding."""
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-9)


PHI, Y = rows()
