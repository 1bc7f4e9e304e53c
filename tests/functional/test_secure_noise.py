"""Keyed normal numbers: normal, of one key only, and the same whatever shapes they are asked in."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from polyfed.functional.clipping import clip_and_noise
from polyfed.functional.noise import KeyedGaussian, KeyedUniforms


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_they_are_standard_normal() -> None:
    drawn = KeyedGaussian(key(1))((300, 1000)).double()
    few = drawn.numel() ** -0.5
    assert abs(float(drawn.mean())) < 4 * few
    assert float(drawn.var()) == pytest.approx(1, abs=6 * few)
    for bound in (0.5, 1.0, 2.0, 3.0):  # the shares beyond a bound, on both sides
        tail = math.erfc(bound / 2**0.5) / 2
        for share in ((drawn > bound), (drawn < -bound)):
            assert float(share.double().mean()) == pytest.approx(tail, abs=4.5 * few * tail**0.5)
    halves = drawn.flatten()
    for lag in (1, 131072):  # neighbors, and the two of a pair in a block
        assert abs(float((halves[:-lag] * halves[lag:]).mean())) < 5 * few


def test_against_numpy() -> None:
    """Box and Muller's transform of SHAKE-256's bits, four numbers of four pairs in each, by hand."""
    bits = hashlib.shake_256(key(7) + (1).to_bytes(8, "little")).digest(20 * 8)
    uniform = ((np.frombuffer(bits, dtype="<u8") >> np.uint64(11)).astype(float) + 0.5) * 2.0**-53
    np.testing.assert_allclose(KeyedUniforms(key(7))((20,)).numpy(), uniform, rtol=0)
    radius, angle = np.sqrt(-2 * np.log(uniform[:10])), 2 * np.pi * uniform[10:]
    x, y = radius * np.cos(angle), radius * np.sin(angle)
    expected = [(x[i] + x[i + 5] + y[(i - 1) % 5] + y[(i - 1) % 5 + 5]) / 2 for i in range(5)]
    np.testing.assert_allclose(KeyedGaussian(key(7))((5,)).numpy(), expected, rtol=1e-12)


def test_a_key_is_a_stream() -> None:
    one, again, other = (KeyedGaussian(key(number)) for number in (1, 1, 2))
    first = one((2, 50))
    assert torch.equal(first, again((2, 50)))
    assert not torch.equal(first, other((2, 50)))
    assert not torch.equal(first, one((2, 50)))
    assert one((0, 3)).shape == (0, 3)
    assert one(()).shape == ()
    assert first.dtype == torch.float64
    alone = {float(KeyedGaussian(key(number))((1,))) for number in range(50)}
    assert len(alone) == 50


def test_what_is_released_lies_on_a_grid() -> None:
    """Whatever the noise was added to: of 0 and of 1 the same values can come out, to the last bit."""
    for std in (0.7, 1.0, 3e-3):
        for start in (0.0, 1.0, 1 / 3):
            noisy = clip_and_noise({"w": torch.full((2000,), start)}, 0.0, std, KeyedGaussian(key(1)))["w"].double()
            step = 2.0 ** (math.floor(math.log2(std)) - 12)
            assert torch.equal((noisy / step).round() * step, noisy)
            assert float(noisy.mean()) == pytest.approx(start, abs=5 * std / 2000**0.5)
            assert float(noisy.std()) == pytest.approx(std, rel=0.06)
