"""Mixing one model with others by how much better they do (FedFomo)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_SAME = 1e-12  # models nearer than this are one model


def model_gains(loss: float, losses: Sequence[float], distances: Sequence[float]) -> Tensor:
    """delta_n = (L(w) - L(w_n)) / ||w_n - w||: how much a model gains for every step in a candidate's direction.

    Args:
        loss: L(w). losses: L(w_n), one per candidate. distances: ||w_n - w||, one per candidate.

    Returns:
        (M,) float32; 0 for a candidate that is the model itself, and where a loss is not finite.

    Raises:
        ValueError: not one distance per loss.

    Source: FedFomo (Zhang et al., ICLR 2021), section 3.

    >>> model_gains(2.0, [1.0, 3.0, 0.0], [2.0, 0.5, 0.0])
    tensor([ 0.5000, -2.0000,  0.0000])
    """
    if len(losses) != len(distances):
        raise ValueError(f"expected one distance per loss, got {len(distances)} for {len(losses)} losses")
    gain = loss - torch.tensor(losses, dtype=torch.float64)
    away = torch.tensor(distances, dtype=torch.float64)
    known = (away >= _SAME) & torch.isfinite(gain)
    return torch.where(known, gain / away.clamp(min=_SAME), torch.zeros_like(gain)).float()


def normalize_positive(delta: Tensor) -> Tensor:
    """omega_n = max(delta_n, 0), divided by their sum; all 0 where none is positive. (M,) to (M,).

    Source: FedFomo, section 3.

    >>> normalize_positive(torch.tensor([1.0, -2.0, 3.0])), normalize_positive(torch.tensor([-1.0]))
    (tensor([0.2500, 0.0000, 0.7500]), tensor([0.]))
    """
    positive = delta.clamp(min=0)
    total = positive.sum()
    return positive / total if float(total) > 0 else positive


def interpolate_towards(
    model: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]], shares: Sequence[float]
) -> dict[str, Tensor]:
    """W + sum_n omega_n (W_n - W), name by name; of a tensor that W_n does not have, W_n counts as W.

    Args:
        model: W by name. others: W_n, each any subset of the names, in the same shapes. shares: omega_n.

    Returns:
        New tensors on the CPU in the dtypes of ``model``; sums are float64, so that a share of 1 gives W_n itself.

    Raises:
        ValueError: not one share per model.

    Source: FedFomo, section 3.

    >>> interpolate_towards({"w": torch.tensor([1.0])}, [{"w": torch.tensor([5.0])}, {}], [0.5, 0.5])
    {'w': tensor([3.])}
    """
    if len(others) != len(shares):
        raise ValueError(f"expected one share per model, got {len(shares)} for {len(others)} models")
    mixed = {}
    for name, tensor in model.items():
        total = here = tensor.detach().cpu().double()  # not every GPU has float64
        for other, share in zip(others, shares, strict=True):
            if share and name in other:
                total = total + share * (other[name].to(here) - here)
        mixed[name] = total.to(tensor.dtype, copy=True)
    return mixed


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """||a - b||, the Euclidean norm over the entries of all tensors that both have.

    >>> a, b = {"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([0.0, 4.0]), "v": torch.ones(1)}
    >>> distance(a, b)
    5.0
    """
    gaps = [(a[name].cpu().double() - b[name].cpu().double()).flatten() for name in a if name in b]
    return float(torch.linalg.vector_norm(torch.cat(gaps))) if gaps else 0.0
