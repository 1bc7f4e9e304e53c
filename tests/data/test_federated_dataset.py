"""From a source to clients: sizes, classes, disjointness, caps, holdout, and every refusal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.data.datasets import DatasetSource, from_tensors
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.data.partition import Partition
from polyfed.data.samples import LabeledSamples, TableColumns
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache
from tests.helpers.refusals import refusal
from tests.helpers.small_data import federate, ids, purposes


def numbered(each: int = 500, test_each: int | None = 100, class_count: int = 10) -> DatasetSource:
    """A source whose single input feature is the row's number in the pool, so that rows can be followed."""

    def side(count: int, start: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.random.default_rng(seed).permutation(np.repeat(np.arange(class_count), count))
        return np.arange(start, start + len(y), dtype=np.float32)[:, None], y

    train = side(each, 0, 0)
    return from_tensors(train, None if test_each is None else side(test_each, len(train[1]), 1), class_count)


def deal(source: DatasetSource, seed: int = 0, **settings_: Any) -> FederatedDataset:
    return federate(source, **{"num_clients": 20, "partition": "by_class", "rng": purposes(seed), **settings_})


def sets(federated: FederatedDataset) -> Iterator[LabeledSamples]:
    """Every set of samples, a shared one once."""
    yield federated.holdout
    if federated.test is not None:
        yield federated.test
    for client in federated.clients:
        yield client.train
        yield client.validation
        if federated.test is None:
            yield client.test


def check(federated: FederatedDataset, source: DatasetSource) -> None:
    """Disjoint, complete, in order, labels still with their rows."""
    y = torch.cat([side.y for _, side in source.splits()])
    every: list[int] = []
    for samples in sets(federated):
        mine = ids(samples)
        assert mine == sorted(mine)
        assert samples.y.tolist() == y[mine].tolist()
        every += mine
    assert len(set(every)) == len(every)
    assert len(every) + federated.unused == len(y)


def counts(samples: LabeledSamples, class_count: int = 10) -> np.ndarray:
    return np.bincount(samples.y, minlength=class_count)


def test_the_reference_job() -> None:
    """CIFAR-10's sizes: 20 clients, round robin, 2 classes each, 250 + 250 to train on and 50 + 50 to test on."""
    source, holdout = numbered(5000, 1000), 1000
    federated = deal(source, split="official", max_train_per_client=500, max_test_per_client=100, holdout=holdout)
    check(federated, source)
    for number, client in enumerate(federated.clients):
        mine = np.zeros(10, dtype=int)
        mine[[number % 10, (number + 1) % 10]] = 1
        assert np.array_equal(counts(client.train), 250 * mine)
        assert np.array_equal(counts(client.test), 50 * mine)
        assert len(client.validation) == 0
        assert max(ids(client.train)) < 50000 <= min(ids(client.test))
    assert counts(federated.holdout).tolist() == [holdout // 10] * 10
    assert federated.unused == 60000 - holdout - 20 * 600


@pytest.mark.parametrize("each", [2, 5])
@pytest.mark.parametrize("how", ["round_robin", "shards", "shamsian"])
def test_eight_one_one_pools_both_sides(how: str, each: int) -> None:
    source = numbered(500, 100)
    federated = deal(source, class_assignment=how, classes_per_client=each, split="8:1:1")
    check(federated, source)
    pooled = 0
    for client in federated.clients:
        parts = np.stack([counts(client.train), counts(client.validation), counts(client.test)])
        quota = parts.sum(axis=0) * np.array([[0.8], [0.1], [0.1]])
        assert (np.abs(parts - quota) < 1).all()
        assert np.array_equal(parts[0] > 0, parts[2] > 0)  # the test part has the training classes
        pooled += sum(i >= 5000 for i in ids(client.train))
    assert pooled > 0  # rows of the official test side are trained on: FedGH pools all 60 000
    assert federated.test is None


@settings(max_examples=40, deadline=None)
@given(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(1, 9)), st.integers(0, 1000), st.booleans())
def test_any_ratio_is_kept_within_one_row_per_class(parts_abc: tuple[int, int, int], seed: int, equal: bool) -> None:
    a, b, c = parts_abc
    partition = "iid" if equal else "dirichlet"
    source = numbered(100, None, 4)
    least = {} if equal else {"min_samples": 40}
    federated = deal(source, seed, num_clients=3, partition=partition, split=f"{a}:{b}:{c}", **least)
    check(federated, source)
    assert federated.unused == 0
    for client in federated.clients:
        parts = np.stack([counts(s, 4) for s in (client.train, client.validation, client.test)])
        ratio = np.array([a, b, c]) / (a + b + c)
        assert (np.abs(parts - parts.sum(axis=0) * ratio[:, None]) < 1).all()
        assert (np.abs(parts.sum(axis=1) - parts.sum() * ratio) < 2).all()


@pytest.mark.parametrize("partition", ["dirichlet", "by_class"])
def test_official_sides_stay_apart(partition: str) -> None:
    source = numbered()
    federated = deal(source, num_clients=10, partition=partition, split="official:9:1")
    check(federated, source)
    assert federated.unused == 0
    for client in federated.clients:
        assert max(ids(client.train) + ids(client.validation)) < 5000 <= min(ids(client.test))
        train, validation = counts(client.train), counts(client.validation)
        assert (np.abs(validation - (train + validation) / 10) < 1).all()
        assert (np.abs(counts(client.test) - (train + validation) / 5) < 1).all()


def test_global_test_is_the_official_side_and_one_object() -> None:
    source = numbered()
    federated = deal(source, partition="dirichlet", split="9:1:0", test="global")
    check(federated, source)
    assert federated.test is not None
    assert ids(federated.test) == list(range(5000, 6000))
    assert all(client.test is federated.test for client in federated.clients)
    assert sum(len(c.train) + len(c.validation) for c in federated.clients) == 5000
    assert len(deal(source, split="official", test="global", max_test_per_client=200).clients[0].test) == 200


def test_global_test_without_an_official_side_is_a_stratified_part() -> None:
    source = numbered(500, None)
    federated = deal(source, partition="iid", split="8:1:1", test="global", holdout=500)
    check(federated, source)
    assert federated.test is not None
    assert counts(federated.test).tolist() == [45] * 10  # a tenth of the 450 that the holdout leaves
    assert federated.unused == 0
    train = sum(len(c.train) for c in federated.clients)
    assert train == pytest.approx(8 / 9 * 4050, abs=20)


DEALS: dict[str, dict[str, Any]] = {
    "iid": {},
    "dirichlet": {"dirichlet_alpha": 1.0},
    "round_robin": {"partition": "by_class"},
    "shards": {"partition": "by_class", "class_assignment": "shards"},
    "shamsian": {"partition": "by_class", "class_assignment": "shamsian"},
    "by_group": {"group_by": "person"},
}


@pytest.mark.parametrize("test", ["local", "official", "global"])
@pytest.mark.parametrize("name", DEALS)
def test_nobody_gets_the_first_rows_of_a_file(name: str, test: str) -> None:
    """Of a file in the order of time, what is dealt, split, capped and halved is of all times."""

    def side(count: int, start: int) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(start, start + count, dtype=np.float32)[:, None], np.arange(count) // 2 % 2

    person = np.arange(6000) // 2 % 4
    people = {"train_columns": {"person": person[:4000]}, "test_columns": {"person": person[4000:]}}
    source = from_tensors(side(4000, 0), side(2000, 4000), 2, **people)
    split = {
        "local": {"split": "6:1:3"},
        "official": {"split": "official:4:1"},
        "global": {"split": "4:1:0", "test": "global"},
    }
    given_ = {"num_clients": 4, "partition": name, "holdout": 300, **split[test], **DEALS[name]}
    few, more, half = (
        [deal(source, seed, **given_, **how) for seed in range(12)]
        for how in (
            {"max_train_per_client": 30, "max_test_per_client": 20},
            {"max_train_per_client": 60, "max_test_per_client": 40},
            {"max_train_per_client": 60, "halved_client_fraction": 1.0},
        )
    )
    for small, large, halved in zip(few, more, half, strict=True):
        for one, two, three in zip(small.clients, large.clients, halved.clients, strict=True):
            assert set(ids(one.train)) < set(ids(two.train))
            assert set(ids(one.test)) < set(ids(two.test))
            assert ids(three.train) == ids(one.train)
            assert ids(one.validation) == ids(two.validation)
    middle = 2000 if test != "local" else 3000  # of the rows that are dealt
    tested = {"local": 3000, "official": 5000, "global": 5000}[test]
    for k in range(4):
        assert np.mean([ids(data.clients[k].train) for data in few]) == pytest.approx(middle, rel=0.15)
        assert np.mean([ids(data.clients[k].test) for data in few]) == pytest.approx(tested, rel=0.15)
    again = deal(source, 11, **given_, max_train_per_client=30, max_test_per_client=20)
    assert [ids(client.train) for client in again.clients] == [ids(client.train) for client in few[-1].clients]


@pytest.mark.parametrize("split", ["official:4:1", "4:1:5"])
def test_a_cap_of_labeled_rows_holds_before_they_are_split(split: str) -> None:
    source = numbered(500, 100)
    few, more, all_rows = (
        deal(source, num_clients=2, partition="iid", split=split, max_rows_per_client=most) for most in (20, 60, None)
    )
    for small, large, whole in zip(few.clients, more.clients, all_rows.clients, strict=True):
        assert (len(small.train), len(small.validation)) == (16, 4)
        assert {*ids(small.train), *ids(small.validation)} < {*ids(large.train), *ids(large.validation)}
        assert {*ids(large.train), *ids(large.validation)} < {*ids(whole.train), *ids(whole.validation)}
        assert ids(small.test) == ids(whole.test)


def test_clients_take_the_caps_of_a_list_in_turn() -> None:
    source = numbered(500, None)
    one, other, mixed = (
        deal(source, num_clients=5, partition="iid", max_train_per_client=cap) for cap in (200, 40, [200, 40])
    )
    check(mixed, source)
    assert [len(client.train) for client in mixed.clients] == [200, 40, 200, 40, 200]
    for k, client in enumerate(mixed.clients):
        alike = (one, other)[k % 2].clients[k]
        assert ids(client.train) == ids(alike.train)
        assert (ids(client.test), ids(client.validation)) == (ids(alike.test), ids(alike.validation))
    alone = deal(source, num_clients=5, partition="iid", max_train_per_client=[40])
    assert [ids(client.train) for client in alone.clients] == [ids(client.train) for client in other.clients]


def test_numpys_numbers_and_tuples_are_taken_in_python() -> None:
    data = pf.federate(numbered(500, None), np.int64(2), max_train_per_client=(30, 60))
    assert [len(client.train) for client in data.clients] == [30, 60]


def test_halved_clients_lose_half_of_their_training_rows_and_nothing_else() -> None:
    """FedHeNN's Figure 3."""
    settings_: dict[str, Any] = {"num_clients": 10, "partition": "by_class", "split": "official:9:1"}
    whole, some, more = (deal(numbered(), halved_client_fraction=share, **settings_) for share in (0.0, 0.3, 0.5))
    halved = []
    for few, expected in ((some, 3), (more, 5)):
        sizes = [(len(a.train), len(b.train)) for a, b in zip(whole.clients, few.clients, strict=True)]
        halved.append({client for client, (before, after) in enumerate(sizes) if after != before})
        assert len(halved[-1]) == expected
        assert all(after == (before + 1) // 2 for before, after in sizes if after != before)
        for one, other in zip(whole.clients, few.clients, strict=True):
            assert set(ids(other.train)) <= set(ids(one.train))
            assert (ids(other.test), ids(other.validation)) == (ids(one.test), ids(one.validation))
            assert np.allclose(counts(other.train) / len(other.train), counts(one.train) / len(one.train), atol=0.01)
    assert halved[0] < halved[1]
    assert some.unused == whole.unused + sum(len(whole.clients[k].train) // 2 for k in halved[0])
    other_seed = deal(numbered(), seed=1, halved_client_fraction=0.3, **settings_)
    assert {k for k, client in enumerate(other_seed.clients) if len(client.train) < 300} != halved[0]


PRIVATE = """
[data]
dataset = "csv:{}"
missing_values = "client_mean"
num_clients = 1
split = "6:1:3"
max_train_per_client = 50
halved_client_fraction = 1.0
[models]
architectures = ["mlp-16-32"]
[method]
name = "fedavg"
[privacy]
max_grad_norm = 1.0
noise_multiplier = {}
"""


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_where_noise_hides_rows_a_row_changes_no_other(noise: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    cells = [
        [f"{a:.6f}", "" if i % 3 else f"{b:.6f}", "xy"[i % 2]] for i, (a, b) in enumerate(rng.normal(size=(200, 2)))
    ]
    changed = [list(row) for row in cells]
    changed[0] = [cells[0][0], "900", "y"]
    sides = []
    for name, rows in (("one", cells), ("two", changed)):
        (tmp_path / f"{name}.csv").write_text("\n".join(["a,b,label", *map(",".join, rows)]) + "\n")
        (tmp_path / "r.toml").write_text(PRIVATE.format(tmp_path / f"{name}.csv", noise))
        declared = ["data.mean=[0.0,0.0,0.0,0.0]", "data.std=[1.0,1.0,1.0,1.0]"]
        federated = DataCache().federated(Recipe.load(tmp_path / "r.toml", declared))
        data = federated.clients[0]
        sides.append([{tuple(row) for row in part.x.tolist()} for part in (data.train, data.validation, data.test)])
        assert federated.source.columns.own_means == (not noise)
    others = [len(one - two) for one, two in zip(*sides, strict=True)]
    assert sum(others) <= 1 if noise else sum(others) > 20


def test_where_noise_hides_rows_numbers_to_predict_are_refused() -> None:
    source = from_tensors((torch.randn(60, 3), torch.randn(60)))
    assert deal(numbered(), private=True).source.columns == TableColumns()
    assert "numbers to predict" in refusal(lambda: deal(source, private=True, num_clients=2))


def test_a_partition_of_ones_own() -> None:
    source = numbered(10, 2, 2)
    rows = (np.flatnonzero(source.train.y == 0), np.flatnonzero(source.train.y == 1))
    federated = deal(source, num_clients=2, partition=lambda *given: Partition(rows), split="official")
    check(federated, source)
    assert [counts(c.train, 2).tolist() for c in federated.clients] == [[10, 0], [0, 10]]
    assert [counts(c.test, 2).tolist() for c in federated.clients] == [[2, 0], [0, 2]]
    assert "unknown partition '7'" in refusal(lambda: deal(source, num_clients=2, partition=7))
    beyond = Partition((np.array([0]), np.array([99])))
    with pytest.raises(ConfigError, match="client 1 has 99"):
        deal(source, num_clients=2, partition=lambda *given: beyond, split="official")


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (3, "row numbers for every client.*got int"),
        ([[0, 1]], "partition of 2 clients, got one of 1"),
    ],
)
def test_a_function_that_deals_wrongly(found: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        deal(numbered(20, 4, 2), num_clients=2, partition=lambda y, clients, rng: found, split="official")


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"num_clients": 0}, "data.num_clients: expected at least 1, got 0"),
        ({"partition": "dirichlett"}, "did you mean 'dirichlet'"),
        ({"test": "globe"}, "did you mean 'global'"),
        ({"split": "8-1-1"}, "expected split"),
        ({"split": "0:1:1"}, "train above 0"),
        ({"split": "9:1:0"}, "test part above 0"),
        ({"holdout": 5000}, "holdout below the 5000"),
        ({"max_train_per_client": [10] * 21}, "one cap, or a list of at most 20, one for each client; got 21 caps"),
        ({"num_clients": 5500, "partition": "iid", "split": "1:0:1"}, "test row for every client, client 500 "),
    ],
)
def test_wrong_settings_are_refused_in_one_line(wrong: dict[str, Any], problem: str) -> None:
    assert re.search(problem, refusal(lambda: deal(numbered(), **wrong)))


