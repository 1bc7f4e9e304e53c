"""A factor of a mean of kernels in one call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from polyfed.functional.kernels import Factor, MeanKernelFactor


def kernel_factor(representations: Iterable[Tensor], **how: Any) -> Factor:
    """`MeanKernelFactor` of all of them, added one after the other."""
    stream = MeanKernelFactor(**how)
    for a_LD in representations:
        stream.add(a_LD)
    return stream.result()
