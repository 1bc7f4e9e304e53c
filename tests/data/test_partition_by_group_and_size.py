"""By whom rows come from, and by how many there are: every row accounted for, balance, test sides, refusals."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.data.datasets import DatasetSource, from_tensors
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.data.partition import by_group, groups_like, quantity
from polyfed.data.samples import LabeledSamples
from polyfed.errors import ConfigError
from tests.helpers.small_data import federate, purposes


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def ids(samples: LabeledSamples) -> list[int]:
    return samples.x[:, 0].int().tolist()


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
    given_ = {"num_clients": None, "partition": "by_group", "group_by": "user", "rng": purposes(seed)}
    return federate(source, **{**given_, **options})


# by group ----------------------------------------------------------------------------------------------------------


def test_one_client_per_value_in_sorted_order() -> None:
    values = np.array(["b", "a", "c", "a", "b", "b"])
    for clients in (None, 3):
        partition = by_group(values, clients, generator())
        assert [rows.tolist() for rows in partition.rows] == [[1, 3], [0, 4, 5], [2]]
        assert partition.unused == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=2, max_size=7), st.integers(1, 4), st.integers(0, 99))
def test_whole_groups_are_dealt_in_balance(sizes: list[int], clients: int, seed: int) -> None:
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


def test_the_deal_of_groups_is_seeded() -> None:
    values = np.repeat(np.arange(30), 4)
    a, b, c = ([r.tolist() for r in by_group(values, 5, generator(seed)).rows] for seed in (0, 0, 1))
    assert a == b
    assert a != c
    assert {len(rows) for rows in a} == {24}


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


def test_values_beyond_both_ends_are_nobodys() -> None:
    values = np.array(["f", "f", "k"])
    alike = groups_like(by_group(values, None, generator()), values, np.array(["a", "f", "g", "k", "zz"]))
    assert [rows.tolist() for rows in alike.rows] == [[1], [3]]
    assert alike.unused == 3


def test_pooled_sides_holdout_caps_and_a_common_test() -> None:
    train, test = [user for user in range(4) for _ in range(50)], [user for user in range(5) for _ in range(20)]
    source = users(train, test)
    user_of = np.array([*train, *test])
    pooled = deal(source, split="8:1:1", holdout=20, max_train_per_client=30)
    assert len(pooled.clients) == 5  # user 4 occurs in the test side alone
    seen = ids(pooled.holdout)
    for number, client in enumerate(pooled.clients):
        mine = ids(client.train) + ids(client.validation) + ids(client.test)
        assert set(user_of[mine]) == {number}
        assert len(client.train) <= 30
        seen += mine
    assert len(set(seen)) == len(seen) == 300 - pooled.unused
    common = deal(users(train, test, test_column=False), split="9:1:0", test="global", num_clients=2)
    assert len(common.clients[0].test) == 100
    assert common.clients[0].test is common.test
    assert [len(set(user_of[ids(c.train) + ids(c.validation)])) for c in common.clients] == [2, 2]


def test_values_of_few_rows_are_left_out() -> None:
    values = np.array([*"aaaa", "b", *"cccc", *"dd"])
    partition = by_group(values, None, generator(), min_samples=2)
    assert [values[rows[0]] for rows in partition.rows] == ["a", "c", "d"]
    assert partition.unused == 1
    two = by_group(values, 2, generator(), min_samples=2)
    assert sorted(map(len, two.rows)) == [4, 6]
    whole = by_group(values, 2, generator(3))
    assert all(map(np.array_equal, whole.rows, by_group(values, 2, generator(3), min_samples=1).rows))
    with pytest.raises(ConfigError, match="a value to deal by with min_samples = 5 rows, got none with more than 4"):
        by_group(values, None, generator(), min_samples=5)


def test_whoever_has_no_test_row_trains_and_a_key_leaves_them_out() -> None:
    source = users([*["north"] * 30, *["south"] * 20, "tiny"], None)
    kept = deal(source, split="6:1:3")
    assert [(len(client.train), len(client.test)) for client in kept.clients] == [(18, 9), (12, 6), (1, 0)]
    assert kept.names == ("north", "south", "tiny")
    assert (kept.left_out, kept.unused) == ((), 0)
    fewer = deal(source, split="6:1:3", min_samples=5)
    assert [len(client.train) for client in fewer.clients] == [18, 12]
    assert (fewer.names, fewer.left_out, fewer.unused) == (("north", "south"), ("tiny",), 1)
    assert deal(source, num_clients=2).names == deal(source, num_groups=2, num_clients=None).names == ()
    with pytest.raises(ConfigError, match="a test row for one client at least, all 2 came out with none"):
        deal(users(["a", "b"], None), split="6:1:3")
    with pytest.raises(ConfigError, match=r"client 2 \('tiny'\) came out with none; leave out .* data.min_samples"):
        deal(source, split="1:0:9")


def test_a_test_side_of_other_users_says_how_to_test_them() -> None:
    with pytest.raises(ConfigError, match=r"others \(user: c, d\); .* data.split to '8:1:1'.*evaluation.held_out"):
        deal(users([*"aabb"], [*"ccdd"]), split="official")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_clients": 4}, "there are values to deal by (3), got 4"),
        ({"num_clients": 0}, "clients"),
        ({"group_by": None}, "expects group_by"),
        ({"group_by": "usr"}, "did you mean 'user'"),
        ({"partition": "iid"}, "clients"),
    ],
)
def test_by_group_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        deal(users([1, 1, 2, 2, 3, 3] * 4, None), **options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_test_side_without_the_column_is_refused_where_it_is_dealt() -> None:
    source = users([1, 2] * 20, [1, 2] * 20, test_column=False)
    for split in ("official", "8:1:1"):
        with pytest.raises(ConfigError, match="the test side of 'tensors' has no column 'user'"):
            deal(source, split=split)
    for split in ("official", "8:1:1"):
        with pytest.raises(ConfigError, match="one type"):
            deal(users([1, 2] * 20, ["1", "2"] * 20), split=split)


# quantity ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.floats(0.01, 100), st.integers(1, 20), st.integers(0, 999))
def test_quantity_uses_every_row_and_keeps_the_minimum(clients: int, alpha: float, least: int, seed: int) -> None:
    y = np.arange(251) % 5
    partition = quantity(y, clients, generator(seed), alpha, least)
    assert sorted(itertools.chain(*(rows.tolist() for rows in partition.rows))) == list(range(251))
    assert min(map(len, partition.rows)) >= least


def test_sizes_are_the_drawn_proportions() -> None:
    partition = quantity(np.zeros(10_000, dtype=int), 8, generator(3), alpha=0.7, min_samples=10)
    share = np.random.default_rng(3).dirichlet([0.7] * 8)  # the first thing drawn
    sizes = np.array([len(rows) for rows in partition.rows])
    assert (np.abs(sizes - (10 + share * (10_000 - 80))) < 1).all()


def test_alpha_bites_and_labels_stay_as_in_the_whole() -> None:
    y = np.repeat(np.arange(4), [4000, 3000, 2000, 1000])
    spread = {}
    for alpha in (0.3, 100.0):
        partition = quantity(y, 5, generator(1), alpha, 200)
        spread[alpha] = np.ptp([len(rows) for rows in partition.rows])
        for rows in partition.rows:
            share = np.bincount(y[rows], minlength=4) / len(rows)
            assert np.abs(share - [0.4, 0.3, 0.2, 0.1]).max() < 4 * 0.5 / np.sqrt(len(rows))
    assert spread[0.3] > 5 * spread[100.0]


def test_quantity_in_a_federation() -> None:
    rng = np.random.default_rng(0)
    side = lambda n, start: (np.arange(start, start + n, dtype=np.float32)[:, None], rng.integers(0, 3, n))  # noqa: E731
    source = from_tensors(side(900, 0), side(300, 900), 3)
    a, b, c = (
        federate(
            source,
            num_clients=4,
            partition="quantity",
            rng=purposes(s),
            split="official",
            dirichlet_alpha=0.5,
            min_samples=30,
        )
        for s in (0, 0, 1)
    )
    assert [ids(x.train) for x in a.clients] == [ids(x.train) for x in b.clients]
    assert [len(x.train) for x in a.clients] != [len(x.train) for x in c.clients]
    assert sum(len(x.train) + len(x.test) for x in a.clients) == 1200
    for client in a.clients:  # the test side in the same sizes
        assert len(client.test) == pytest.approx(len(client.train) / 3, abs=3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alpha": 0.0}, "quantity"),
        ({"min_samples": 0}, "min_samples"),
        ({"min_samples": 51}, "min_samples of at most 50"),
    ],
)
def test_quantity_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        quantity(np.zeros(100, dtype=int), 2, generator(), **options)
