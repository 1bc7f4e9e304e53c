"""Sums of which a server sees the total alone: fixed-point numbers modulo 2^64, with masks that cancel.

    client k:  m_k = x_k + sum over j of sign(j - k) r_kj   mod 2^64,   x_k = its numbers times 2^bits, rounded
    server:    sum of m_k = sum of x_k

r_kj = r_jk is a stream of whole numbers by a seed that the clients k and j alone have, fresh for every message; how
they agree on it (Diffie and Hellman's exchange) is not part of this. Each message alone, or any sum that lacks one, is
a uniform number, whatever was sent. Additions modulo 2^64 are exact, so that any order gives the same bits, and what
was added can be subtracted.

If a client drops out after others have masked, the total is `mask(total, dropped, seeds)`, with the seeds that these
others shared with it, which they then tell the server. Its own message must then never be read: nothing here prevents
that, nor that a server lies about who dropped out (Bonawitz et al., CCS 2017, do both).

For the sums of `class_statistics`: they go in as they are, not per row, and the server gets counts, M and S of all
clients together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.functional.class_statistics import add, subtract  # of int64 modulo 2^64

Sums = Mapping[str, Tensor]
_RING = 64  # bits


@dataclass(frozen=True)
class FixedPoint:
    """Whole multiples of 2^-bits.

    Args:
        clients: K, how many messages are added at most.
        bits: of the fraction. A total is off by K 2^-(bits + 1) at most.
    """

    clients: int
    bits: int = 30

    @property
    def largest(self) -> float:
        """What a number of a client may be at most, so that no total overflows."""
        return (2.0 ** (_RING - 1 - self.bits) - 1) / self.clients

    def encode(self, sums: Sums) -> dict[str, Tensor]:
        """Numbers as int64.

        Raises:
            ValueError: one is too large, or none.

        >>> FixedPoint(clients=10, bits=2).encode({"sums": torch.tensor([1.5, -0.3])})
        {'sums': tensor([ 6, -1])}
        """
        for name, tensor in sums.items():
            most = float(tensor.double().abs().amax())
            if not most <= self.largest:
                raise ValueError(
                    f"{name}: expected numbers up to {self.largest:.4g} with {self.bits} bits of fraction and "
                    f"{self.clients} clients, got {most:.4g}; take fewer bits"
                )
        return {name: (tensor.double() * 2.0**self.bits).round().long() for name, tensor in sums.items()}

    def decode(self, total: Sums) -> dict[str, Tensor]:
        """Numbers as float64; whole ones below 2^53 are exact."""
        return {name: tensor.double() / 2.0**self.bits for name, tensor in total.items()}


def pair_seeds(clients: Sequence[int], key: bytes) -> dict[int, dict[int, bytes]]:
    """For a simulation, the seeds of all pairs: client -> other client -> seed, a function of the key."""

    def seed(one: int, other: int) -> bytes:
        return hashlib.sha256(key + f"{min(one, other)} {max(one, other)}".encode()).digest()

    return {one: {other: seed(one, other) for other in clients if other != one} for one in clients}


def mask(encoded: Sums, client: int, seeds: Mapping[int, bytes]) -> dict[str, Tensor]:
    """A client's numbers with the masks that it shares with others.

    Args:
        seeds: other client -> 32 bytes, to be used for one message only.
    """
    masked = dict(encoded)
    for other, seed in seeds.items():
        stream = {name: _draw(seed, name, tensor) for name, tensor in encoded.items()}
        masked = add(masked, stream) if client < other else subtract(masked, stream)
    return masked


def _draw(seed: bytes, name: str, like: Tensor) -> Tensor:
    """Uniform whole numbers, by SHAKE-256."""
    bits = hashlib.shake_256(seed + name.encode()).digest(like.numel() * _RING // 8)
    return torch.frombuffer(bytearray(bits), dtype=torch.int64).view(like.shape)
