"""Blocks by name, InCo's correction and InclusiveFL's momentum against NumPy by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyfed.functional import cross_layer
from polyfed.functional.cross_layer import correct_updates, last_blocks, place, shallow_references
from polyfed.models import zoo


def draw(*shape, seed=0, scale=0.01):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numpy_code(g_k, g_0, theta_max, update_max):
    """One kernel, or one tensor, of the authors' code."""
    a, b = g_0.astype(np.float64), g_k.astype(np.float64)
    theta = min(abs((a * b).sum()) / ((a * a).sum() + 1e-7), theta_max)
    long, short = np.sqrt((b * b).sum()), np.sqrt((a * a).sum())
    out = (b / long + theta * a / short) * (long + short) / 2
    return np.clip(out, -update_max, update_max) if update_max else out


@pytest.mark.parametrize("limits", [(5.0, 0.0), (0.3, 0.0), (5.0, 0.008)])
def test_kernel_by_kernel(limits, monkeypatch):
    monkeypatch.setattr(cross_layer, "THETA_MAX", limits[0])
    monkeypatch.setattr(cross_layer, "UPDATE_MAX", limits[1] or np.inf)
    g_k, g_0 = draw(4, 3, 3, 3), draw(4, 3, 3, 3, seed=1)
    found = correct_updates(g_k, g_0).numpy()
    signs = set()
    for o in range(4):
        for i in range(3):
            expected = numpy_code(g_k[o, i].numpy(), g_0[o, i].numpy(), *limits)
            if limits[1]:
                expected = np.clip(expected, -limits[1], limits[1])
            np.testing.assert_allclose(found[o, i], expected, rtol=1e-5, atol=1e-9)
            signs.add(np.sign((g_k[o, i] * g_0[o, i]).sum().item()))
    assert signs == {-1.0, 1.0}


def test_a_kernel_without_an_update_is_left_alone():
    g_k, g_0 = draw(2, 2, 3, 3), draw(2, 2, 3, 3, seed=1)
    g_k[0, 0], g_0[1, 1] = 0.0, 0.0
    found = correct_updates(g_k, g_0)
    assert torch.isfinite(found).all()
    assert torch.equal(found[0, 0], g_k[0, 0])
    assert torch.equal(found[1, 1], g_k[1, 1])
    assert torch.equal(correct_updates(g_k, 0 * g_0), g_k)
    assert found.dtype == g_k.dtype


def zoo_weights(name):
    with torch.device("meta"):
        return zoo.build(name, (3, 32, 32), 10).state_dict()


def test_references_of_a_resnet_are_the_first_blocks_second_convolution():
    weights = zoo_weights("resnet22")
    found = shallow_references(weights)
    assert len(found) == 2 * (1 + 1 + 2 + 2)
    for name, reference in found.items():
        stage, block = name.split(".")[1:3]
        assert block != "0"
        assert reference == f"intermediate.{stage}.0.conv2.weight"
        assert weights[name].shape == weights[reference].shape
    assert shallow_references(zoo_weights("resnet10")) == {}
    assert shallow_references(zoo_weights("fedgh-cnn1")) == {}


def test_last_blocks_of_the_resnets():
    """ResNet10 has 1 1 1 1 blocks, 14 1 1 2 2, 18 2 2 2 2, 22 2 2 3 3, 26 3 3 3 3."""
    chain = {14: {3: 0, 4: 0}, 18: {1: 0, 2: 0}, 22: {3: 1, 4: 1}, 26: {1: 1, 2: 1}}
    small = zoo_weights("resnet10")
    for depth, stages in chain.items():
        large = zoo_weights(f"resnet{depth}")
        found = last_blocks(small, large)
        assert {tuple(name.split(".")[1:3]) for name in found} == {(f"stage{s}", str(b)) for s, b in stages.items()}
        for name, names in found.items():
            stage, block, layer = name.split(".", 3)[1:]
            halves = block == "0" and stage != "stage1"
            changes = halves and (layer.startswith(("conv1", "shortcut")))
            expected = [f"intermediate.{stage}.{int(block) + i}.{layer}" for i in (0, 1)]
            assert names == ([] if changes else expected)
            assert all(large[n].shape == small[name].shape for n in names)
        assert last_blocks(large, small) == {}
        assert last_blocks(large, large) == {}
        small = large


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.3.b.c.d.weight", ("a.", 3, "b.c.d.weight")),
        ("a.1.b.2.c.weight", ("a.1.b.", 2, "c.weight")),  # the last number is the block
        ("layer12.fc.bias", ("layer", 12, "fc.bias")),
        ("0.fc.bias", ("", 0, "fc.bias")),
        ("encoder.layer_7.attention.out.bias", ("encoder.layer_", 7, "attention.out.bias")),
        ("head.weight", None),
        ("extractor.bn1.weight", None),
        ("a.b.weight1", None),  # a tensor's own number, or its layer's, is none
        ("a.7.weight", None),
        ("weight9", None),
    ],
)
def test_the_place_of_a_tensor(name, expected):
    assert place(name) == expected


@pytest.mark.parametrize("kernel", [(1, 3), (3, 1), (2, 2)])
def test_kernels_of_any_form_are_corrected_and_single_weights_are_not(kernel):
    weights = {f"s.{block}.conv.weight": torch.zeros(4, 4, *kernel) for block in range(3)}
    weights |= {f"s.{block}.point.weight": torch.zeros(4, 4, 1, 1) for block in range(3)}
    weights |= {f"s.{block}.fc.weight": torch.zeros(4, 4) for block in range(3)}
    assert shallow_references(weights) == {f"s.{block}.conv.weight": "s.0.conv.weight" for block in (1, 2)}
