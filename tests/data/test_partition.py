"""Partitions: every row accounted for, sizes and classes as promised, draws that repeat, and every refusal."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyfed.data.datasets import DatasetSource, from_tensors
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.data.partition import (
    Partition,
    by_class,
    by_group,
    dirichlet,
    draw_balanced,
    draw_rows,
    iid,
    partition_like,
)
from polyfed.errors import ConfigError
from tests.helpers.refusals import refusal
from tests.helpers.small_data import federate, ids, purposes

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def labels(each: int = 100, class_count: int = 10, seed: int = 0) -> np.ndarray:
    """`each` rows of every class, shuffled."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(class_count), each))


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def held(partition: Partition) -> int:
    return sum(map(len, partition.rows))


def check(partition: Partition, y: np.ndarray, clients: int) -> None:
    """What holds for every partition."""
    assert len(partition.rows) == clients
    every = np.concatenate(partition.rows)
    assert len(np.unique(every)) == len(every)
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


@quick
@given(st.integers(1, 60), st.integers(60, 200), st.integers(0, 2**32))
def test_iid_sizes_differ_by_at_most_one_and_nothing_is_left(clients: int, rows: int, seed: int) -> None:
    y = generator(seed).integers(0, 5, rows)
    partition = iid(y, clients, generator(seed))
    check(partition, y, clients)
    sizes = [len(r) for r in partition.rows]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == rows


@pytest.mark.parametrize(("alpha", "clients"), [(0.5, 100), (1e-3, 5), (1e6, 7)])
def test_dirichlet_uses_every_row_and_keeps_the_minimum(alpha: float, clients: int) -> None:
    y = labels(500)
    partition = dirichlet(y, clients, generator(), alpha)
    check(partition, y, clients)
    assert held(partition) == len(y)
    assert min(len(rows) for rows in partition.rows) >= 10


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


def test_ring_by_hand() -> None:
    y = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
    # class 0, of 4 rows: clients 0, 2; class 1, of 3: clients 0, 1; class 2, of 3: clients 1, 2
    counts = [[2, 2, 0], [0, 1, 2], [2, 0, 1]]
    dealt = [by_class(y, 3, generator(seed), 2, "round_robin") for seed in range(20)]
    assert all(table(partition, y, 3).tolist() == counts for partition in dealt)
    assert len({tuple(partition.rows[0].tolist()) for partition in dealt}) > 5


def test_shamsian_shares_and_sizes() -> None:
    y = labels(600)
    partition = by_class(y, 10, generator(), 2, "shamsian")
    counts = table(partition, y)
    assert partition.shares is not None
    assert np.array_equal(counts, np.floor(600 * partition.shares).astype(int))
    given = partition.shares[partition.shares > 0]
    assert given.min() >= 0.4  # two draws in [0.4, 0.6], normalized: 0.4 / 1.0 to 0.6 / 1.0
    assert given.max() <= 0.6
    assert np.allclose(partition.shares.sum(axis=0), 1)
    assert len(y) - held(partition) <= 10


def test_shamsian_warns_of_whole_shares_that_stay_unused() -> None:
    y = labels()
    with pytest.warns(UserWarning, match="leaves 400 of 1000 rows unused"):
        partition = by_class(y, 3, generator(), 2, "shamsian")
    assert held(partition) == 600
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_class(y, 10, generator(), 2, "shamsian")


