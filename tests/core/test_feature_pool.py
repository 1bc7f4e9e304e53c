"""The pool of pairs: who gets whose, how many, and in which order they are walked through."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyfed.core.feature_pool import draw, gather, minibatch


def upload(sender: int, rows: int) -> dict[str, Any]:
    """Pairs that tell their sender and row: s_in = 100 sender + row, s_out its negative."""
    marks = torch.arange(rows).float() + 100 * sender
    return {"model": {}, "features": {"s_in": marks[:, None].expand(rows, 2).clone(), "s_out": -marks[:, None]}}


def drawn(pool: Any, receiver: int, count: int, mixing: Any = "mix", seed: int = 0) -> list[int]:
    """Marks of the pairs that a client gets."""
    found = draw(pool, receiver, count, mixing, torch.Generator().manual_seed(seed))
    if not found:
        return []
    assert torch.equal(found["s_in"][:, :1], -found["s_out"]), "a pair was torn apart"
    return [int(mark) for mark in found["s_in"][:, 0]]


def test_gathered_pairs_know_their_sender() -> None:
    pool = gather({1: upload(1, 3), 4: upload(4, 2), 6: {"model": {}}})
    assert pool["sender"].tolist() == [1, 1, 1, 4, 4]
    assert pool["s_in"][:, 0].tolist() == [100, 101, 102, 400, 401]
    assert pool["s_out"][:, 0].tolist() == [-100, -101, -102, -400, -401]


@pytest.mark.parametrize("uploads", [{}, {3: {"model": {}}}])
def test_no_pairs_no_pool(uploads: Any) -> None:
    assert gather(uploads) == {}
    assert draw({}, 0, 4, "mix", torch.Generator()) == {}


@pytest.mark.parametrize("mixing", ["mix", "one"])
def test_ones_own_pairs_are_not_drawn_and_nothing_is_drawn_for_them(mixing: Any) -> None:
    pool, draws = gather({2: upload(2, 5)}), torch.Generator().manual_seed(0)
    before = draws.get_state()
    assert draw(pool, 2, 4, mixing, draws) == {}
    assert torch.equal(before, draws.get_state())
    assert all(mark // 100 == 2 for mark in drawn(pool, 0, 4, mixing))


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (4, 4), (9, 9), (50, 9)])
def test_without_replacement_and_never_more_than_there_are(count: int, expected: int) -> None:
    pool = gather({0: upload(0, 4), 1: upload(1, 4), 2: upload(2, 5)})
    marks = drawn(pool, 0, count)
    assert len(marks) == len(set(marks)) == expected
    assert 0 not in {mark // 100 for mark in marks}


def test_mixed_pairs_come_from_everybody_else_and_one_ones_from_one() -> None:
    pool = gather({i: upload(i, 4) for i in range(4)})
    senders = [
        {mark // 100 for mark in drawn(pool, 0, 4, mixing, seed)} for mixing in ("mix", "one") for seed in range(40)
    ]
    assert set.union(*senders[:40]) == set.union(*senders[40:]) == {1, 2, 3}
    assert any(len(s) > 1 for s in senders[:40])
    assert all(len(s) == 1 for s in senders[40:])
    assert len(drawn(pool, 0, 50, "one")) == 4


def test_a_generator_decides() -> None:
    pool = gather({i: upload(i, 4) for i in range(4)})
    assert drawn(pool, 0, 6, seed=1) == drawn(pool, 0, 6, seed=1) != drawn(pool, 0, 6, seed=2)


@pytest.mark.parametrize(("held", "size"), [(10, 4), (8, 4), (5, 3), (7, 1)])
def test_minibatches_go_round_and_round(held: int, size: int) -> None:
    """Each has `size` pairs, and over `held` visits every pair comes up `size` times."""
    pairs = upload(0, held)["features"]
    visits = [minibatch(pairs, visit, size)["s_in"][:, 0].long().tolist() for visit in range(held)]
    line = [mark for visit in visits for mark in visit]
    assert {len(visit) for visit in visits} == {size}
    assert line == list(range(held)) * size
    assert all(torch.equal(b["s_in"][:, :1], -b["s_out"]) for b in (minibatch(pairs, v, size) for v in range(3)))


@pytest.mark.parametrize("held", [1, 3, 4])
def test_few_pairs_are_all_used_in_every_visit(held: int) -> None:
    pairs = upload(0, held)["features"]
    for visit in (0, 5):
        assert torch.equal(minibatch(pairs, visit, 4)["s_in"], pairs["s_in"])
