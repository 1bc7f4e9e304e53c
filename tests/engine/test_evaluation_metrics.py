"""The figures beside the accuracy: against scikit-learn, by hand, and as they stand in records and results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as oracle
from torch import nn

import polyfed as pf
from polyfed.core.client import Client
from polyfed.core.settings import Evaluation
from polyfed.engine.evaluation import evaluation_record, not_evaluated, summarize
from polyfed.engine.federation import Federation, Run
from polyfed.engine.scoring import ClientScore
from polyfed.engine.task import Task
from polyfed.errors import ConfigError
from polyfed.methods import FedAvg, Local
from polyfed.results.main_score import ACCURACY
from polyfed.testing.fixtures import SHORT, draw, tiny_model

ALL = ["balanced_accuracy", "f1", "auc", "calibration_error", "confusion"]


def drawn(classes: int, seed: int, n: int = 40, absent: tuple[int, ...] = (), coarse: bool = False) -> Any:
    """Labels without the classes `absent`, and scores that know something; `coarse` ones have many ties."""
    rng = np.random.default_rng(seed)
    y = rng.choice([c for c in range(classes) if c not in absent], n)
    scores = rng.normal(size=(n, classes)) * 2
    scores[np.arange(n), y] += 1
    return torch.from_numpy(y), torch.from_numpy(scores.round() if coarse else scores).float()


def slow_calibration_error(scores: Any, y: Any, bins: int) -> float:
    """Guo et al. (2017), equations 1, 2, 3 and 5, sample by sample."""
    total = 0.0
    members: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for row, label in zip(scores.double().numpy(), y.tolist(), strict=True):
        share = np.exp(row - row.max())
        share /= share.sum()
        confidence = float(share[int(row.argmax())])
        place = next(b for b in range(1, bins + 1) if confidence <= b / bins or b == bins)
        members[place - 1].append((confidence, int(row.argmax()) == label))
    for one in members:
        if one:
            right = sum(hit for _, hit in one) / len(one)
            total += len(one) / len(y) * abs(right - sum(share for share, _ in one) / len(one))
    return total


# over clients -------------------------------------------------------------------------------------------------------


def score(right: int, wrong: int, auc: float = math.nan) -> ClientScore:
    """Of a client with two classes; the first has all samples."""
    return ClientScore(torch.tensor([[right, wrong], [0, 0]]), auc)


@pytest.mark.parametrize(("clients", "lowest"), [(1, 1), (10, 1), (11, 2), (30, 3), (31, 4)])
def test_the_bottom_decile_is_rounded_up(clients: int, lowest: int) -> None:
    scores = [score(right, 40 - right) for right in reversed(range(clients))]
    found = summarize(scores, "clients")
    assert found["bottom_decile"] == pytest.approx(np.mean(np.arange(lowest) / 40))


def test_a_mean_over_samples_weighs_the_clients_own_figures() -> None:
    scores = [score(1, 1, auc=0.5), score(3, 0, auc=1.0), score(4, 4)]
    assert summarize(scores, "samples")["mean"] == pytest.approx(8 / 13)
    assert summarize(scores, "clients", "auc") == {"mean": 0.75, "std": 0.25, "min": 0.5, "max": 1.0, "n": 2}
    assert summarize(scores, "samples", "auc")["mean"] == pytest.approx((2 * 0.5 + 3 * 1.0) / 5)
    halves = [score(1, 1), score(3, 0)]
    assert summarize(halves, "samples", "f1")["mean"] == pytest.approx((2 * 2 / 3 + 3 * 1) / 5)
    assert summarize([score(1, 1)], "clients", "auc") == {}


def test_clients_that_were_not_scored_have_no_figures() -> None:
    asked = Evaluation(metrics=["f1", "confusion"])
    found = evaluation_record({"personal": {2: score(1, 1)}, "received": {}}, ["a", "b", "b"], asked)
    assert found["accuracy_per_client"] == [None, None, 0.5]
    assert list(found["accuracy_per_architecture"]) == ["b"]
    assert list(found["accuracy"]) == list(found["metrics"]) == ["personal"]
    assert found["confusion"] == [[1, 1], [0, 0]]
    nobody = evaluation_record({"personal": {}}, ["a"], asked)
    assert {**nobody, "validation": None} == {**not_evaluated(ACCURACY), "accuracy_per_client": [None]}


# in records ---------------------------------------------------------------------------------------------------------


def run(
    metrics: list[Any] | None = None, out: Path | None = None, resume: bool = False, **options: Any
) -> tuple[Federation, Run]:
    """Four clients of two architectures; the last has no test data."""
    builders = {"a": lambda: tiny_model(1, 4, 6), "b": lambda: tiny_model(0, 4, 6)}
    clients = [
        Client("ab"[i % 2], draw(12, (0, 1, 2), i), draw(9 + i, (0, 1), 20 + i) if i < 3 else None, draw(4, (1,), 9))
        for i in range(4)
    ]
    asked = Evaluation(extra_stages=["received"], **({} if metrics is None else {"metrics": metrics}), **options)
    federation = Federation(clients, Local(), SHORT, asked, task=Task(classes=3), out=out, builders=builders)
    return federation, federation.run(resume=resume)


def by_hand(run: Run, federation: Federation, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's labels and scores."""
    test = federation.clients[number].data.test
    with torch.no_grad():
        return test.y, run.models[number](test.x)


