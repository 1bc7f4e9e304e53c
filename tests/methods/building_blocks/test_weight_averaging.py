"""What averaging asks of models, by how weights are averaged and which parts of them."""

from __future__ import annotations

import pytest

import polyfed as pf
from polyfed.core.method import Requirements
from polyfed.methods.building_blocks.weight_averaging import requirements

HINT = "use method.aggregation = 'same-shape'"


def test_layer_by_layer_tensors_of_one_name_have_one_shape_and_not_heads_alone_are_averaged() -> None:
    assert requirements("layer-wise") == Requirements(shared_shapes=True, more_than_head=True, hint=HINT)


def test_within_an_architecture_anything_goes() -> None:
    assert requirements("same-shape") == Requirements(hint=HINT)


def test_of_some_parts_the_heads_are_the_clients_own() -> None:
    asked = requirements("layer-wise", split_model=True, parts=("extractor",))
    assert asked == Requirements(split_model=True, shared_shapes=True, shared_parts=("extractor",), hint=HINT)


@pytest.mark.parametrize("name", ["split_model", "same_cut_shapes", "gridlike_cuts"])
def test_all_else_is_handed_on(name: str) -> None:
    asked = requirements("same-shape", **{name: True}, hint="another way")
    assert asked == Requirements(**{name: True}, hint="another way")


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (pf.methods.FedAvg(), requirements("layer-wise")),
        (pf.methods.FedAvg(aggregation="same-shape"), requirements("same-shape")),
        (pf.methods.SCAFFOLD(aggregation="same-shape"), requirements("same-shape")),
    ],
)
def test_methods_ask_for_what_their_aggregation_needs(method: pf.Method, expected: Requirements) -> None:
    assert method.requirements == expected
