"""Accuracy on the classes that clients have training rows of, and on those that they lack: by hand and by executor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.client import Client
from polyfed.core.method import Method
from polyfed.core.settings import Evaluation, Stage
from polyfed.data.samples import LabeledSamples
from polyfed.engine.federation import Federation
from polyfed.engine.scoring import ClientScore
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.methods import FedAvg, FedProto, Local
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import LABELS, SHORT, difference, draw, records, state
from tests.helpers.quick import others_slow

MISSING = Evaluation(missing_classes=True, extra_stages=["received", "after_training", "personal"])


def run(method: Method, evaluation: Evaluation = MISSING, **options: Any) -> Federation:
    return ConformanceKit(method=method).usual.run(method, SHORT, evaluation=evaluation, **options)


def share_right(network: nn.Module, samples: LabeledSamples, classes: set[int]) -> float | None:
    """The accuracy on some classes, row by row."""
    rows = [place for place, label in enumerate(samples.y.tolist()) if label in classes]
    with torch.inference_mode():
        right = [int(network(samples.x[[row]]).argmax()) == int(samples.y[row]) for row in rows]
    return sum(right) / len(right) if right else None


@pytest.mark.parametrize("weighting", ["clients", "samples"])
def test_by_hand(weighting: Any) -> None:
    """The kit's clients have the classes LABELS; each class's test rows are those of all who have it."""
    federation = run(Local(), Evaluation(missing_classes=True, weighting=weighting))
    tests = [client.data.test for client in federation.clients]
    everybody = LabeledSamples(torch.cat([test.x for test in tests]), torch.cat([test.y for test in tests]))
    own, missing = [], []
    for number, labels in enumerate(LABELS):
        network = federation.export(number).eval()
        own.append(share_right(network, tests[number], set(labels)))
        missing.append(share_right(network, everybody, {0, 1, 2} - set(labels)))
    rows = [sum(label not in labels for label in everybody.y.tolist()) for labels in LABELS]
    known = [(value, count) for value, count in zip(missing, rows, strict=True) if value is not None]
    assert len(known) == 4  # two clients lack nothing
    found = federation.history[-1]["accuracy_by_classes"]["personal"]
    assert found["missing"]["n"] == 4
    counts = [1] * 4 if weighting == "clients" else [count for _, count in known]
    mean = sum(value * count for (value, _), count in zip(known, counts, strict=True)) / sum(counts)
    assert found["missing"]["mean"] == pytest.approx(mean)
    assert found["missing"]["max"] == pytest.approx(max(value for value, _ in known))
    assert found["own"]["mean"] == pytest.approx(sum(value or 0.0 for value in own) / 6)  # 12 test rows each
    assert found["own"] == federation.history[-1]["accuracy"]["personal"]


def test_a_score_on_own_classes_leaves_the_missing_ones_out() -> None:
    missing = ClientScore(torch.tensor([[0, 0, 0], [3, 1, 0], [0, 0, 0]]))
    score = ClientScore(torch.tensor([[4, 1, 0], [2, 5, 0], [1, 0, 1]]), missing=missing)
    assert score.own.confusion.tolist() == [[4, 1, 0], [0, 0, 0], [1, 0, 1]]
    assert score.own.accuracy == pytest.approx(5 / 7)
    assert missing.accuracy == 0.25
    smaller = ClientScore(torch.tensor([[4, 1], [2, 5]]), missing=missing)
    larger = ClientScore(torch.tensor([[4, 1, 0, 0], [2, 5, 0, 0], [0, 0, 0, 0], [0, 0, 1, 2]]), missing=missing)
    assert (smaller.own.total, larger.own.total) == (5, 8)
    assert ClientScore(torch.eye(2, dtype=torch.int64)).own.total == 2


# the same everywhere --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", others_slow([FedAvg(), FedProto()], quick=[FedAvg()]), ids=lambda method: method.name
)
def test_no_bit_of_training_changes_and_workers_agree(method: Method) -> None:
    asked = run(method)
    plain = run(method, MISSING.model_copy(update={"missing_classes": False}))
    pool = run(method, executor="processes", workers=2)
    assert difference(state(asked), state(plain)) is None
    assert records(asked) == records(pool)
    without = [{key: value for key, value in one.items() if key != "accuracy_by_classes"} for one in records(asked)]
    assert without == records(plain)
    stages: list[Stage] = asked.stages
    assert list(asked.history[-1]["accuracy_by_classes"]) == stages
    assert asked.history[-1]["accuracy_by_classes"]["after_training"]["missing"]["n"] == 4


# where it does nothing ------------------------------------------------------------------------------------------------


def test_where_nobody_lacks_a_class_it_is_refused() -> None:
    clients = [Client(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), draw(9, (0, 1, 2), i), draw(6, (0, 1, 2), 9 + i))
               for i in range(2)]  # fmt: skip
    with pytest.raises(ConfigError, match="missing_classes = true does nothing, as every client has training rows of"):
        Federation(clients, Local(), evaluation=Evaluation(missing_classes=True))
    assert Evaluation(missing_classes=False).effective() == Evaluation().effective()


def test_test_rows_must_be_alike() -> None:
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])
    few = Client(nn.Linear(3, 2), (x[:, :3], y), (x[:, :3], y))
    many = Client(nn.Linear(4, 2), (x, y * 0), (x, y))
    with pytest.raises(ConfigError, match="missing_classes: expected test inputs of one shape and type at all clients"):
        Federation([few, many], Local(), evaluation=Evaluation(missing_classes=True))
    with pytest.raises(ConfigError, match="missing_classes: expected test rows at some client, got none"):
        Federation([Client(nn.Linear(4, 2), (x, y))], Local(), evaluation=Evaluation(missing_classes=True))


# recipes and tables ---------------------------------------------------------------------------------------------------

RECIPE: dict[str, Any] = {
    "data": {
        "dataset": "digits",
        "num_clients": 10,
        "partition": "by_class",
        "max_train_per_client": 30,
        "max_test_per_client": 10,
    },
    "models": {"architectures": ["digits-cnn1"]},
    "method": {"name": "local"},
    "training": {"rounds": 1},
    "evaluation": {"missing_classes": True, "metrics": ["calibration_error"]},
}


def test_who_trains_on_everybodys_rows_is_scored_on_what_it_would_lack() -> None:
    pooled = build_federation(pf.Recipe.from_dict({**RECIPE, "run": {"control": "pooled"}}))
    local = build_federation(pf.Recipe.from_dict(RECIPE))
    for one, other in zip(pooled.clients, local.clients, strict=True):
        assert one.missing is not None
        assert other.missing is not None
        assert torch.equal(one.missing.rows, other.missing.rows)
        assert set(one.missing.y.tolist()) == set(range(10)) - set(other.data.train.y.tolist())
