"""Low-rank adapters (LoRA) and the rules that join those of several clients, whose ranks may differ.

The adapter of a linear layer with weight W (O, I) is A (r, I) and B (O, r); the layer computes with W + s B A, where
s = alpha / r. Its update is s B A = sum_j s b_j a_j over its r components, a_j a row of A and b_j a column of B.

    rule      result                                                             exact: the weighted mean of s_k B_k A_k
    pad       means of s_k B_k and of A_k, smaller adapters filled up with zeros  no
    slices    means of s_k b_kj and of a_kj, over the clients with component j   no
    svd       the mean's largest singular values and vectors                     within the rank
    stack     the components of all clients beside each other                    yes

Weights are normalized to sum 1. Sums are taken in float64. Results have s = 1 and the dtype of the adapters.
Sources: Hu et al. (LoRA), ICLR 2022; Cho et al. (HETLoRA, pad), EMNLP 2024; Wu et al. (raFLoRA, slices),
arXiv:2602.13486; Bai et al. (FlexLoRA, svd), NeurIPS 2024; Wang et al. (FLoRA, stack), NeurIPS 2024.

Shapes: I inputs, O outputs, r rank, R the largest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyfed.functional.averaging import normalize


class Adapter(NamedTuple):
    """a: A (r, I). b: B (O, r). scale: s."""

    a: Tensor
    b: Tensor
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """r, the number of components."""
        return len(self.a)


def product(adapter: Adapter) -> Tensor:
    """The update s B A (O, I)."""
    return (adapter.scale * (adapter.b.double() @ adapter.a.double())).to(adapter.a.dtype)


def pad(adapters: Sequence[Adapter], weights: Sequence[float], rank: int | None = None) -> Adapter:
    """A = sum_k p_k A_k and B = sum_k p_k s_k B_k, after components of zero were added up to `rank`, or the largest."""
    wanted = max(adapter.rank for adapter in adapters) if rank is None else rank
    wide = [_widened(adapter, wanted) for adapter in adapters]
    shares = normalize(weights)
    dtype = adapters[0].a.dtype
    a = _sum([one.a for one in wide], shares)
    b = _sum([_scaled_b(one) for one in wide], shares)
    return Adapter(a.to(dtype), b.to(dtype))


def mean_components(adapters: Sequence[Adapter], weights: Sequence[float], common: Adapter) -> Adapter:
    """Component by component the means of s_k b_kj and of a_kj, over the clients with more than j components.

    common: of scale 1; its components stay where nobody has one.
    """
    a = common.a.clone()
    b = common.b.clone()
    for component in range(common.rank):
        held = [k for k, adapter in enumerate(adapters) if component < adapter.rank]
        if not held:
            continue
        shares = normalize([weights[k] for k in held])
        a[component] = _sum([adapters[k].a[component] for k in held], shares)
        b[:, component] = _sum([_scaled_b(adapters[k])[:, component] for k in held], shares)
    return Adapter(a, b)


def stack(adapters: Sequence[Adapter], weights: Sequence[float]) -> Adapter:
    """All components beside each other, those of client k times p_k s_k: its product is the mean of the updates."""
    shares = normalize(weights)
    b = [share * _scaled_b(adapter) for adapter, share in zip(adapters, shares, strict=True)]
    dtype = adapters[0].a.dtype
    return Adapter(torch.cat([adapter.a for adapter in adapters]), torch.cat(b, dim=1).to(dtype))


def decompose(update_OI: Tensor, rank: int) -> Adapter:
    """The closest update of a rank: A = V^T and B = U diag(s) of the largest singular values, in falling order.

    The error in the Frobenius norm is the root of the sum of squares of the other singular values.

    Args:
        rank: at least 1; what is above min(O, I) is filled up with components of zero.
    """
    left, values, right = torch.linalg.svd(update_OI.double(), full_matrices=False)
    kept = min(rank, len(values))
    closest = Adapter(right[:kept].to(update_OI.dtype), (left[:, :kept] * values[:kept]).to(update_OI.dtype))
    return _widened(closest, rank)


def rescale(adapter: Adapter, scale: float) -> Adapter:
    """The same update with another s: B changes."""
    return Adapter(adapter.a, (_scaled_b(adapter) / scale).to(adapter.b.dtype), scale)


def first_components(adapter: Adapter, rank: int) -> Adapter:
    """The first `rank` components; all where there are fewer."""
    return Adapter(adapter.a[:rank], adapter.b[:, :rank], adapter.scale)


def energy_beyond(update_OI: Tensor, rank: int) -> float:
    """Share of the sum of squares of the singular values beyond the first `rank`; 0 for an update of zero."""
    smaller = update_OI.double() if len(update_OI) <= update_OI.shape[1] else update_OI.double().T
    # With the vectors, unused: without, PyTorch rounds otherwise when a mode, as one that counts operations, is on.
    values, _ = torch.linalg.eigh(smaller @ smaller.T)
    energy = values.clamp(min=0).flip(0)  # squares of singular values, falling
    total = float(energy.sum())
    return float(energy[rank:].sum()) / total if total else 0.0


def _scaled_b(adapter: Adapter) -> Tensor:
    """B times s, in float64."""
    return adapter.b.double() * adapter.scale


def _widened(adapter: Adapter, rank: int) -> Adapter:
    """The adapter with components of zero behind its own."""
    missing = rank - adapter.rank
    if missing < 0:
        raise ValueError(f"expected an adapter of rank {rank} at most, got rank {adapter.rank}")
    a = torch.cat([adapter.a, adapter.a.new_zeros(missing, adapter.a.shape[1])])
    b = torch.cat([adapter.b, adapter.b.new_zeros(len(adapter.b), missing)], dim=1)
    return Adapter(a, b, adapter.scale)


def _sum(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor, share in zip(tensors, shares, strict=True):
        total += tensor.double() * share
    return total
