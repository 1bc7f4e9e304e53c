"""Combining two gradients of the same tensors: FedIN's gradient alleviation (eq. 8 to 13).

With a = <G_local, G_local> and b = <G_local, G_IN> (Frobenius products), every rule is G_IN + c G_local:

    "simple"    c = 1 / 2                      eq. 13, lambda = 1 as in the paper's experiments
    "project"   c = 1 + max(0, -b/a)           G_local + Z, Z the projection of eq. 12
    "none"      c = 1                          G_local + G_IN, the ablation "w/o Opt"

Where a = 0, b/a counts as 0. No branch looks at a tensor's value.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyfed.functional.centering import widened


def combine(g_local: Mapping[str, Tensor], g_in: Mapping[str, Tensor], mode: str) -> dict[str, Tensor]:
    """The gradient that moves the intermediate tensors, with an a and a b of its own for each of them.

    mode is a row of the table above. New tensors, in the order of ``g_local`` and the dtypes of ``g_in``.
    """
    combined = {}
    for name, local in g_local.items():
        c = _coefficient(local, g_in[name], mode)
        wide_in = widened(g_in[name])
        wide_local = widened(local)
        mixed = torch.add(wide_in, wide_local, alpha=c) if isinstance(c, float) else wide_in + c * wide_local
        combined[name] = mixed.to(g_in[name].dtype)
    return combined


def cosine(g_local: Mapping[str, Tensor], g_in: Mapping[str, Tensor]) -> Tensor:
    """Cosine of the angle between the gradients, all tensors taken as one vector (0-d); 0 where one of them is 0."""
    left, _ = _scaled(torch.cat([_flat(g) for g in g_local.values()]))
    right, _ = _scaled(torch.cat([_flat(g_in[name]) for name in g_local]))
    aa = left @ left
    bb = right @ right
    ab = left @ right
    defined = (aa > 0) & (bb > 0)
    return torch.where(defined, ab / torch.where(defined, aa * bb, torch.ones_like(aa)).sqrt(), torch.zeros_like(ab))


def _coefficient(g_local: Tensor, g_in: Tensor, mode: str) -> Tensor | float:
    """c; of "project" G_local is first divided by its largest entry, so that a stays in range."""
    if mode == "simple":
        return 0.5
    if mode == "none":
        return 1.0
    unit, largest = _scaled(_flat(g_local))
    a = unit @ unit
    b = unit @ _flat(g_in)
    one = torch.ones_like(a)
    ratio = torch.where(a > 0, -b / torch.where(a > 0, a, one) / torch.where(a > 0, largest, one), torch.zeros_like(b))
    return ratio.clamp(min=0) + 1.0


def _scaled(flat: Tensor) -> tuple[Tensor, Tensor]:
    low, high = flat.aminmax()  # one pass without a copy, as abs().amax() is not
    largest = torch.maximum(-low, high)
    return flat / torch.where(largest > 0, largest, torch.ones_like(largest)), largest


def _flat(tensor: Tensor) -> Tensor:
    return widened(tensor).reshape(-1)
