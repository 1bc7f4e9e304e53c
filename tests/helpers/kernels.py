"""A factor of a mean of kernels in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from polyfed.functional.kernels import Factor, MeanKernelFactor


def kernel_factor(representations: Iterable[Tensor], weights: Sequence[float], **how: Any) -> Factor:
    """`MeanKernelFactor` of all of them, added one after the other."""
    stream = MeanKernelFactor(**how)
    for a_LD, weight in zip(representations, weights, strict=True):
        stream.add(a_LD, weight)
    return stream.result()
