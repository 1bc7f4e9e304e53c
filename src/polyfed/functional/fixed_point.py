"""Numbers in fixed point, whose sums modulo 2^40 are exact, in any order, and can be masked.

    x -> z = round(x 2^q)
    float32      one limb:   z modulo 2^40
    float64      two limbs:  z modulo 2^28, and the floor of z / 2^28 modulo 2^40
    q            chosen by R, the rows of all clients together: |x| <= L R gives |z| < 2^38 (two limbs: 2^66)

A limb travels as 5 bytes: 5 for 4 of float32, 10 for 8 of float64. Lower limbs of up to 4096 clients add up to less
than 2^40. A mean over all rows is off by at most K L 2^-38 (float32) or K L 2^-66 (float64), for K clients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

Group = Mapping[str, Tensor]
# L: what a number of a client may be at most, per row
LARGEST: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 2.0**12, torch.float64: 2.0**24})
MOST_CLIENTS = 2**12
_BITS = 40  # of a limb
_LOWER = 28  # of these, the bits that a lower limb has of one client
_BYTES = 5
_MASK = 2**_BITS - 1


def encode(addends: Group, rows: int, all_rows: int) -> dict[str, Tensor]:
    """Numbers (...) in fixed point (..., 5) or, in float64, (..., 10) uint8.

    Args:
        addends: in float32 or float64. rows: of the client. all_rows: R.

    Raises:
        ValueError: a number is too large, or none.
    """
    return {name: _encoded(name, tensor.detach().cpu(), rows, all_rows) for name, tensor in addends.items()}


def _encoded(name: str, x: Tensor, rows: int, all_rows: int) -> Tensor:
    largest = LARGEST[x.dtype]
    most = float(x.abs().amax()) if x.numel() else 0.0
    if not most <= largest * rows:
        raise ValueError(
            f"expected numbers of at most {largest:g} per row in '{name}', so that sums fit into fixed point, got "
            f"{most / max(rows, 1):.4g}"
        )
    z = (x.double() / _unit(x.dtype, all_rows)).round()
    if x.dtype == torch.float32:
        return _to_bytes(z.long().unsqueeze(-1))
    upper = (z / 2**_LOWER).floor()
    return _to_bytes(torch.stack([z - upper * 2.0**_LOWER, upper], dim=-1).long())


def _unit(dtype: torch.dtype, all_rows: int) -> float:
    """2^-q."""
    bits = _BITS if dtype == torch.float32 else _BITS + _LOWER
    return math.ldexp(1.0, round(math.log2(LARGEST[dtype])) + all_rows.bit_length() + 2 - bits)


def _to_bytes(limbs: Tensor) -> Tensor:
    """Limbs (..., L) int64 as (..., 5 L) uint8, little-endian."""
    wide = (limbs & _MASK).contiguous().view(torch.uint8).view(*limbs.shape, 8)
    sent: Tensor = wide[..., :_BYTES].flatten(-2)
    return sent


def decode(total: Group, all_rows: int) -> dict[str, Tensor]:
    """The sums of numbers (...), in their type, from the sums of what `encode` made."""
    return {name: _decoded(tensor, all_rows) for name, tensor in total.items()}


def _decoded(total: Tensor, all_rows: int) -> Tensor:
    limbs = _from_bytes(total)
    upper = limbs[..., -1]
    upper = torch.where(upper >= 2 ** (_BITS - 1), upper - 2**_BITS, upper).double()
    if limbs.shape[-1] == 1:
        return (upper * _unit(torch.float32, all_rows)).float()
    return (upper * 2.0**_LOWER + limbs[..., 0]).mul(_unit(torch.float64, all_rows))


def _from_bytes(sent: Tensor) -> Tensor:
    """The inverse of `_to_bytes`: (..., L) int64."""
    shape = (*sent.shape[:-1], sent.shape[-1] // _BYTES)
    wide = torch.zeros(*shape, 8, dtype=torch.uint8)
    wide[..., :_BYTES] = sent.view(*shape, _BYTES)
    limbs: Tensor = wide.view(torch.int64)
    return limbs.squeeze(-1)


# sums ---------------------------------------------------------------------------------------------------------------


def limbs_of(encoded: Group) -> Tensor:
    """All limbs of what `encode` made, as one vector of int64, by name."""
    return torch.cat([_from_bytes(encoded[name]).reshape(-1) for name in sorted(encoded)])


def from_limbs(limbs: Tensor, like: Group) -> dict[str, Tensor]:
    """The inverse of `limbs_of`, modulo 2^40. like: tensors of the same names and shapes."""
    names = sorted(like)
    parts = limbs.split([like[name].numel() // _BYTES for name in names])
    return {name: _to_bytes(part).view(like[name].shape) for name, part in zip(names, parts, strict=True)}


def add_up(uploads: Iterable[Group]) -> dict[str, Tensor]:
    """The sum of what several clients have encoded, which all have the same names and shapes."""
    first, *others = uploads
    total = limbs_of(first)
    for other in others:
        total = total + limbs_of(other) & _MASK
    return from_limbs(total, first)