@pytest.mark.parametrize(
    ("function", "y", "clients", "options", "problem"),
    [
        (dirichlet, labels(), 101, {}, "at least 1010 rows for 101 clients"),
        (dirichlet, labels(20), 20, {"alpha": 0.01}, r"one of 1000 draws.*larger alpha"),
        (by_class, labels(), 12, {"classes_per_client": 2, "class_assignment": "shards"}, "use 10 or 15 clients"),
        (by_class, labels(), 10, {"classes_per_client": 11}, "at most 10 classes"),
        (by_class, np.array([0] * 30 + [1]), 4, {"classes_per_client": 1}, "client 3 has none"),
        (iid, np.array([0, 1, 2]), 4, {}, "as many clients as rows"),
        (dirichlet, np.zeros(100, dtype=int), 2, {"min_samples": 51}, "min_samples of at most 50"),
    ],
)
def test_what_cannot_be_dealt_is_refused(
    function: Callable[..., Partition], y: np.ndarray, clients: int, options: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        function(y, clients, generator(), **options)


@pytest.mark.parametrize("name", [*DRAWN, "round_robin"])
def test_the_test_side_has_the_training_classes_and_shares(name: str) -> None:
    y, other = labels(500), labels(100, seed=1)
    partition = DRAWN[name](y, generator()) if name in DRAWN else by_class(y, 20, generator(), 2, "round_robin")
    alike = partition_like(partition, other, generator())
    check(alike, other, 20)
    assert held(alike) == len(other)
    train, test = table(partition, y), table(alike, other)
    assert partition.shares is not None
    assert (np.abs(test - 100 * partition.shares) < 1).all()
    assert (train[test > 0] > 0).all()


def test_alike_balances_sizes_where_shares_are_equal() -> None:
    y = labels(30)
    partition = Partition(iid(y, 30, generator()).rows, np.full((30, 10), 1 / 30))
    alike = partition_like(partition, labels(10), generator())  # 100 rows, 10 of each class
    sizes = [len(rows) for rows in alike.rows]
    assert max(sizes) - min(sizes) <= 1


def test_a_partition_refuses_shared_and_odd_rows() -> None:
    for rows in ((np.array([0, 1]), np.array([1, 2])), (np.array([0, 0]),)):
        with pytest.raises(ConfigError, match="more than once"):
            Partition(rows)
    for odd in (np.array([0.0]), np.array([-1]), np.array([[0]]), np.array([0], dtype=np.int32)):
        with pytest.raises(ConfigError, match="int64 row numbers"):
            Partition((odd,))


@quick
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any), st.integers(0, 1000))
def test_every_beginning_of_an_order_has_its_classes(sizes: list[int], seed: int) -> None:
    """Evenly, or in the proportion of the whole; fewer rows are among more."""
    have = np.array(sizes)
    y = generator(seed).permutation(np.repeat(np.arange(len(have)), have))
    rows = np.arange(100, 100 + len(y))
    of_row = np.concatenate([np.zeros(100, dtype=int), y])
    fewer: set[int] = set()
    for most in range(1, len(y) + 1):
        even = draw_balanced(y, most, generator(seed))
        assert len({*even.tolist()}) == most
        level = np.bincount(y[even], minlength=len(have))
        assert level.max() - level[level < have].min(initial=level.max()) <= 1
        drawn = draw_rows(rows, of_row, most, generator(seed))
        assert len(drawn) == most
        assert fewer < set(drawn.tolist()) <= set(rows.tolist())
        fewer = set(drawn.tolist())
        share = np.bincount(of_row[drawn], minlength=len(have))
        assert (np.abs(share - have * (most / len(y))) <= 1 + len(have) / 8).all()
    assert draw_rows(rows, of_row, None, generator(seed)) is rows


def test_drawn_rows_are_of_all_places_and_classes_alike() -> None:
    """Of 1000 rows in order any part is drawn, and of 8 equal classes any may have one row more."""
    y = np.arange(1000) % 8
    drawn = np.stack([draw_rows(np.arange(1000), y, 100, generator(seed)) for seed in range(200)])
    assert drawn.mean() == pytest.approx(499.5, abs=10)
    each = np.bincount(drawn.ravel(), minlength=1000)
    assert (each.mean(), each.min() > 4, each.max() < 40) == (20, True, True)
    by_class_ = np.bincount(y[drawn].ravel(), minlength=8)
    assert np.abs(by_class_ / 200 - 12.5).max() < 0.15
    assert draw_rows(np.arange(1000), y, 6, generator(7)).tolist() == [65, 151, 213, 816, 900, 923]  # for good


def users(train: list[Any], test: list[Any] | None, test_column: bool = True) -> DatasetSource:
    """A source whose input is the row's number in the pool and whose column "user" is given."""

    def side(count: int, start: int) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(start, start + count, dtype=np.float32)[:, None], np.arange(count) % 2

    return from_tensors(
        side(len(train), 0),
        None if test is None else side(len(test), len(train)),
        2,
        train_columns={"user": train},
        test_columns={"user": test} if test is not None and test_column else None,
    )


def deal(source: DatasetSource, seed: int = 0, **options: Any) -> FederatedDataset:
    return federate(source, **{"partition": "by_group", "group_by": "user", "rng": purposes(seed), **options})


def test_one_client_per_value_in_sorted_order() -> None:
    values = np.array(["b", "a", "c", "a", "b", "b"])
    for clients in (None, 3):
        partition = by_group(values, clients, generator())
        assert [rows.tolist() for rows in partition.rows] == [[1, 3], [0, 4, 5], [2]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=2, max_size=7), st.integers(1, 4), st.integers(0, 99))
