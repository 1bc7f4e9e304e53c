"""Standard normal numbers that nobody can draw again who has not the key, nor tell from others that he has seen."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 2**18  # numbers drawn at once: 2 MiB of bits
_BITS, _MASK = 53, 2**53 - 1  # of a double's mantissa


class KeyedNormals:
    """A stream of N(0, 1), a function of its key: SHAKE-256 in counter mode, and Box and Muller's transform.

    PyTorch's own generator would not do: its seed is 32 bits that can all be tried, and some hundred draws tell it all.

    Args:
        key: 32 secret bytes, to be used for one stream only.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def __call__(self, shape: Sequence[int]) -> Tensor:
        """The next numbers, as float32 of this shape.

        >>> normals = KeyedNormals(bytes(32))
        >>> normals((2, 3)).shape
        torch.Size([2, 3])
        """
        wanted = math.prod(shape)
        blocks = [self._block(min(_BLOCK, wanted - begin)) for begin in range(0, wanted, _BLOCK)]
        return torch.cat([*blocks, torch.zeros(0)]).view(tuple(shape))

    def _block(self, wanted: int) -> Tensor:
        pairs = (wanted + 1) // 2
        self._count += 1
        bits = hashlib.shake_256(self._key + self._count.to_bytes(8, "little")).digest(2 * pairs * 8)
        whole = torch.frombuffer(bytearray(bits), dtype=torch.int64)
        uniform = ((whole >> (64 - _BITS)) & _MASK).double().add(0.5).mul(2.0**-_BITS).view(2, pairs)  # in (0, 1]
        radius, angle = (-2 * uniform[0].log()).sqrt(), 2 * math.pi * uniform[1]
        return torch.cat([radius * angle.cos(), radius * angle.sin()])[:wanted].float()
