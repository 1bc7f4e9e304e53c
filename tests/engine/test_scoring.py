"""Scores of predicted numbers, and what is not scored again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import polyfed as pf
from polyfed.core.client import Client
from polyfed.core.settings import Evaluation, Training
from polyfed.data.samples import LabeledSamples, TargetScale
from polyfed.engine.federation import Federation, Run
from polyfed.engine.run import best_record, early_stop_round
from polyfed.engine.task import Output, Task
from polyfed.errors import ConfigError
from polyfed.registry import METHODS
from polyfed.testing.fixtures import received
from tests.helpers import regression

SHORT = Training(rounds=2, batch_size=8, lr=0.05)
TAKE_NUMBERS = sorted(name for name, kind in METHODS.items() if not kind().requirements.classes)


def run(method: pf.Method, executor: Any = "serial", clients: Sequence[Client] | None = None, **more: Any) -> Run:
    made = regression.clients() if clients is None else clients
    return Federation(made, method, more.pop("training", SHORT), executor=executor, **more).run()


def test_the_scores_are_scikit_learns() -> None:
    from sklearn import metrics as oracle

    clients = regression.clients()
    found = run(pf.methods.Local(), clients=clients)
    errors, shares, absolute = [], [], []
    for number, client in enumerate(clients):
        with torch.inference_mode():
            predicted = client.data.train.scale.restored(found.models[number](client.data.test.x)[:, 0]).numpy()
        errors.append(oracle.root_mean_squared_error(client.data.test.y.numpy(), predicted))
        absolute.append(oracle.mean_absolute_error(client.data.test.y.numpy(), predicted))
        shares.append(oracle.r2_score(client.data.test.y.numpy(), predicted))
    assert found.result["rmse_per_client"] == pytest.approx(errors)
    assert found.result["rmse"] == pytest.approx(np.mean(errors))
    assert found.result["rmse_std"] == pytest.approx(np.std(errors))
    assert found.result["rmse_bottom_decile"] == pytest.approx(max(errors))  # the worst tenth
    assert found.result["metrics"]["personal"]["r2"]["mean"] == pytest.approx(np.mean(shares))
    assert found.result["metrics"]["personal"]["mae"]["mean"] == pytest.approx(np.mean(absolute))
    assert found.result["rmse"] < np.mean([float(client.data.test.y.std()) for client in clients])
    assert found.result["score"] == "rmse"
    assert not [key for key in {*found.result, *found.history[0]} if "accuracy" in key]


@pytest.mark.parametrize(
    "executor", ["serial", pf.Execution(executor="processes", workers=2)], ids=["serial", "processes"]
)
def test_a_figure_of_ones_own_is_in_the_unit_of_the_numbers(executor: Any) -> None:
    def mean_target(predicted: Tensor, y: Tensor) -> float:
        return float(y.mean())

    def absolute(predicted: Tensor, y: Tensor) -> float:
        return float((predicted - y).abs().mean())

    x, y = regression.rows(8, 1, mean=50.0, spread=3.0)
    clients = [Client(regression.network(), (x, y), (x, y)) for _ in range(2)]
    own = {"mean_target": mean_target, "absolute": absolute}
    found = run(pf.methods.Local(), executor, clients, metrics=own).result["metrics"]["personal"]
    assert found["mean_target"]["mean"] == pytest.approx(float(y.double().mean()))
    assert found["absolute"] == found["mae"]


@pytest.mark.parametrize(("mean", "std"), [(100.0, 58.0), (1e6, 1e3), (0.0, 1e-6), (-5e8, 1e8)])
def test_numbers_of_any_size_are_learnt_alike(mean: float, std: float) -> None:
    """Targets given to a client are standardized by its training rows; scores are in the unit of what was given."""

    def scored(mean: float, std: float) -> float:
        torch.manual_seed(0)
        sides = [regression.rows(n, n) for n in (24, 8, 9)]
        made = Client(regression.network(), *((x, (mean + std * y.double()).float()) for x, y in sides))
        assert float(made.data.train.y.abs().max()) < 10
        return float(run(pf.methods.Local(), clients=[made]).result["rmse"])

    assert scored(mean, std) / std == pytest.approx(scored(0.0, 1.0), rel=0.02)


@pytest.mark.parametrize("common", [False, True], ids=["own rows", "one test set for all"])
def test_who_holds_the_same_network_predicts_in_a_unit_of_its_own(common: bool) -> None:
    """FedAvg's clients are scored together after receiving; their numbers differ in mean and spread."""
    scales = [TargetScale(1.0, 2.0), TargetScale(50.0, 6.0), TargetScale(500.0, 60.0)]
    tests = [LabeledSamples(*regression.rows(8, 9, 20.0, 5.0))] * 3
    clients = []
    torch.manual_seed(0)
    for number, scale in enumerate(scales):
        train, own = (LabeledSamples(*regression.rows(n, number + n, scale.mean, scale.std)) for n in (24, 8))
        tests[number] = tests[number] if common else own.standardized(scale)
        clients.append(Client(regression.network(), train.standardized(scale), None if common else tests[number]))
    federation = Federation(clients, pf.methods.FedAvg(), SHORT, task=Task(test=tests[0]) if common else None)
    found = federation.run()
    network = regression.network()
    network.load_state_dict(received(federation, 0))
    for scale, test, rmse in zip(scales, tests, found.result["rmse_per_client"], strict=True):
        with torch.inference_mode():
            predicted = scale.restored(network(test.x)[:, 0])
        assert rmse == pytest.approx(float((predicted - test.scale.restored(test.y)).square().mean().sqrt()))


