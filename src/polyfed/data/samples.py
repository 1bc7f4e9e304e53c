"""Labelled samples: the one shape in which data reach a client.

Shapes: N samples; x is (N, C, H, W) for images, (N, ...) for anything else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.errors import RequestError


@dataclass(frozen=True)
class Samples:
    """Inputs as they are stored (uint8 images in 0..255, or float32) and int64 labels.

    Args:
        x: (N, ...) inputs; a model sees them only after `Prepare`.
        y: (N,) int64 class numbers, 0-based.

    Raises:
        RequestError: lengths differ, labels are not int64, or a float input is not finite.
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise RequestError(f"expected as many labels as inputs, came {len(self.y)} labels for {len(self.x)} inputs")
        if self.y.dtype != torch.int64 or self.y.dim() != 1:
            raise RequestError(
                f"expected labels of shape (N,) and type int64, came shape {tuple(self.y.shape)} of type {self.y.dtype}"
            )
        if self.x.is_floating_point() and not bool(torch.isfinite(self.x).all()):
            raise RequestError("expected finite inputs, came NaN or infinite values")

    def __len__(self) -> int:
        return len(self.y)

    def select(self, rows: Tensor) -> Samples:
        """The samples at `rows` ((M,) int64), copied into tensors of their own."""
        return Samples(self.x[rows], self.y[rows])

    def first(self, count: int | None) -> Samples:
        """The first `count` samples (all of them for None)."""
        return self if count is None else Samples(self.x[:count], self.y[:count])


@dataclass(frozen=True)
class ClientData:
    """One client's own rows; validation and test may be empty."""

    train: Samples
    validation: Samples
    test: Samples
