"""Keyed normal numbers: normal, of one key only, and the same whatever shapes they are asked in."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from polyfed.functional.keyed import KeyedNormals


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_they_are_standard_normal() -> None:
    drawn = KeyedNormals(key(1))((300, 1000)).double()
    few = drawn.numel() ** -0.5
    assert abs(float(drawn.mean())) < 4 * few
    assert float(drawn.var()) == pytest.approx(1, abs=6 * few)
    for bound in (0.5, 1.0, 2.0, 3.0):  # the shares beyond a bound, on both sides
        tail = math.erfc(bound / 2**0.5) / 2
        for share in ((drawn > bound), (drawn < -bound)):
            assert float(share.double().mean()) == pytest.approx(tail, abs=4.5 * few * tail**0.5)
    halves = drawn.flatten()
    for lag in (1, 131072):  # neighbours, and the two of a pair in a block
        assert abs(float((halves[:-lag] * halves[lag:]).mean())) < 5 * few


def test_against_numpy() -> None:
    """Box and Muller's transform of SHAKE-256's bits, by hand."""
    bits = hashlib.shake_256(key(7) + (1).to_bytes(8, "little")).digest(48)
    uniform = ((np.frombuffer(bits, dtype="<u8") >> np.uint64(11)).astype(float) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(uniform[:3])), 2 * np.pi * uniform[3:]
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    np.testing.assert_allclose(KeyedNormals(key(7))((5,)).numpy(), expected[:5], rtol=1e-6)


def test_a_key_is_a_stream() -> None:
    one, again, other = (KeyedNormals(key(number)) for number in (1, 1, 2))
    first = one((2, 50))
    assert torch.equal(first, again((2, 50)))
    assert not torch.equal(first, other((2, 50)))
    assert not torch.equal(first, one((2, 50)))
    assert one((0, 3)).shape == (0, 3)
    assert one(()).shape == ()
    assert first.dtype == torch.float32