def test_an_averaged_network_is_trained_on_the_squared_error() -> None:
    """One client, one step of SGD on all rows: by hand."""
    torch.manual_seed(0)
    linear = nn.Linear(3, 1)
    x, y = regression.rows(8, 4)
    w, b = linear.weight.detach().clone(), linear.bias.detach().clone()
    error = (x @ w.T + b)[:, 0] - (y - y.mean()) / y.std(correction=0)
    found = run(
        pf.methods.FedAvg(), clients=[Client(linear, (x, y), (x, y))], training=Training(rounds=1, batch_size=8, lr=0.1)
    )
    after = found.models[0]
    assert isinstance(after, nn.Linear)
    torch.testing.assert_close(after.weight.detach(), w - 0.1 * 2 * (error[:, None] * x).mean(0, keepdim=True))
    torch.testing.assert_close(after.bias.detach(), b - 0.1 * 2 * error.mean(0, keepdim=True))


@pytest.mark.parametrize("name", TAKE_NUMBERS)
def test_methods_that_take_numbers(name: str) -> None:
    settings = {"alignment_data": {"size": 16}} if name.startswith("fedhenn") else {}
    task = Task(public=pf.PublicData(LabeledSamples(*regression.rows(16, 99)))) if name.startswith("fedhenn") else None
    found = run(METHODS[name](**settings), clients=regression.clients((4, 4, 4)), task=task)
    assert math.isfinite(found.result["rmse"])


@pytest.mark.parametrize("name", sorted(set(METHODS) - {*TAKE_NUMBERS, "fedlora"}))  # fedlora needs adapters
def test_the_others_refuse_before_round_1_and_say_why(name: str) -> None:
    with pytest.raises(ConfigError) as said:
        run(METHODS[name](), clients=regression.clients((4, 4, 4)))
    problems = getattr(said.value, "problems", [str(said.value)])
    assert any(f"{name} needs classes as labels, as " in line for line in problems), problems


def test_lower_is_better() -> None:
    values = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.4}
    curve = [{"round": n, "final_round": False, "validation": value, "rmse": {}} for n, value in values.items()]
    assert best_record(curve) == curve[1]
    assert early_stop_round(curve, 2, 0.0) == 4
    assert early_stop_round(curve[:3], 2, 0.0) is None
    assert early_stop_round(curve[:2], 1, 1.5) == 2  # by less than 1.5
    found = run(pf.methods.Local(), out=Output(keep="best"))
    best = min(found.history, key=lambda record: record["validation"])
    scores = [record["rmse"]["personal"]["mean"] for record in found.history]
    assert found.result["rmse_best_test_round"] == min(scores)
    assert found.result["rmse_best_by_validation"] == best["rmse"]["personal"]["mean"]


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"task": Task(classes=3)}, "classes: expected none, as labels are floats"),
        ({"evaluation": Evaluation(metrics=["auc"])}, "evaluation.metrics: expected of mae, r2, got 'auc'"),
    ],
)
def test_what_is_of_classes_is_refused(changed: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        run(pf.methods.Local(), **changed)


def test_numbers_and_classes_do_not_mix() -> None:
    clients = regression.clients()
    x, y = regression.rows(8, 1)
    clients[1] = Client(regression.network(), (x, (y > 0).long()), (x, (y > 0).long()))
    with pytest.raises(ConfigError, match=r"client 1, train: expected floats as labels, as of client 0, train"):
        run(pf.methods.Local(), clients=clients)
    wide = [Client(nn.Linear(3, 2), (x, y), (x, y))]
    with pytest.raises(ConfigError, match=r"expected one output per sample, .* got shape \(2,\); write y.long\(\)"):
        run(pf.methods.Local(), clients=wide)
