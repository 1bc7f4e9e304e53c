"""Fixed point against exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyfed.functional import fixed_point

CLIENTS = 5
ROWS = 7
ALL = CLIENTS * ROWS


@given(
    st.sampled_from([torch.float32, torch.float64]),
    st.lists(st.floats(-1, 1, width=32), min_size=CLIENTS, max_size=CLIENTS),
)
def test_totals_are_exact_but_for_the_unit(kind: torch.dtype, parts: list[float]) -> None:
    largest = fixed_point.LARGEST[kind] * ROWS
    given_up = [{"x": torch.tensor(part * largest, dtype=kind), "a": torch.ones(2, 3)} for part in parts]
    sent = [fixed_point.encode(one, ROWS, ALL) for one in given_up]
    assert sent[0]["x"].shape == ((5,) if kind == torch.float32 else (10,))
    total = fixed_point.decode(fixed_point.add_up(sent), ALL)
    assert total["x"].dtype == kind
    exact = sum(Fraction(float(one["x"])) for one in given_up)
    unit = 2.0 ** (-38 if kind == torch.float32 else -66) * fixed_point.LARGEST[kind] * 2 * ALL
    rounding = abs(float(exact)) * torch.finfo(kind).eps
    assert abs(float(total["x"]) - float(exact)) <= CLIENTS * unit / 2 + rounding
    assert torch.equal(total["a"], torch.full((2, 3), float(CLIENTS)))


def test_any_order_and_limbs_give_the_same_bytes() -> None:
    sent = [fixed_point.encode({"b": torch.randn(4), "a": torch.randn(3, 2).double()}, 5, 20) for _ in range(4)]
    total = fixed_point.add_up(sent)
    other = fixed_point.add_up(sent[::-1])
    assert all(torch.equal(total[name], other[name]) for name in total)
    limbs = fixed_point.limbs_of(total)
    assert limbs.shape == (3 * 2 * 2 + 4,)
    back = fixed_point.from_limbs(limbs, total)
    assert all(torch.equal(total[name], back[name]) for name in total)


@pytest.mark.parametrize("wrong", [torch.tensor(float("nan")), torch.tensor(4096.5 * 2)], ids=["nan", "large"])
def test_numbers_beyond_the_range_are_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="at most 4096 per row in 'w'"):
        fixed_point.encode({"w": wrong}, 2, 100)
