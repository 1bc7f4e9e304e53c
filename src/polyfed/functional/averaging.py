"""Averages of models: weighted (FedAvg), layer by layer over those who hold the layer (FedIN, InclusiveFL), and of
updates normalized by each client's number of steps (FedNova).

A model is a mapping from names to tensors, as ``state_dict()`` gives it. Floating-point tensors are averaged with
float64 sums and cast back, so the average of identical float32 (or narrower) models is that model bit for bit. Integer
tensors are counters (BatchNorm's ``num_batches_tracked``); of them the largest is kept, element by element. Results
never share memory with what is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

ENTRIES_AT_ONCE = 2**18  # entries summed at a time, whose sums a processor's cache holds


def normalize(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum.

    Raises:
        ValueError: the weights are empty, all zero, negative, or not finite.
    """
    values = [float(w) for w in weights]
    if not values:
        raise ValueError("expected at least one weight, got none")
    bad = [(i, w) for i, w in enumerate(values) if not math.isfinite(w) or w < 0]
    if bad:
        raise ValueError(f"expected finite weights of at least 0, got {bad[0][1]} at position {bad[0][0]}")
    total = sum(values)
    if not 0 < total < math.inf:
        raise ValueError(f"expected weights with a positive finite sum, got {len(values)} weights of sum {total}")
    return [w / total for w in values]


def weighted_mean(models: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """W = sum_i n_i W_i / sum_i n_i, name by name.

    Args:
        models: one mapping per client, all with the same names and shapes.
        weights: one number per model (the paper's n_i), normalized here. A model of weight 0 has no say at all.

    Returns:
        A new mapping in the order and with the dtypes of the first model.

    Raises:
        ValueError: weights are unusable (see ``normalize``) or not one per model; names or shapes differ.

    Source: McMahan et al., AISTATS 2017, Algorithm 1; FedHeNN, Algorithm 1.
    """
    first = models[0] if models else {}
    for i, model in enumerate(models):
        if model.keys() != first.keys():
            name = sorted(model.keys() ^ first.keys())[0]
            raise ValueError(f"expected the same tensors in every model, but only one of models 0 and {i} has '{name}'")
    return layer_wise_mean(models, weights, first)


def layer_wise_mean(
    models: Sequence[Mapping[str, Tensor]], weights: Sequence[float], base: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """w_l = sum of w_k w_l^k over the models k that have tensor l, their weights renormalized to sum 1.

    Args:
        models: one mapping per client; each may hold any subset of ``base``.
        weights: one number per model; equal weights give the paper's plain mean.
        base: the union model (every architecture's tensors, by name). A tensor that no model of positive weight has
            is returned as a copy of the one in ``base``.

    Returns:
        A new mapping with the names, order and dtypes of ``base``.

    Raises:
        ValueError: weights are unusable (see ``normalize``) or not one per model; a name is not in ``base``; a shape
            differs from the one in ``base``.

    Source: FedIN, eq. 19 (groups ordered by size are the special case of nested names).
    """
    mean = {}
    for name, held in _parts(models, weights, base).items():
        counted = [(models[i][name].detach(), share) for i, share in held]
        mean[name] = _mean(counted, base[name]) if counted else base[name].detach().clone()
    return mean


def normalized_mean(
    models: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    normalizers: Sequence[float],
    base: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """w_l - tau_l sum_k p_k (w_l - w_l^k) / a_k, with tau_l = sum_k p_k a_k, over the models k that have tensor l.

    Every model's way from ``base`` counts by its length per unit of a_k, not by its whole length. Where all a_k are
    equal, it is ``layer_wise_mean`` up to rounding.

    Args:
        models, weights, base: as in ``layer_wise_mean``, with the same errors; w is ``base``, of floating-point
            tensors, and p_k are the weights divided by their sum over those who have l.
        normalizers: a_k > 0, one per model.

    Source: Wang et al. (FedNova), NeurIPS 2020, eq. 6.
    """
    parts = _parts(models, weights, base)
    moved = {}
    for name, like in base.items():
        held = parts[name]
        tau = sum(p * normalizers[k] for k, p in held)
        way = torch.zeros_like(like, dtype=torch.float64)
        for k, p in held:
            way.add_(models[k][name].detach().double() - like.double(), alpha=p / normalizers[k])
        moved[name] = (like.double() + tau * way).to(like.dtype) if held else like.detach().clone()
    return moved


def _parts(
    models: Sequence[Mapping[str, Tensor]], weights: Sequence[float], base: Mapping[str, Tensor]
) -> dict[str, list[tuple[int, float]]]:
    """Name -> (place, share) of the models of positive weight that have it; the shares sum to 1.

    They are the weights normalized once: they do not depend on who lacks another tensor.
    """
    if len(models) != len(weights):
        raise ValueError(f"expected one weight per model, got {len(weights)} weights for {len(models)} models")
    normalize(weights)  # refuses weights that are unusable
    for i, model in enumerate(models):
        for name, tensor in model.items():
            if name not in base:
                raise ValueError(f"expected only tensors of the union model, got '{name}' from model {i}")
            if tensor.shape != base[name].shape:
                raise ValueError(
                    f"expected '{name}' of shape {tuple(base[name].shape)}, as others have it, got "
                    f"{tuple(tensor.shape)} from model {i}"
                )
    parts = {}
    for name in base:
        held = [
            i for i, (model, weight) in enumerate(zip(models, weights, strict=True)) if name in model and weight > 0
        ]
        parts[name] = list(zip(held, normalize([weights[i] for i in held]), strict=True)) if held else []
    return parts


def _mean(counted: Sequence[tuple[Tensor, float]], like: Tensor) -> Tensor:
    """The mean of tensors by their shares, which are positive."""
    if not like.is_floating_point():
        largest = counted[0][0].clone()
        for tensor, _ in counted[1:]:
            largest = torch.maximum(largest, tensor)
        return largest.to(like.dtype)
    mean = torch.empty_like(like, requires_grad=False)
    order = sorted(range(mean.ndim), key=mean.stride, reverse=True)  # dimensions as they lie in memory
    parts = [(tensor.permute(order).reshape(-1), share) for tensor, share in counted]
    flat = mean.permute(order).view(-1)
    size = ENTRIES_AT_ONCE if mean.is_cpu else max(mean.numel(), 1)
    for begin in range(0, mean.numel(), size):
        there = flat[begin : begin + size]
        total = torch.zeros_like(there, dtype=torch.float64)
        for tensor, share in parts:
            total.add_(tensor[begin : begin + size], alpha=share)
        there.copy_(total)
    return mean
