"""Partitions: every row accounted for, sizes and classes as promised, draws that repeat, and every refusal."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyfed.data.partition import (
    Partition,
    balanced_counts,
    by_class,
    class_shares,
    dirichlet,
    iid,
    partition_like,
    proportional_counts,
)
from polyfed.errors import ConfigError
from polyfed.registry import PARTITIONS

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def labels(each: int = 100, class_count: int = 10, seed: int = 0) -> np.ndarray:
    """`each` rows of every class, shuffled."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(class_count), each))


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def check(partition: Partition, y: np.ndarray, clients: int) -> None:
    """What holds for every partition."""
    assert len(partition.rows) == clients
    every = np.concatenate(partition.rows)
    assert len(np.unique(every)) == len(every)
    assert len(every) + partition.unused == len(y)
    assert every.min() >= 0
    assert every.max() < len(y)
    for rows in partition.rows:
        assert rows.dtype == np.int64
        assert np.array_equal(rows, np.sort(rows))
    assert partition.shares is not None
    assert (partition.shares.sum(axis=0) <= 1 + 1e-9).all()


def table(partition: Partition, y: np.ndarray, class_count: int = 10) -> np.ndarray:
    return np.stack([np.bincount(y[rows], minlength=class_count) for rows in partition.rows])


DRAWN: dict[str, Callable[[np.ndarray, np.random.Generator], Partition]] = {
    "iid": lambda y, rng: iid(y, 20, rng),
    "dirichlet": lambda y, rng: dirichlet(y, 20, rng, 0.5),
    "shards": lambda y, rng: by_class(y, 20, rng, 2, "shards"),
    "shamsian": lambda y, rng: by_class(y, 20, rng, 2, "shamsian"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_draws_repeat_by_seed_and_differ_between_seeds(name: str) -> None:
    y = labels()
    first, again, other = (DRAWN[name](y, generator(seed)) for seed in (0, 0, 1))
    check(first, y, 20)
    assert all(np.array_equal(a, b) for a, b in zip(first.rows, again.rows, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first.rows, other.rows, strict=True))


def test_the_registry_knows_them() -> None:
    assert PARTITIONS["iid"] is iid
    assert PARTITIONS["dirichlet"] is dirichlet
    assert PARTITIONS["by_class"] is by_class


@quick
@given(st.integers(1, 60), st.integers(60, 200), st.integers(0, 2**32))
def test_iid_sizes_differ_by_at_most_one_and_nothing_is_left(clients: int, rows: int, seed: int) -> None:
    y = generator(seed).integers(0, 5, rows)
    partition = iid(y, clients, generator(seed))
    check(partition, y, clients)
    sizes = [len(r) for r in partition.rows]
    assert max(sizes) - min(sizes) <= 1
    assert partition.unused == 0


# dirichlet -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "clients"), [(0.1, 20), (0.5, 20), (0.5, 100), (100.0, 10), (1e-3, 5), (1e6, 7)])
def test_dirichlet_uses_every_row_and_keeps_the_minimum(alpha: float, clients: int) -> None:
    y = labels(500)
    partition = dirichlet(y, clients, generator(), alpha)
    check(partition, y, clients)
    assert partition.unused == 0
    assert min(len(rows) for rows in partition.rows) >= 10


def test_dirichlet_is_balanced_as_the_paper_says() -> None:
    """Recomputed from the law: a client gets rows of a class only while it held fewer than N / K before that class."""
    y = labels(500)
    for seed in range(5):
        counts = table(dirichlet(y, 10, generator(seed), 0.5), y)
        before = np.cumsum(counts, axis=1) - counts
        # a closed client's share is 0: its piece is empty
        assert (counts[before >= len(y) / 10] == 0).all()


def test_dirichlet_skew_falls_with_alpha() -> None:
    y = labels(500)
    spread = [table(dirichlet(y, 10, generator(1), alpha), y).std() for alpha in (0.1, 1.0, 100.0)]
    assert spread[0] > spread[1] > spread[2]


def test_dirichlet_matches_a_literal_transcription_of_its_proportions() -> None:
    y, clients, alpha = labels(400, 4), 6, 0.7
    rng, total = generator(3), 1600
    while True:
        sizes = np.zeros((clients, 4), dtype=int)
        for label in range(4):
            p = rng.dirichlet(np.repeat(alpha, clients))
            p = np.array([0 if sizes[k].sum() >= total / clients else p[k] for k in range(clients)])
            cuts = (np.cumsum(p / p.sum()) * 400).astype(int)[:-1]
            sizes[:, label] = [len(piece) for piece in np.split(np.arange(400), cuts)]
        if sizes.sum(axis=1).min() >= 10:
            break
    assert np.array_equal(table(dirichlet(y, clients, generator(3), alpha), y, 4), sizes)


@pytest.mark.parametrize("alpha", [0, -1, float("nan"), float("inf"), "a lot", None])
def test_dirichlet_refuses_alpha(alpha: object) -> None:
    with pytest.raises(ConfigError, match="finite alpha > 0"):
        dirichlet(labels(), 5, generator(), alpha)  # type: ignore[arg-type]


def test_dirichlet_says_when_it_cannot() -> None:
    with pytest.raises(ConfigError, match="at least 1010 rows for 101 clients"):
        dirichlet(labels(), 101, generator(), 0.5)
    with pytest.raises(ConfigError, match=r"one of 20 draws.*larger alpha"):
        dirichlet(labels(), 90, generator(), 0.05, max_tries=20)
    with pytest.raises(ConfigError, match="min_samples"):
        dirichlet(labels(), 5, generator(), 0.5, min_samples=0)
    with pytest.raises(ConfigError, match="max_tries"):
        dirichlet(labels(), 5, generator(), 0.5, max_tries=0)


@pytest.mark.parametrize("alpha", [1e-320, 1e-12, 1e307])
def test_dirichlet_ends_at_extreme_alphas(alpha: float) -> None:
    y = labels()
    with np.errstate(all="ignore"):
        check(dirichlet(y, 4, generator(), alpha, min_samples=1), y, 4)


# by class ----------------------------------------------------------------------------------------------------------


@quick
@given(
    st.integers(1, 40),
    st.integers(1, 10),
    st.sampled_from(["round_robin", "shards", "shamsian"]),
    st.integers(0, 2**32),
)
def test_every_client_holds_exactly_k_classes(clients: int, each: int, deal: str, seed: int) -> None:
    y = labels(100, 10, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if deal == "shards" and clients * each % 10:
            with pytest.raises(ConfigError, match="divisible by the 10 classes"):
                by_class(y, clients, generator(seed), each, deal)
            return
        partition = by_class(y, clients, generator(seed), each, deal)
    check(partition, y, clients)
    assert ((table(partition, y) > 0).sum(axis=1) == each).all()
    assert partition.shares is not None
    assert np.array_equal(partition.shares > 0, table(partition, y) > 0)


def test_ring_by_hand_and_without_draws() -> None:
    y = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
    rng = generator()
    state = rng.bit_generator.state
    partition = by_class(y, 3, rng, 2, "round_robin")
    # class 0 (rows 0 3 6 9): clients 0, 2; class 1 (1 4 7): clients 0, 1; class 2 (2 5 8): clients 1, 2
    assert [rows.tolist() for rows in partition.rows] == [[0, 1, 6, 7], [2, 4, 8], [3, 5, 9]]
    assert rng.bit_generator.state == state


def test_ring_shares_differ_by_at_most_one_row() -> None:
    y = labels(103)
    counts = table(by_class(y, 25, generator(), 3, "round_robin"), y)
    for label in range(10):
        held = counts[:, label][counts[:, label] > 0]
        assert held.max() - held.min() <= 1
    assert all(set(np.flatnonzero(counts[c])) == {(c + i) % 10 for i in range(3)} for c in range(25))


def test_round_robin_leaves_classes_nobody_holds_and_counts_them() -> None:
    assert by_class(labels(), 2, generator(), 2, "round_robin").unused == 700


def test_shards_sizes_are_the_papers() -> None:
    y = labels(5000)
    for each in (2, 5):
        partition = by_class(y, 100, generator(), each, "shards")
        assert {len(rows) for rows in partition.rows} == {500}
        assert partition.unused == 0


def test_shards_as_the_code_can_deal_a_class_twice() -> None:
    y = labels()
    single = [
        int((table(by_class(y, 100, generator(seed), 2, "shards", distinct=False), y) > 0).sum(axis=1).min())
        for seed in range(3)
    ]
    assert single == [1, 1, 1]  # the authors' deal: about 9.5 % of 100 clients
    check(by_class(y, 100, generator(), 2, "shards", distinct=False), y, 100)


def test_shards_pairs_are_mixed_and_shards_contiguous() -> None:
    y = labels()
    partition = by_class(y, 100, generator(), 2, "shards")
    pairs = {tuple(np.flatnonzero(row)) for row in table(partition, y)}
    assert len(pairs) > 30  # of 45: not always the same pairs
    mine = [int(np.searchsorted(np.flatnonzero(y == 4), r)) for rows in partition.rows for r in rows if y[r] == 4]
    assert sorted(mine) == list(range(100))


def test_shards_says_which_number_of_clients_would_do() -> None:
    with pytest.raises(ConfigError, match="use 10 or 15 clients"):
        by_class(labels(), 12, generator(), 2, "shards")


def test_shamsian_shares_and_sizes() -> None:
    y = labels(600)
    partition = by_class(y, 10, generator(), 2, "shamsian")
    counts = table(partition, y)
    assert partition.shares is not None
    assert np.array_equal(counts, np.floor(600 * partition.shares).astype(int))
    held = partition.shares[partition.shares > 0]
    assert held.min() >= 0.4  # two draws in [0.4, 0.6], normalized: 0.4 / 1.0 to 0.6 / 1.0
    assert held.max() <= 0.6
    assert np.allclose(partition.shares.sum(axis=0), 1)
    assert partition.unused <= 10


def test_shamsian_warns_of_whole_shares_that_stay_unused() -> None:
    y = labels()
    with pytest.warns(UserWarning, match="leaves 400 of 1000 rows unused"):
        partition = by_class(y, 3, generator(), 2, "shamsian")
    assert partition.unused == 400
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_class(y, 10, generator(), 2, "shamsian")


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"classes_per_client": 0}, "classes_per_client"),
        ({"classes_per_client": 11}, "at most 10 classes"),
        ({"classes_per_client": 2.0}, "whole number"),
        ({"classes_per_client": True}, "whole number"),
        ({"class_assignment": "round_robbin"}, "did you mean 'round_robin'"),
    ],
)
def test_by_class_refuses(kwargs: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        by_class(labels(), 10, generator(), **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [iid, dirichlet, by_class])
def test_all_refuse_impossible_clients_and_labels(function: Callable[..., Partition]) -> None:
    y = np.array([0, 1, 2])
    for clients, said in ((4, "as many clients as rows"), (0, "clients"), (-1, "clients"), (1.5, "whole number")):
        with pytest.raises(ConfigError, match=said):
            function(y, clients, generator())
    with pytest.raises(ConfigError, match="whole-number labels"):
        function(np.array([0.0, 1.0]), 1, generator())
    with pytest.raises(ConfigError, match=r"labels in 0\.\.1"):
        function(y, 1, generator(), class_count=2)
    with pytest.raises(ConfigError, match="rows"):
        function(np.array([], dtype=np.int64), 1, generator())


def test_a_client_left_without_rows_is_named() -> None:
    y = np.array([0] * 30 + [1])
    with pytest.raises(ConfigError, match="client 3 came out with none"):
        by_class(y, 4, generator(), 1, "round_robin")


# dealing another side alike ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*DRAWN, "round_robin"])
def test_the_test_side_has_the_training_classes_and_shares(name: str) -> None:
    y, other = labels(500), labels(100, seed=1)
    partition = DRAWN[name](y, generator()) if name in DRAWN else by_class(y, 20, generator(), 2, "round_robin")
    alike = partition_like(partition, other)
    check(alike, other, 20)
    assert alike.unused == 0
    train, test = table(partition, y), table(alike, other)
    assert partition.shares is not None
    assert (np.abs(test - 100 * partition.shares) < 1).all()
    assert (train[test > 0] > 0).all()


def test_alike_keeps_what_nobody_was_dealt_unused() -> None:
    alike = partition_like(by_class(labels(), 2, generator(), 2, "round_robin"), labels(20))
    assert alike.unused == 140
    assert sum(len(rows) for rows in alike.rows) == 60


def test_alike_balances_sizes_where_shares_are_equal() -> None:
    y = labels(30)
    partition = Partition(iid(y, 30, generator()).rows, 0, np.full((30, 10), 1 / 30))
    sizes = [len(rows) for rows in partition_like(partition, labels(10)).rows]  # 100 rows, 10 of each class
    assert max(sizes) - min(sizes) <= 1


def test_alike_refuses() -> None:
    with pytest.raises(ConfigError, match="without"):
        partition_like(Partition((np.arange(3),)), labels())
    with pytest.raises(ConfigError, match=r"labels in 0\.\.9"):
        partition_like(iid(labels(), 2, generator()), np.array([10]))


# the type and the helpers --------------------------------------------------------------------------------------------


def test_a_partition_refuses_shared_and_odd_rows() -> None:
    for rows in ((np.array([0, 1]), np.array([1, 2])), (np.array([0, 0]),)):
        with pytest.raises(ConfigError, match="more than once"):
            Partition(rows)
    for odd in (np.array([0.0]), np.array([-1]), np.array([[0]]), np.array([0], dtype=np.int32)):
        with pytest.raises(ConfigError, match="int64 row numbers"):
            Partition((odd,))
    with pytest.raises(ConfigError, match="unused"):
        Partition((np.array([0]),), -1)


def test_class_shares() -> None:
    shares = class_shares([np.array([0, 1]), np.array([2])], np.array([0, 1, 1, 1]), 3)
    assert shares == pytest.approx(np.array([[1, 1 / 3, 0], [0, 1 / 3, 0]]))


@quick
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(0, 300))
def test_counts_add_up_and_stay_within_what_there_is(available: list[int], total: int) -> None:
    have = np.array(available, dtype=np.int64)
    want = min(total, int(have.sum()))
    level = balanced_counts(have, total)
    assert level.sum() == want
    assert (level <= have).all()
    assert level.max(initial=0) - level[level < have].min(initial=level.max(initial=0)) <= 1
    share = proportional_counts(have, total)
    assert share.sum() == want
    assert (share <= have).all()
    assert (np.abs(share - have * (want / max(1, have.sum()))) < 1).all()