ALWAYS = {"dataset", "num_clients", "partition", "split", "test", "holdout"}


def recipe(seed: int = 0, **data: Any) -> Recipe:
    models = {"architectures": ["digits-cnn1", "digits-cnn2"]}
    settings = {"data": {"dataset": "digits", **data}, "models": models, "method": {"name": "local"}}
    return Recipe.from_dict({**settings, "run": {"seed": seed}})


def kept(**data: Any) -> dict[str, Any]:
    settings = recipe(**data).to_dict()["data"]
    assert Recipe.from_dict({**recipe(**data).to_dict()}).to_dict()["data"] == settings
    return settings


def test_keys_without_effect_are_left_out() -> None:
    assert set(kept(num_clients=3)) == ALWAYS
    assert set(kept(partition="dirichlet")) == ALWAYS | {"dirichlet_alpha", "min_samples"}
    by_user = {"partition": "by_group", "group_by": "user"}
    assert set(kept(**by_user)) == ALWAYS - {"num_clients"} | {"group_by"}
    assert kept(**by_user, num_clients=10)["num_clients"] == 10
    assert kept(**by_user, min_samples=10)["min_samples"] == 10
    assert set(kept(public_dataset="plants")) == ALWAYS | {"public_dataset"}
    assert kept(dataset="hub:a/b", config="s", revision="r")["config"] == "s"