def test_whole_groups_are_balanced(sizes: list[int], clients: int, seed: int) -> None:
    clients = min(clients, len(sizes) - 1)
    values = generator(seed).permutation(np.repeat(np.arange(len(sizes)) * 3 - 5, sizes))
    partition = by_group(values, clients, generator(seed))
    assert sorted(itertools.chain(*(rows.tolist() for rows in partition.rows))) == list(range(len(values)))
    homes = [set(values[rows].tolist()) for rows in partition.rows]
    assert all(homes)
    assert sum(map(len, homes)) == len(sizes)  # no value in two clients
    held = [len(rows) for rows in partition.rows]
    best = min(  # of all deals, by trying them
        max(sum(s for s, c in zip(sizes, deal_, strict=True) if c == client) for client in range(clients))
        for deal_ in itertools.product(range(clients), repeat=len(sizes))
    )
    assert max(held) <= 4 / 3 * best
    assert max(held) - min(held) <= max(sizes)


def test_the_official_test_side_follows_the_values() -> None:
    source = users([3, 3, 3, 9, 9, 9, 5, 5], [9, 3, 3, 7, 5, 9, 0])
    federated = deal(source, split="official")
    assert [ids(c.train) for c in federated.clients] == [[0, 1, 2], [6, 7], [3, 4, 5]]
    assert [ids(c.test) for c in federated.clients] == [[9, 10], [12], [8, 13]]
    assert federated.unused == 2  # the test rows of 7 and 0, whom nobody holds
    fewer = deal(source, split="official", num_clients=2)
    for client in fewer.clients:
        values = {[3, 3, 3, 9, 9, 9, 5, 5, 9, 3, 3, 7, 5, 9, 0][row] for row in ids(client.train)}
        assert {[9, 3, 3, 7, 5, 9, 0][row - 8] for row in ids(client.test)} == values
    assert fewer.unused == 2


def test_values_of_few_rows_are_left_out() -> None:
    values = np.array([*"aaaa", "b", *"cccc", *"dd"])
    partition = by_group(values, None, generator(), min_samples=2)
    assert [values[rows[0]] for rows in partition.rows] == ["a", "c", "d"]
    two = by_group(values, 2, generator(), min_samples=2)
    assert sorted(map(len, two.rows)) == [4, 6]
    whole = by_group(values, 2, generator(3))
    assert all(map(np.array_equal, whole.rows, by_group(values, 2, generator(3), min_samples=1).rows))
    with pytest.raises(ConfigError, match="a value to deal by with min_samples = 5 rows, got none with more than 4"):
        by_group(values, None, generator(), min_samples=5)


def test_who_has_no_test_row_trains_and_a_key_leaves_them_out() -> None:
    source = users([*["north"] * 30, *["south"] * 20, "tiny"], None)
    kept = deal(source, split="6:1:3")
    assert [(len(client.train), len(client.test)) for client in kept.clients] == [(18, 9), (12, 6), (1, 0)]
    assert kept.names == ("north", "south", "tiny")
    assert (kept.left_out, kept.unused) == ((), 0)
    fewer = deal(source, split="6:1:3", min_samples=5)
    assert [len(client.train) for client in fewer.clients] == [18, 12]
    assert (fewer.names, fewer.left_out, fewer.unused) == (("north", "south"), ("tiny",), 1)
    assert deal(source, num_clients=2).names == deal(source, num_groups=2).names == ()
    with pytest.raises(ConfigError, match="a test row for one client at least, all 2 have none"):
        deal(users(["a", "b"], None), split="6:1:3")
    with pytest.raises(ConfigError, match=r"client 2 \('tiny'\) has none; leave out .* data.min_samples"):
        deal(source, split="1:0:9")


def test_a_test_side_of_other_users_says_how_to_test_them() -> None:
    with pytest.raises(ConfigError, match=r"all are of others; .* data.split to '8:1:1'.*evaluation.held_out"):
        deal(users([*"aabb"], [*"ccdd"]), split="official")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_clients": 4}, "there are values to deal by (3), got 4"),
        ({"group_by": None}, "expects group_by"),
        ({"group_by": "usr"}, "did you mean 'user'"),
    ],
)
def test_by_group_refuses(options: dict[str, Any], problem: str) -> None:
    assert problem in refusal(lambda: deal(users([1, 1, 2, 2, 3, 3] * 4, None), **options))
