"""Masked sums: the total bit for bit, nothing of any message alone, and the closed form that comes of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping

import pytest
import torch
from torch import Tensor

from polyfed.functional import class_statistics
from polyfed.functional.class_statistics import add, subtract
from polyfed.functional.secure_sums import FixedPoint, mask, pair_seeds

POINT = FixedPoint(clients=4)
KEY = bytes(32)
EDGE = 2**63 - 1


def sums(client: int, rows: int = 12) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(client)
    phi = torch.randn(rows, 5, generator=draws)
    return class_statistics.sum_rows(phi, torch.randint(3, (rows,), generator=draws), 3)


def total(messages: Iterable[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    return functools.reduce(add, messages)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


PLAIN = [POINT.encode(sums(client)) for client in range(4)]
SEEDS = pair_seeds(range(4), KEY)
MASKED = [mask(plain, client, SEEDS[client]) for client, plain in enumerate(PLAIN)]


def test_masked_messages_in_any_order_add_up_to_the_plain_ones() -> None:
    for order in itertools.permutations(range(4)):
        assert same(total(MASKED[i] for i in order), total(PLAIN))


def test_where_a_message_is_missing_the_sum_is_another_until_its_seeds_are_told() -> None:
    three = total(MASKED[:3])
    expected = total(PLAIN[:3])
    assert not any(torch.equal(three[name], expected[name]) for name in three)
    told = {client: SEEDS[client][3] for client in range(3)}
    assert same(mask(three, 3, told), expected)


def test_a_mask_is_uniform_bits_that_know_nothing_of_what_they_are_added_to() -> None:
    inputs = [torch.tensor([value] * 400) for value in (0, 1, -1, EDGE, -EDGE - 1)]
    masks = [subtract(mask({"a": x}, 1, SEEDS[1]), {"a": x})["a"] for x in inputs]
    assert all(torch.equal(each, masks[0]) for each in masks)  # and adding a fixed mask is a bijection modulo 2^64
    bits = (masks[0].unsqueeze(1) >> torch.arange(64)) & 1
    assert (bits.double().mean(dim=0) - 0.5).abs().max() < 0.1  # four deviations of a share of 400
    fresh = mask({"a": inputs[0]}, 1, pair_seeds(range(4), bytes([1]) * 32)[1])["a"]
    assert not (fresh == masks[0]).any()


def test_entries_of_one_message_have_masks_of_their_own() -> None:
    masked = mask({name: torch.zeros(50, dtype=torch.int64) for name in "ab"}, 0, SEEDS[0])
    assert not (masked["a"] == masked["b"]).any()


def test_subtracting_is_exact() -> None:
    assert same(subtract(total(PLAIN), PLAIN[1]), total([PLAIN[0], *PLAIN[2:]]))


def test_the_closed_form_of_fixed_point_numbers_is_that_of_floats() -> None:
    exact = functools.reduce(class_statistics.add, map(sums, range(4)))
    found = POINT.decode(total(MASKED))
    assert torch.equal(found["counts"], exact["counts"].double())
    for name in exact:
        torch.testing.assert_close(found[name], exact[name].double(), rtol=0, atol=4 * 2.0**-31)
    one, other = (class_statistics.discriminant(each, 0.1) for each in (found, exact))
    torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)


def test_a_total_at_the_edge_does_not_overflow_and_beyond_it_is_refused() -> None:
    edge = torch.tensor([POINT.largest, -POINT.largest], dtype=torch.float64)
    found = POINT.decode(total([POINT.encode({"a": edge})] * 4))["a"]
    torch.testing.assert_close(found, 4 * edge, rtol=1e-9, atol=0)
    for beyond in (1.01 * POINT.largest, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"a: expected numbers up to 2.147e\+09 with 30 bits .* and 4 clients"):
            POINT.encode({"a": torch.tensor([beyond], dtype=torch.float64)})
