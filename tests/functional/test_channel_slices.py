"""Cutting by channels, against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from polyfed.functional.channel_slices import first_channels, slice_channels, width
from tests.helpers.slices import PLAN, kept, places, tensors


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.25, 1 / 16, 0.7, 0.07])
def test_widths_are_rounded_up_and_never_0(rate):
    for size in (1, 2, 3, 7, 16, 100, 2000):
        assert width(size, rate) == max(1, math.ceil(round(rate * size, 6)))
        assert first_channels(size, rate).tolist() == list(range(width(size, rate)))


def test_a_cut_is_numpys():
    large, channels = tensors(0), kept(g2=[4, 0], g3=[1, 2, 3])
    small = slice_channels(PLAN, large, channels)
    for name, whole in large.items():
        expected = whole.numpy()[np.ix_(*places(name, channels))] if whole.dim() else whole.numpy()
        np.testing.assert_array_equal(small[name].numpy(), expected)
        np.testing.assert_array_equal(whole[PLAN.entries(name, channels, whole.shape)].numpy(), expected)
    assert small["bias"] is large["bias"]
