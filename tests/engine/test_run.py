"""Loggers and figures of one's own; runs and histories as text and in a notebook; where a round's time went."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.method import Method
from polyfed.core.randomness import seeded_global_rng
from polyfed.core.settings import Evaluation, Training
from polyfed.engine.federation import Federation
from polyfed.engine.run import History
from polyfed.errors import ConfigError, RunError
from polyfed.methods.local import Local
from polyfed.testing.fixtures import grouped


def federation(
    rounds: int = 2, evaluation: Evaluation | None = None, method: Method | None = None, **options: Any
) -> Federation:
    """Three clients, two of one network, on three classes; the last one is not scored."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=g), torch.arange(60) % 3
    with seeded_global_rng(0):
        nets = [nn.Linear(4, 3), nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))]
    parts = [(x[k::3], y[k::3].roll(k)) for k in range(3)]
    clients = [Client(net, (a[:14], b[:14]), (a[14:], b[14:])) for net, (a, b) in zip(nets, parts, strict=True)]
    clients[2] = Client(nets[2], parts[2])
    training = Training(rounds=rounds, batch_size=5, lr=0.1)
    plain = {"executor": "serial", **options}
    return Federation(clients, method or Local(), training, evaluation, **grouped(classes=3, **plain))


def kappa(predicted: Tensor, labels: Tensor) -> float:
    """Cohen's."""
    shares = [torch.nn.functional.one_hot(each, 10).double().mean(dim=0) for each in (predicted, labels)]
    chance = float((shares[0] * shares[1]).sum())
    return (float((predicted == labels).double().mean()) - chance) / (1 - chance) if chance < 1 else math.nan


# callbacks


def test_a_function_is_called_with_every_record() -> None:
    seen: list[Mapping[str, Any]] = []
    run = federation(loggers=[seen.append]).run()
    assert seen == run.history
    assert [record["round"] for record in seen] == [1, 2]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (object(), "expected a function of a round's record or an object with one of start, client_done"),
        (History, r"got the class History; write History\(\)"),
    ],
)
def test_what_is_no_logger_is_refused(given: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        federation(loggers=[given])


# figures of one's own


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_a_figure_of_ones_own_stands_beside_the_others(executor: str) -> None:
    if executor == "processes" and sys.platform != "linux":
        pytest.skip("worker processes are forked")
    evaluation = Evaluation(metrics=["f1"], extra_stages=["received"])
    own = {"kappa": kappa, "right": lambda predicted, labels: int((predicted == labels).sum())}
    workers = {"workers": 2} if executor == "processes" else {}
    run = federation(evaluation=evaluation, metrics=own, executor=executor, **workers).run()
    for record in run.history:
        assert set(record["metrics"]) == {"personal", "received"}
        assert set(record["metrics"]["personal"]) == {"f1", "kappa", "right"}
        right = [6 * accuracy for accuracy in record["accuracy_per_client"][:2]]
        found = record["metrics"]["personal"]["right"]
        assert found["n"] == 2, "the third has no test data"
        assert (found["min"], found["max"]) == pytest.approx((min(right), max(right)))
    assert run.result["metrics"] == run.history[-1]["metrics"]


def test_where_it_is_not_defined_it_is_left_out_and_the_rows_cannot_be_spoilt() -> None:
    calls: list[int] = []

    def spoils(predicted: Tensor, labels: Tensor) -> float:
        calls.append(len(predicted))
        predicted.zero_()
        labels.zero_()
        return math.nan

    plain, run = federation().run(), federation(metrics={"odd": spoils}).run()
    assert set(calls) == {6}
    assert run.history[-1]["metrics"] == plain.history[-1]["metrics"]
    assert run.result["accuracy_per_client"] == plain.result["accuracy_per_client"]


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"f1": kappa}, "got 'f1'"),
        ({"accuracy": kappa}, "got 'accuracy'"),
        ({"my kappa": kappa}, "letters, digits"),
        ({"kappa": 3}, "expected a function of a client's predictions and labels as 'kappa', got 3"),
    ],
)
def test_a_wrong_figure_is_refused(metrics: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        federation(metrics=metrics)


def test_a_figure_that_fails_names_itself() -> None:
    def fails(predicted: Tensor, labels: Tensor) -> float:
        raise ValueError("no such class")

    with pytest.raises(RunError, match="metric 'mine': ValueError: no such class"):
        federation(metrics={"mine": fails}).run()
