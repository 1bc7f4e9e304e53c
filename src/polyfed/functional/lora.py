"""Low-rank adapters (LoRA: Hu et al., ICLR 2022).

The adapter of a linear layer with weight W (O, I) is A (r, I) and B (O, r); the layer computes with W + s B A, where
s = alpha / r. Its update is s B A = sum_j s b_j a_j over its r components, a_j a row of A and b_j a column of B.

Shapes: I inputs, O outputs, r rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Adapter(NamedTuple):
    """a: A (r, I). b: B (O, r). scale: s."""

    a: Tensor
    b: Tensor
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """r, the number of components."""
        return len(self.a)

    @property
    def scaled_b(self) -> Tensor:
        """B times s, in float64."""
        return self.b.double() * self.scale


def product(adapter: Adapter) -> Tensor:
    """The update s B A (O, I)."""
    return (adapter.scale * (adapter.b.double() @ adapter.a.double())).to(adapter.a.dtype)


def energy_beyond(update_OI: Tensor, rank: int) -> float:
    """Share of the sum of squares of the singular values beyond the first `rank`; 0 for an update of zero."""
    smaller = update_OI.double() if len(update_OI) <= update_OI.shape[1] else update_OI.double().T
    # With the vectors, unused: without, PyTorch rounds otherwise when a mode, as one that counts operations, is on.
    values, _ = torch.linalg.eigh(smaller @ smaller.T)
    energy = values.clamp(min=0).flip(0)  # squares of singular values, falling
    total = float(energy.sum())
    return float(energy[rank:].sum()) / total if total else 0.0
