"""Partitioners of flwr-datasets, where the package is installed."""

from __future__ import annotations

import inspect
import sys
import warnings
from typing import Any

import numpy as np
import pytest

from polyfed.data.datasets import DatasetSource, from_tensors
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.data.samples import LabeledSamples
from polyfed.errors import ConfigError
from tests.helpers.small_data import federate, purposes

USERS = [f"u{row % 4}" for row in range(600)]


def source(test: bool = True) -> DatasetSource:
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(6), 100))
    x = np.arange(750, dtype=np.float32)[:, None]
    y_test = np.random.default_rng(1).permutation(np.repeat(np.arange(6), 25))
    train_columns = {"user": USERS, "row": list(range(600))[::-1]}
    return from_tensors((x[:600], y), (x[600:], y_test) if test else None, 6, train_columns=train_columns)


def deal(partition: Any, seed: int = 0, num_clients: int = 5, **arguments: Any) -> FederatedDataset:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return federate(
            source(),
            num_clients=num_clients,
            partition=partition,
            partitioner=arguments,
            rng=purposes(seed),
            split="9:1:0",
            test="global",
        )


def ids(samples: LabeledSamples) -> list[int]:
    return samples.x[:, 0].int().tolist()


def rows(federated: FederatedDataset) -> list[list[int]]:
    return [sorted(ids(client.train) + ids(client.validation)) for client in federated.clients]


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        deal(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def flwr() -> Any:
    return pytest.importorskip("flwr_datasets.partitioner")


REAL = {
    "IidPartitioner": {},
    "LinearPartitioner": {},
    "DirichletPartitioner": {"alpha": 0.5},
    "ShardPartitioner": {"num_shards_per_partition": 2},
    "PathologicalPartitioner": {"num_classes_per_partition": 2, "class_assignment_mode": "first-deterministic"},
    "SizePartitioner": {"partition_sizes": [10, 20, 30, 40, 100]},
    "InnerDirichletPartitioner": {"partition_sizes": [100, 100, 100, 100, 50], "alpha": 0.5},
}


@pytest.mark.parametrize("name", REAL)
def test_rows_are_those_that_the_partitioner_gives_by_itself(flwr: Any, name: str) -> None:
    from datasets import Dataset

    federated = deal(f"flwr:{name}", **REAL[name])
    y = source().train.y.numpy()
    given = dict(REAL[name])
    seed = int(purposes(0)("partition").integers(2**31))
    for key, value in (("num_partitions", 5), ("partition_by", "label"), ("seed", seed)):
        if key in inspect.signature(getattr(flwr, name)).parameters:
            given.setdefault(key, value)
    own = getattr(flwr, name)(**given)
    own.dataset = Dataset.from_dict({"number": list(range(600)), "label": y.tolist()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = [sorted(own.load_partition(client)[:]["number"]) for client in range(5)]
    assert rows(federated) == theirs
    assert federated.unused == 600 - sum(map(len, theirs))
    assert federated.test is not None
    assert len(federated.test) == 150


def test_by_a_column_that_is_known(flwr: Any) -> None:
    federated = deal("flwr:NaturalIdPartitioner", num_clients=4, partition_by="user")
    assert rows(federated) == [list(range(user, 600, 4)) for user in range(4)]
    assert "got 4; set data.num_clients" in refusal("flwr:NaturalIdPartitioner", partition_by="user")
    assert "NaturalIdPartitioner fails" in refusal("flwr:NaturalIdPartitioner", partition_by="age")


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("DirichletPartitionr", {}, "did you mean 'DirichletPartitioner'"),
        ("VerticalEvenPartitioner", {}, "deals columns, not rows"),
        ("Partitioner", {}, "flwr:Partitioner"),
        ("DirichletPartitioner", {"alhpa": 0.5}, "unexpected keyword argument 'alhpa'"),
        ("DirichletPartitioner", {}, "in [data.partitioner]: "),
        ("DirichletPartitioner", {"alpha": -1.0}, "DirichletPartitioner"),
        ("DirichletPartitioner", {"alpha": 0.5, "num_partitions": 4}, "number of clients (5), got 4"),
        ("SizePartitioner", {"partition_sizes": [100] * 7}, "SizePartitioner"),
        ("IidPartitioner", {"seed": 1}, "unexpected keyword argument 'seed'"),
    ],
)
def test_wrong_names_and_arguments(flwr: Any, name: str, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        deal(f"flwr:{name}", **arguments)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", None)
    assert "pip install 'polyfed[flwr-datasets]'" in refusal("flwr:IidPartitioner")
