"""Normal numbers that only the holder of a key can draw again.

Noise of floating-point numbers tells by its last bits what it was added to: of 1 + z and 0 + z not the same values can
come out (Mironov, CCS 2012, of Laplace noise; Jin, McMurtry, Rubinstein and Ohrimenko, S&P 2022, of Gaussian noise, and
of Box and Muller's transform, some of whose values are never drawn). Against that a keyed normal number is the sum of
four, each of another pair of Box and Muller's (Holohan and Braghin, ESORICS 2021), in float64; and what they are added
to is rounded to a coarse grid, `on_grid`, which leaves none of those bits. It is no exact sampler: no proof is claimed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 2**18  # numbers drawn at once: 8 MiB of bits
_BITS = 53
_MASK = 2**53 - 1  # the bits of a double's mantissa
_FINE = 12  # bits of a grid below its noise's deviation


class KeyedUniforms:
    """A stream of numbers in (0, 1), a function of its key: SHAKE-256 in counter mode.

    PyTorch's own generator would not do: its seed is 32 bits that can all be tried, and some hundred draws tell it all.

    Args:
        key: 32 secret bytes, to be used for one stream only.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def __call__(self, shape: Sequence[int]) -> Tensor:
        """The next numbers, as float64 of this shape."""
        wanted = math.prod(shape)
        blocks = [self._block(min(_BLOCK, wanted - begin)) for begin in range(0, wanted, _BLOCK)]
        return torch.cat([*blocks, torch.zeros(0, dtype=torch.float64)]).view(tuple(shape))

    def _block(self, wanted: int) -> Tensor:
        return self._drawn(wanted)

    def _drawn(self, count: int) -> Tensor:
        """(count,) of the next digest."""
        self._count += 1
        bits = hashlib.shake_256(self._key + self._count.to_bytes(8, "little")).digest(count * 8)
        whole = torch.frombuffer(bytearray(bits), dtype=torch.int64)
        return ((whole >> (64 - _BITS)) & _MASK).double().add(0.5).mul(2.0**-_BITS)


class KeyedGaussian(KeyedUniforms):
    """A stream of N(0, 1), likewise: sums of four numbers of Box and Muller's transform, halved."""

    def _block(self, wanted: int) -> Tensor:
        pairs = 2 * max(wanted, 2)
        first, second = self._drawn(2 * pairs).view(2, pairs)
        radius = (-2 * first.log()).sqrt()
        angle = 2 * math.pi * second
        cosines = (radius * angle.cos()).view(2, -1)
        sines = (radius * angle.sin()).view(2, -1)
        sums: Tensor = (cosines + sines.roll(1, dims=1)).sum(dim=0)  # rolled: of four pairs, not of two
        return sums[:wanted] / 2


def on_grid(values: Tensor, std: float) -> Tensor:
    """Numbers rounded to multiples of a power of two, 2^-12 to 2^-13 of the deviation of the noise that is in them.

    Args:
        values: float64, with the noise. std: above 0.

    >>> on_grid(torch.tensor([0.30001, -1.00001], dtype=torch.float64), 1.0)
    tensor([ 0.3000, -1.0000], dtype=torch.float64)
    """
    step = 2.0 ** (math.frexp(std)[1] - 1 - _FINE)
    return (values / step).round() * step