def test_records_and_result_say_what_the_models_do() -> None:
    federation, done = run(ALL)
    values: dict[str, list[float]] = {"accuracy": [], "balanced_accuracy": [], "f1": [], "auc": []}
    values["calibration_error"] = []
    together = np.zeros((3, 3), dtype=int)
    for number in range(3):
        y, scores = by_hand(done, federation, number)
        taken, there = scores.argmax(dim=1), sorted(set(y.tolist()))
        shares = scores.double().softmax(dim=1)
        values["accuracy"].append(oracle.accuracy_score(y, taken))
        values["balanced_accuracy"].append(
            np.mean(oracle.recall_score(y, taken, labels=there, average=None, zero_division=0))
        )
        values["f1"].append(oracle.f1_score(y, taken, labels=there, average="macro"))
        values["calibration_error"].append(slow_calibration_error(scores, y, 15))
        values["auc"].append(np.mean([oracle.roc_auc_score(y == c, shares[:, c]) for c in there]))
        together += oracle.confusion_matrix(y, taken, labels=range(3))
    last, result = done.history[-1], done.result
    for name, each in values.items():
        found = last["accuracy"]["personal"] if name == "accuracy" else last["metrics"]["personal"][name]
        expected = {"mean": np.mean(each), "std": np.std(each), "min": min(each), "max": max(each), "n": 3}
        assert {key: found[key] for key in expected} == pytest.approx(expected), name
    assert result["confusion"] == last["confusion"] == together.tolist()
    assert result["metrics"] == last["metrics"]
    assert set(last["metrics"]) == {"personal", "received"}
    assert result["accuracy_bottom_decile"] == pytest.approx(min(values["accuracy"]))
    assert result["validation"] == last["validation"]
    own = result["accuracy_per_architecture"]
    assert own == last["accuracy_per_architecture"]
    assert own["a"]["mean"] == pytest.approx((values["accuracy"][0] + values["accuracy"][2]) / 2)
    assert (own["a"]["n"], own["b"]["n"]) == (2, 1)
    json.dumps(result, allow_nan=False)


def test_the_table_of_clients() -> None:
    clients = [Client("a", draw(10 + i, (0, 1), i), draw(5, (0, 1), 9)) for i in range(3)]
    training = SHORT.model_copy(update={"client_fraction": 0.4})
    federation = Federation(clients, FedAvg(), training, builders={"a": lambda: tiny_model(1, 4, 6)})
    result = federation.run().result
    table = result["clients_table"]
    assert [(row["id"], row["architecture"], row["samples"]) for row in table] == [(i, "a", 10 + i) for i in range(3)]
    assert [row["accuracy"] for row in table] == result["accuracy_per_client"]
    trained = sum(parameter.numel() for parameter in tiny_model(1, 4, 6).parameters())
    assert [row["parameters"] for row in table] == [trained] * 3
    for client, row in zip(clients, table, strict=True):
        y = client.data.train.y
        assert row["labels"] == {"0": int((y == 0).sum()), "1": int((y == 1).sum())}
    assert result["class_names"] == ["0", "1"]
    for way in ("up", "down"):
        assert sum(row[f"bytes_{way}"] for row in table) == result[f"bytes_{way}"] > 0
    drawn = [number for record in federation.history for number in record["clients"]]
    one = result["bytes_up"] // len(drawn)
    assert [row["bytes_up"] for row in table] == [one * drawn.count(number) for number in range(3)]


def test_classes_without_a_sample_are_not_counted_and_frozen_numbers_are_no_parameters() -> None:
    x, y = torch.randn(5, 4), torch.tensor([2, 2, 0, 2, 2])
    network = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    network[0].requires_grad_(False)
    (row,) = Federation([Client(network, (x, y))], Local(), SHORT).run().result["clients_table"]
    assert row["labels"] == {"0": 1, "2": 4}
    assert row["parameters"] == 6 * 3 + 3


def test_only_what_is_asked_for_is_recorded() -> None:
    assert list(run()[1].result["metrics"]["personal"]) == ["balanced_accuracy", "f1"]
    plain = run([])[1].result
    assert (plain["metrics"], plain["confusion"]) == ({}, None)
    assert plain["accuracy"] == run(ALL)[1].result["accuracy"]
    with pytest.raises(Exception, match="balanced_accuracy"):
        Evaluation(metrics=["accuracy"])  # type: ignore[list-item]


def test_class_names_must_fit() -> None:
    with pytest.raises(ConfigError, match="expected 3 class names, got 2"):
        pf.Federation([Client("a", draw(8, (0, 1, 2), 0))], Local(), task=pf.Task(class_names=["x", "y"]))
