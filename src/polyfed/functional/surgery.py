"""Combining two gradients of the same tensors: FedIN's gradient alleviation (eq. 8 to 13).

With a = <G_local, G_local> and b = <G_local, G_IN> (Frobenius products), every rule is G_IN + c G_local:

    "simple"    c = lambda / 2                 eq. 13, the paper's setting with lambda = 1
    "literal"   c = max(0, -b/a)               eq. 12: the projection Z alone
    "project"   c = 1 + max(0, -b/a)           G_local + Z: the private data go on training these tensors too
    "adaptive"  c = max(1, -2b/a) / 2          eq. 13 with the smallest lambda >= 1 that meets <Z, G_local> >= 0
    "none"      c = 1                          G_local + G_IN, the ablation "w/o Opt"

Where a = 0, b/a counts as 0. No branch looks at a tensor's value.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyfed.functional.centering import widened

MODES = ("simple", "project", "literal", "adaptive", "none")


def combine(g_local: Mapping[str, Tensor], g_in: Mapping[str, Tensor], mode: str, lam: float) -> dict[str, Tensor]:
    """The gradient that moves the intermediate tensors, with an a and a b of its own for each of them.

    Args:
        g_local: G_local by name.
        g_in: G_IN by name; same names and shapes.
        mode: a row of the table at the top of this file.
        lam: lambda of "simple"; the other modes do not look at it.

    Returns:
        New tensors, in the order of ``g_local`` and the dtypes of ``g_in``.

    Raises:
        ValueError: unknown mode; names or shapes differ.
    """
    if mode not in MODES:
        raise ValueError(f"expected a mode among {', '.join(MODES)}, got '{mode}'")
    _same_names(g_local, g_in)
    combined = {}
    for name, local in g_local.items():
        c = _coefficient([local], [g_in[name]], mode, lam)
        wide_in = widened(g_in[name])
        wide_local = widened(local)
        mixed = torch.add(wide_in, wide_local, alpha=c) if isinstance(c, float) else wide_in + c * wide_local
        combined[name] = mixed.to(g_in[name].dtype)
    return combined


def cosine(g_local: Mapping[str, Tensor], g_in: Mapping[str, Tensor]) -> Tensor:
    """Cosine of the angle between the two gradients, all tensors taken as one vector (0-d); 0 where one of them is 0.

    Raises:
        ValueError: names or shapes differ.
    """
    _same_names(g_local, g_in)
    left, _ = _scaled(list(g_local.values()))
    right, _ = _scaled([g_in[name] for name in g_local])
    aa = _product(left, left)
    bb = _product(right, right)
    ab = _product(left, right)
    defined = (aa > 0) & (bb > 0)
    return torch.where(defined, ab / torch.where(defined, aa * bb, torch.ones_like(aa)).sqrt(), torch.zeros_like(ab))


def _same_names(g_local: Mapping[str, Tensor], g_in: Mapping[str, Tensor]) -> None:
    if g_local.keys() != g_in.keys():
        name = sorted(g_local.keys() ^ g_in.keys())[0]
        raise ValueError(f"expected both gradients for the same tensors, but only one has '{name}'")
    if not g_local:
        raise ValueError("expected gradients of at least one tensor, got none")
    for name in g_local:
        if g_local[name].shape != g_in[name].shape:
            shapes = f"{tuple(g_local[name].shape)} and {tuple(g_in[name].shape)}"
            raise ValueError(f"expected both gradients of '{name}' in one shape, got {shapes}")


def _coefficient(g_local: list[Tensor], g_in: list[Tensor], mode: str, lam: float) -> Tensor | float:
    if mode == "simple":
        return lam / 2
    if mode == "none":
        return 1.0
    minus_b_over_a = _minus_ratio(g_local, g_in)
    if mode == "adaptive":
        return (2 * minus_b_over_a).clamp(min=1) / 2
    return minus_b_over_a.clamp(min=0) + (1.0 if mode == "project" else 0.0)


def _minus_ratio(g_local: list[Tensor], g_in: list[Tensor]) -> Tensor:
    """-b/a over a list of tensors; G_local is first divided by its largest entry, so that a stays in range."""
    unit, largest = _scaled(g_local)
    a = _product(unit, unit)
    b = _product(unit, [widened(g) for g in g_in])
    one = torch.ones_like(a)
    return torch.where(a > 0, -b / torch.where(a > 0, a, one) / torch.where(a > 0, largest, one), torch.zeros_like(b))


def _scaled(tensors: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    ends = [widened(t).aminmax() for t in tensors]  # one pass without a copy, as abs().amax() is not
    largest = torch.stack([torch.maximum(-low, high) for low, high in ends]).amax()
    divisor = torch.where(largest > 0, largest, torch.ones_like(largest))
    return [widened(t) / divisor for t in tensors], largest


def _product(left: list[Tensor], right: list[Tensor]) -> Tensor:
    return torch.stack([torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in zip(left, right, strict=True)]).sum()
