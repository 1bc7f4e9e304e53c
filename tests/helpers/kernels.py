"""Kernels of seeded representations in NumPy, with an explicit H; and a factor of a mean of kernels in one call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.functional.mean_kernel_factor import Factor, MeanKernelFactor


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rotation(d: int, seed: int = 0) -> Tensor:
    """An orthogonal matrix."""
    return torch.linalg.qr(draw(d, d, seed=seed)).Q


def numpy_centered(k: Any) -> Any:
    """H K H."""
    h = np.eye(len(k)) - np.ones((len(k), len(k))) / len(k)
    return h @ k @ h


def numpy_cka(k: Any, m: Any) -> float:
    """HSIC of two kernels over the root of those of each with itself."""
    kc, mc = numpy_centered(k), numpy_centered(m)
    return float(np.trace(kc @ mc) / (np.linalg.norm(kc) * np.linalg.norm(mc)))


def kernel_factor(representations: Iterable[Tensor], **how: Any) -> Factor:
    """`MeanKernelFactor` of all of them, added one after the other."""
    stream = MeanKernelFactor(**how)
    for a_LD in representations:
        stream.add(a_LD)
    return stream.result()
