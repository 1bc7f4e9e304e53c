"""Clients with label spaces of their own: dealt, refused or run, and used afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.errors import ConfigError
from polyfed.experiments.prediction import predict
from tests.helpers import regression

RECIPE = {
    "data": {
        "dataset": "digits",
        "num_clients": 3,
        "partition": "by_class",
        "classes_per_client": 3,
        "label_space": "own",
        "split": "6:2:2",
        "max_train_per_client": 30,
    },
    "models": {"architectures": ["digits-cnn1", "digits-cnn2"]},
    "method": {"name": "fedrep", "aggregation": "same-shape"},
    "training": {"rounds": 1, "batch_size": 10, "lr": 0.05},
    "run": {"executor": "serial"},
}


def client(classes: int, names: tuple[str, ...]) -> Client:
    x, y = regression.rows(12, classes)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, classes))
    network = pf.split(layers, head="2", extractor="0")
    labels = (y > y.median()).long() + (y > y.max() - 0.5).long() * (classes > 2)
    return Client(network, (x, labels), (x, labels), class_names=names)


def clients() -> list[Client]:
    return [client(2, ("cat", "dog")), client(3, ("bird", "owl", "jay"))]


def run(method: pf.Method, made: list[Client] | None = None, **more: object) -> object:
    return pf.Federation(made or clients(), method, pf.Training(rounds=1, batch_size=6), **more).run()  # type: ignore[arg-type]


def test_a_recipe_numbers_each_clients_classes(tmp_path: Path) -> None:
    found = pf.run(Recipe.from_dict(RECIPE), out=tmp_path / "run")
    rows = found.result["clients_table"]
    assert [row["class_names"] for row in rows] == [["0", "1", "2"], ["1", "2", "3"], ["2", "3", "4"]]
    assert all(set(row["labels"]) == {"0", "1", "2"} for row in rows)
    assert [row["architecture"] for row in rows] == [f"digits-cnn{n}, 3 classes" for n in (1, 2, 1)]
    made = predict(tmp_path / "run", 1, torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    assert made.class_names == ("1", "2", "3")
    assert made.scores.shape == (2, 3)


@pytest.mark.parametrize("method", [pf.methods.Local(), pf.methods.FedRep(aggregation="same-shape")])
def test_heads_of_different_sizes_train(method: pf.Method) -> None:
    found = run(method)
    assert found.result["accuracy"] is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (pf.methods.FedGH(), "the server trains the header on means of classes"),
        (pf.methods.FedAvg(aggregation="same-shape"), "it averages heads"),
        (pf.methods.FD(), "it averages outputs by class"),
        (pf.methods.FML(), "all clients train one auxiliary model, head included"),
    ],
)
def test_methods_that_share_classes_refuse_before_round_1(method: pf.Method, reason: str) -> None:
    same_size = [client(2, ("cat", "dog")), client(2, ("car", "bus"))]  # heads of one size, of another meaning
    with pytest.raises(ConfigError, match=f"needs the same classes at all clients, as {reason}; client 1 has car, bus"):
        run(method, same_size)


def test_what_does_not_go_with_own_classes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"client 1: expected two or more different class_names, as of others, got"):
        run(pf.methods.Local(), [client(2, ("cat", "dog")), client(2, ())])
    with pytest.raises(ConfigError, match=r"client 0: expected labels below its 2 class_names, got 2"):
        run(pf.methods.Local(), [client(3, ("cat", "dog"))])
    with pytest.raises(ConfigError, match=r"task: expected no classes, as clients have class_names of their own"):
        run(pf.methods.Local(), task=pf.Task(classes=3))
    source = pf.load_dataset("digits")
    with pytest.raises(ConfigError, match=r"expected test = 'local', as clients' classes differ, got 'global'"):
        pf.federate(source, num_clients=2, test="global", label_space="own")
    with pytest.raises(ConfigError, match=r"expected two or more classes at each client, client 0 has one"):
        pf.federate(source, num_clients=2, partition="by_class", classes_per_client=1, label_space="own")
