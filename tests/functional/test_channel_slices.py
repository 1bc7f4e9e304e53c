"""Cutting, putting back and averaging by entries, against loops in NumPy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from polyfed.functional.channel_slices import (
    OUTPUT,
    WHOLE,
    Axis,
    ChannelPlan,
    SlicedModel,
    first_channels,
    partial_mean,
    slice_channels,
    width,
)

PLAN = ChannelPlan(
    axes={
        "conv": (Axis(2), Axis(WHOLE), Axis(WHOLE)),
        "inner": (Axis(3), Axis(2)),
        "flat": (Axis(OUTPUT), Axis(3, repeat=2)),
        "bias": (Axis(OUTPUT),),
        "count": (),
    },
    sizes={2: 5, 3: 4},
)
SHAPES = {"conv": (5, 2, 3), "inner": (4, 5), "flat": (3, 8), "bias": (3,), "count": ()}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def kept(**groups: list[int]) -> dict[int, torch.Tensor]:
    return {int(name[1:]): torch.tensor(channels) for name, channels in groups.items()}


def places(name: str, channels: dict[int, torch.Tensor]) -> list[list[int]]:
    """Per dimension which entries of the large tensor a part holds, by hand."""
    return [
        [c * axis.repeat + i for c in channels[axis.group].tolist() for i in range(axis.repeat)]
        if axis.group in channels
        else list(range(size))
        for axis, size in zip(PLAN.axes[name], SHAPES[name], strict=True)
    ]


def numpy_mean(base, parts, weights):
    found = {}
    for name, whole in base.items():
        total, count = np.zeros(SHAPES[name]), np.zeros(SHAPES[name])
        for part, weight in zip(parts, weights, strict=True):
            if name in part.tensors:
                values = part.tensors[name].double().numpy()
                for here, there in zip(
                    itertools.product(*map(range, values.shape)),
                    itertools.product(*places(name, part.channels)),
                    strict=True,
                ):
                    total[there] += weight * values[here]
                    count[there] += weight
        found[name] = np.where(count > 0, total / np.maximum(count, 1e-300), whole.double().numpy())
    return found


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
    assert small["bias"] is large["bias"]


@pytest.mark.parametrize("weights", [[1.0] * 3, [2.0, 0.5, 3.0]])
def test_the_mean_is_over_those_who_hold_the_entry(weights):
    base = tensors(0)
    held = [kept(g2=[0, 1], g3=[0, 1, 2]), kept(g2=[4, 0, 1], g3=[3, 0]), kept(g2=[0], g3=[1], g1=[2, 0])]
    parts = [
        SlicedModel(slice_channels(PLAN, tensors(seed), channels), channels) for seed, channels in enumerate(held, 1)
    ]
    del parts[1].tensors["bias"]
    found, expected = partial_mean(PLAN, base, parts, weights), numpy_mean(base, parts, weights)
    for name in base:
        np.testing.assert_allclose(found[name].numpy(), expected[name], atol=1e-6)
    untouched = torch.ones(5, dtype=torch.bool)
    untouched[[0, 1, 4]] = False
    assert torch.equal(found["conv"][untouched], base["conv"][untouched])
    assert not torch.equal(found["conv"][0], base["conv"][0])


def test_a_part_of_weight_0_has_no_say_and_nobody_changes_nothing():
    base, other = tensors(0), tensors(1)
    for parts, weights in (([], []), ([SlicedModel(other, {})], [0.0])):
        assert all(torch.equal(t, base[name]) for name, t in partial_mean(PLAN, base, parts, weights).items())
    alike = partial_mean(PLAN, base, [SlicedModel(other, {})] * 3, [0.1, 0.7, 3.0])
    assert all(torch.equal(t, other[name]) for name, t in alike.items()), "the mean of equal entries is that entry"
