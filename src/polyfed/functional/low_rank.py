"""Named tensors in fewer numbers: matrices as their largest singular values and vectors, all else as it is.

A matrix (m, n) = U diag(s) V^T becomes its first K singular triples, K being the smallest number that keeps the asked
share of the energy, sum s^2; a convolution (O, I, h, w) is the matrix (O, I h w). That takes K (m + n + 1) numbers, and
where these are not fewer than m n, the matrix stays as it is. So at full energy everything comes back exactly.

    group      of each                                     shape
    raw        tensor that stays as it is                  its own
    left       compressed matrix: singular vectors         (m, K)
    scale      singular values, falling                    (K,)
    right      singular vectors                            (K, n)

Source: Wu et al. (FedKD), Nature Communications 2022, "dynamic gradient approximation".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

GROUPS = ("raw", "left", "scale", "right")

Encoded = dict[str, dict[str, Tensor]]


@torch.no_grad()
def encode(tensors: Mapping[str, Tensor], energy: float, exempt: Collection[str] = ()) -> Encoded:
    """The groups of the table above, those without entries left out; new tensors.

    energy is the share to keep, above 0 and at most 1; tensors named in `exempt` stay as they are.
    """
    found: Encoded = {group: {} for group in GROUPS}
    for name, tensor in tensors.items():
        factors = None if name in exempt or tensor.dim() < 2 else truncated_svd(tensor.flatten(1), energy)
        parts = {"raw": tensor.detach().clone()} if factors is None else dict(zip(GROUPS[1:], factors, strict=True))
        for group, part in parts.items():
            found[group][name] = part
    return {group: entries for group, entries in found.items() if entries}


@torch.no_grad()
def decode(encoded: Mapping[str, Mapping[str, Tensor]], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors again, in the order and the shapes of `like`; new tensors.

    Raises:
        ValueError: a tensor is missing, or cannot have its shape.
    """
    raw, left, scale, right = (encoded.get(group, {}) for group in GROUPS)
    found = {}
    for name, tensor in like.items():
        if name in raw:
            whole = raw[name].clone()
        elif name in left and name in scale and name in right:
            whole = (left[name].double() * scale[name].double()) @ right[name].double()
        else:
            raise ValueError(f"expected '{name}' among the encoded tensors, got {sorted(raw.keys() | left.keys())}")
        if whole.numel() != tensor.numel():
            raise ValueError(f"expected '{name}' of shape {tuple(tensor.shape)}, got {whole.numel()} numbers")
        found[name] = whole.reshape(tensor.shape).to(tensor.dtype)
    return found


@torch.no_grad()
def truncated_svd(matrix_MN: Tensor, energy: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """U (M, K), s (K,) and V^T (K, N), K >= 1 the smallest with sum_k s_k^2 >= energy sum s^2.

    Computed in float64. None where that takes no fewer numbers than the matrix has.
    """
    rows, columns = matrix_MN.shape
    triple = rows + columns + 1  # numbers
    if triple >= rows * columns:
        return None
    left, scale, right = torch.linalg.svd(matrix_MN.double(), full_matrices=False)
    kept = scale.square().cumsum(0)
    rank = min(int((kept < energy * kept[-1]).sum()) + 1, len(scale))
    if rank * triple >= rows * columns:
        return None
    first = left[:, :rank], scale[:rank], right[:rank]
    u, s, v = (part.to(matrix_MN.dtype, copy=True).contiguous() for part in first)
    return u, s, v
