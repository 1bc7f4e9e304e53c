"""The pool of pairs: who gets whose, how many, and in which order they are walked through."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyfed.core.client import Client
from polyfed.core.releases import Release
from polyfed.methods.building_blocks.feature_pairs import (
    add_noise,
    collect,
    draw_pairs,
    minibatch,
    releases,
    sample_pairs,
)
from polyfed.models import zoo


def upload(sender: int, rows: int) -> dict[str, Any]:
    """Pairs that tell their sender and row: s_in = 100 sender + row, s_out its negative."""
    marks = torch.arange(rows).float() + 100 * sender
    return {"model": {}, "features": {"s_in": marks[:, None].expand(rows, 2).clone(), "s_out": -marks[:, None]}}


def drawn(pool: Any, receiver: int, count: int, seed: int = 0) -> list[int]:
    """Marks of the pairs that a client gets."""
    found = draw_pairs(pool, receiver, count, torch.Generator().manual_seed(seed))
    if not found:
        return []
    assert torch.equal(found["s_in"][:, :1], -found["s_out"]), "a pair was torn apart"
    return [int(mark) for mark in found["s_in"][:, 0]]


def test_gathered_pairs_know_their_sender() -> None:
    pool = collect({1: upload(1, 3), 4: upload(4, 2), 6: {"model": {}}})
    assert pool["sender"].tolist() == [1, 1, 1, 4, 4]
    assert pool["s_in"][:, 0].tolist() == [100, 101, 102, 400, 401]
    assert pool["s_out"][:, 0].tolist() == [-100, -101, -102, -400, -401]


@pytest.mark.parametrize("uploads", [{}, {3: {"model": {}}}])
def test_no_pairs_no_pool(uploads: Any) -> None:
    assert collect(uploads) == {}
    assert draw_pairs({}, 0, 4, torch.Generator()) == {}


def test_ones_own_pairs_are_not_drawn_and_nothing_is_drawn_for_them() -> None:
    pool, draws = collect({2: upload(2, 5)}), torch.Generator().manual_seed(0)
    before = draws.get_state()
    assert draw_pairs(pool, 2, 4, draws) == {}
    assert torch.equal(before, draws.get_state())
    assert all(mark // 100 == 2 for mark in drawn(pool, 0, 4))


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (4, 4), (9, 9), (50, 9)])
def test_without_replacement_and_never_more_than_there_are(count: int, expected: int) -> None:
    pool = collect({0: upload(0, 4), 1: upload(1, 4), 2: upload(2, 5)})
    marks = drawn(pool, 0, count)
    assert len(marks) == len(set(marks)) == expected
    assert 0 not in {mark // 100 for mark in marks}


@pytest.mark.parametrize(("held", "size"), [(10, 4), (8, 4), (5, 3), (7, 1)])
def test_minibatches_go_round_and_round(held: int, size: int) -> None:
    """Each has `size` pairs, and over `held` visits every pair comes up `size` times."""
    pairs = upload(0, held)["features"]
    visits = [minibatch(pairs, visit, size)["s_in"][:, 0].long().tolist() for visit in range(held)]
    line = [mark for visit in visits for mark in visit]
    assert {len(visit) for visit in visits} == {size}
    assert line == list(range(held)) * size
    assert all(torch.equal(b["s_in"][:, :1], -b["s_out"]) for b in (minibatch(pairs, v, size) for v in range(3)))


@pytest.fixture(scope="module")
def worker() -> Client:
    """A client at work on 300 images."""
    x = torch.randn(300, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    made = Client("net", (x, torch.arange(300) % 10))
    made.bound = zoo.build("digits-cnn1", (1, 8, 8), 10)
    return made


def pairs(worker: Client, level: float, bound: float = 0.0) -> dict[str, torch.Tensor]:
    return sample_pairs(worker, 200, level, torch.Generator().manual_seed(3), bound)


def test_rows_of_pairs_are_bounded(worker: Client) -> None:
    plain, bounded = pairs(worker, 0.0), pairs(worker, 0.0, 0.5)
    lengths = plain["s_in"].flatten(1).norm(dim=1)
    assert (lengths > 0.5).any()
    expected = plain["s_in"] * (0.5 / lengths.clamp(min=0.5)).view(-1, 1, 1, 1)
    assert torch.allclose(bounded["s_in"], expected)
    assert all(bool((s.flatten(1).norm(dim=1) < 0.5 + 1e-5).all()) for s in bounded.values())
    for name, s in pairs(worker, 0.0, 1e6).items():
        assert torch.equal(s, plain[name])


def test_their_noise_is_over_the_bound_and_not_over_the_features(worker: Client) -> None:
    quiet, loud = pairs(worker, 0.0, 0.5), pairs(worker, 3.0, 0.5)
    noise = loud["s_in"] - quiet["s_in"]
    assert float(noise.std()) == pytest.approx(3.0 * 0.5, rel=0.02)
    again = pairs(worker, 3.0, 0.25)["s_in"] - pairs(worker, 0.0, 0.25)["s_in"]
    assert torch.allclose(again, noise / 2, atol=1e-5)
    assert not torch.equal(loud["s_out"], quiet["s_out"])


def test_what_pairs_give_away() -> None:
    assert releases(0.5, 3.0, 8, 100) == (Release("features", "sample", 1.5, 8, 100),)
    assert releases(0.5, 3.0, 8, 5) == (Release("features", "sample", 1.5, 5, 5),)
    assert releases(0.0, 3.0, 8, 100) == releases(0.5, 0.0, 8, 100) == ()


def test_sigma_is_constant_for_the_gradient_and_per_client_under_vmap() -> None:
    g = torch.Generator().manual_seed(0)
    s, z = torch.randn(3, 5, 4, generator=g), torch.randn(3, 5, 4, generator=g)
    s[1] *= 10
    grad = torch.func.grad(lambda s: (add_noise(s, 0.8, z[0]) * z[1]).sum())(s[0])
    torch.testing.assert_close(grad, z[1])
    together = torch.func.vmap(lambda s, z: add_noise(s, 0.8, z))(s, z)
    for k in range(3):
        torch.testing.assert_close(together[k], add_noise(s[k], 0.8, z[k]))
