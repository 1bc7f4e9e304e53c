"""The block of a tensor, by its name."""

from __future__ import annotations

import pytest

from polyfed.functional.network_blocks import blocks


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
    found = blocks([name])
    assert found == ({} if expected is None else {expected[0]: {expected[1]: {expected[2]: name}}})
