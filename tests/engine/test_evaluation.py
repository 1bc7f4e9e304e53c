"""The figures beside the accuracy, accuracy by classes, and several predictors: by hand and by scikit-learn."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import Message, get_group, get_tensor
from polyfed.core.method import Context, Method, hyperparameters
from polyfed.core.modules import export_state
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation, Training
from polyfed.data.samples import LabeledSamples
from polyfed.engine.evaluation import evaluation_record, not_evaluated, summarize
from polyfed.engine.executors import client_scores
from polyfed.engine.federation import Federation, Run
from polyfed.engine.scoring import Score
from polyfed.engine.task import Task
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.experiments.build import build_federation
from polyfed.functional.metrics import class_counts, class_pairs
from polyfed.functional.metrics import f1 as class_f1
from polyfed.methods import FedAvg, FedProto, Local
from polyfed.records.main_score import ACCURACY
from polyfed.report.run_records import load_runs
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import (
    LABELS,
    SHORT,
    TinyFederation,
    difference,
    draw,
    grouped,
    records,
    state,
    tiny_model,
)
from tests.helpers.hospitals import hospitals
from tests.helpers.interrupt import Interrupt
from tests.helpers.quick import others_slow

ALL = ["balanced_accuracy", "f1", "auc", "calibration_error", "confusion"]


# over clients -------------------------------------------------------------------------------------------------------


def score(right: int, wrong: int, auc: float = math.nan) -> Score:
    """Of a client with two classes; the first has all samples."""
    y, predicted = torch.zeros(right + wrong, dtype=torch.int64), torch.tensor([0] * right + [1] * wrong)
    f1 = float(class_f1(class_counts(y, predicted, 2)))
    share = right / (right + wrong) if right + wrong else math.nan
    return Score(right + wrong, {"accuracy": share, "f1": f1, "auc": auc}, pairs=class_pairs(y, predicted), classes=2)


@pytest.mark.parametrize(("clients", "lowest"), [(1, 1), (10, 1), (11, 2), (30, 3), (31, 4)])
def test_the_bottom_decile_is_rounded_up(clients: int, lowest: int) -> None:
    scores = [score(right, 40 - right) for right in reversed(range(clients))]
    found = summarize(scores, "clients")
    assert found["bottom_decile"] == pytest.approx(np.mean(np.arange(lowest) / 40))


def test_a_mean_over_samples_weighs_the_clients_own_figures() -> None:
    scores = [
        score(1, 1, auc=0.5),
        score(3, 0, auc=1.0),
        score(4, 4),
        Score(0, {"accuracy": math.nan, "auc": math.nan}),
    ]
    assert summarize(scores, "samples")["mean"] == pytest.approx(8 / 13)
    assert summarize(scores, "clients")["n"] == 3
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
    from sklearn import metrics as oracle

    federation, done = run(ALL)
    values: dict[str, list[float]] = {"accuracy": [], "balanced_accuracy": [], "f1": [], "auc": []}
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


MISSING = Evaluation(missing_classes=True, extra_stages=["received", "after_training", "personal"])


def run_missing(method: Method, evaluation: Evaluation = MISSING, **options: Any) -> Federation:
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
    federation = run_missing(Local(), Evaluation(missing_classes=True, weighting=weighting))
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


# together ---------------------------------------------------------------------------------------------------------


def each_alone(asked: Sequence[Any], *of: Any) -> list[list[int]]:
    """In the place of what finds who is scored together."""
    return [[place] for place in range(len(asked))]


class Kept(FedAvg):
    """An odd client's network stays as it is."""

    def receive(self, client: Client, message: Message) -> Context:
        return super().receive(client, message) if client.id % 2 == 0 else {}


class NormsStay(FedAvg):
    """Each client has its own statistics of BatchNorm; `receive` is FedAvg's, which is marked."""

    ignores_initial_weights = True

    def broadcast(self, server: Server, client_id: int) -> Message:
        model = get_group(super().broadcast(server, client_id), "model")
        return {"model": {name: tensor for name, tensor in model.items() if "running" not in name}}


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize("method", [FedAvg(), Kept(), NormsStay()], ids=repr)
def test_clients_are_scored_as_each_alone(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, asked = ConformanceKit(method=method, models=[normed]).usual, Evaluation(metrics=ALL)
    found = records(usual.run(method, SHORT, evaluation=asked))
    monkeypatch.setattr(client_scores, "who_are_alike", each_alone)
    assert found == records(usual.run(method, SHORT, evaluation=asked))


def test_where_nobody_lacks_a_class_it_is_refused() -> None:
    clients = [Client(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), draw(9, (0, 1, 2), i), draw(6, (0, 1, 2), 9 + i))
               for i in range(2)]  # fmt: skip
    with pytest.raises(ConfigError, match="missing_classes = true does nothing, as every client has training rows of"):
        Federation(clients, Local(), evaluation=Evaluation(missing_classes=True))
    assert Evaluation(missing_classes=False).effective() == Evaluation().effective()


@hyperparameters
class Shifted(Method):
    """Local, which can add what the server sent last to its scores of class 2: nothing, and 100 after round 2."""

    by: str = "plain"  # "least": the lowest score counts; "shifted": with what is kept

    @property
    def alternative_predictors(self) -> Mapping[str, Method]:
        return {
            other: dataclasses.replace(self, by=other) for other in ("plain", "least", "shifted") if other != self.by
        }

    def init_server(self, server: Server) -> None:
        server.state["shift"] = torch.tensor([0.0])

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {"shift": server.state["shift"]}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if server.round == 2:  # later on nothing changes
            server.state["shift"] = torch.tensor([100.0])

    def receive(self, client: Client, message: Message) -> Context:
        client.state["shift"] = get_tensor(message, "shift").clone()
        return {}

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        scores: Tensor = model(x)
        shift = torch.eye(scores.shape[1])[2] * get_tensor(context, "shift") if "shift" in context else 0.0
        return -scores if self.by == "least" else scores + shift if self.by == "shifted" else scores


def federation(method: Method, **options: Any) -> Federation:
    """Three clients, the last without test data."""
    given = {"rounds": options.pop("rounds", 2), "client_fraction": options.pop("client_fraction", 1.0)}
    builders = {"a": lambda: tiny_model(1, 4, 6), "b": lambda: tiny_model(0, 4, 6)}
    clients = [
        Client("ab"[i % 2], draw(12, (0, 1, 2), i), draw(9 + i, (0, 1, 2), 20 + i) if i < 2 else None, draw(4, (1,), 9))
        for i in range(3)
    ]
    asked = Evaluation(extra_stages=["after_training", "received"], **options.pop("evaluation", {}))
    training = SHORT.model_copy(update=given)
    return Federation(clients, method, training, asked, builders=builders, **grouped(classes=3, **options))


def means(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    found = record["accuracy_by_predictor"]
    return {stage: {name: entry["mean"] for name, entry in by.items()} for stage, by in found.items()}


def test_each_predictor_is_scored_in_every_stage_and_by_hand() -> None:
    fed = federation(Shifted())
    run = fed.run()
    for record in run.history:
        assert (
            list(record["accuracy"])
            == list(record["accuracy_by_predictor"])
            == ["personal", "after_training", "received"]
        )
        for by in record["accuracy_by_predictor"].values():
            assert list(by) == ["least", "shifted"]
            assert all(entry["n"] == 2 for entry in by.values())
    expected = []
    for number in range(2):
        test = fed.clients[number].data.test
        scores = run.models[number](test.x).detach()
        expected.append(float((scores.argmin(1) == test.y).double().mean()))
    last = means(run.history[-1])
    assert last["personal"]["least"] == pytest.approx(sum(expected) / 2)
    # what counts is what is kept, and for `received` what comes: a shift of 100 makes all samples class 2
    shares = [float((fed.clients[i].data.test.y == 2).double().mean()) for i in range(2)]
    assert last["received"]["shifted"] == pytest.approx(sum(shares) / 2)
    assert last["personal"]["shifted"] == run.history[-1]["accuracy"]["personal"]["mean"]
    assert run.result["accuracy_by_predictor"] == run.history[-1]["accuracy_by_predictor"]


LAST = 5  # of the kit's six clients
HELD = Evaluation(held_out=[LAST], held_out_epochs=2, extra_stages=["received", "personal"])
THREE = Training(rounds=3, batch_size=8, lr=0.1)


def usual(method: Method) -> TinyFederation:
    return ConformanceKit(method=method).usual


def run_held(method: Method, evaluation: Evaluation = HELD, training: Training = THREE, **options: Any) -> Federation:
    return usual(method).run(method, training, evaluation=evaluation, **options)


def last(federation: Federation) -> dict[str, Any]:
    return federation.history[-1]


def of_others(federation: Federation) -> dict[str, Tensor]:
    """All states but the newcomer's."""
    return {name: tensor for name, tensor in state(federation).items() if f"client {LAST}:" not in name}


# nobody notices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", others_slow([Local(), FedAvg(), FedProto()], quick=[FedProto()]), ids=lambda method: method.name
)
def test_the_others_train_as_if_there_were_no_such_client(method: Method) -> None:
    world = usual(method)
    without = dataclasses.replace(world, clients=world.clients[:LAST])
    plain = without.run(method, THREE, evaluation=Evaluation(extra_stages=["received", "personal"]))
    held = run_held(method)
    assert difference(of_others(held), of_others(plain)) is None
    for one, other in zip(held.history, plain.history, strict=True):
        assert one["accuracy"] == other["accuracy"]
        assert one["accuracy_per_client"] == [*other["accuracy_per_client"], None]
        assert (one["bytes_up"], one["bytes_down"]) == (other["bytes_up"], other["bytes_down"])
        assert one["samples"] == other["samples"]


# what they are scored with ------------------------------------------------------------------------------------------


def test_of_fedavg_they_receive_the_average() -> None:
    held = run_held(FedAvg())
    average = held.export(2).eval()  # of the same network; what it has trained since is overwritten
    message = FedAvg().broadcast(held.server, 2)
    average.load_state_dict({**average.state_dict(), **message["model"]})  # type: ignore[dict-item]
    own = held.clients[LAST].data.test
    with torch.inference_mode():
        right = (average(own.x).argmax(dim=1) == own.y).double().mean()
    found = last(held)
    assert found["held_out"]["received"]["mean"] == pytest.approx(float(right))
    assert found["held_out_per_client"]["received"] == {str(LAST): pytest.approx(float(right))}
    assert found["held_out"]["received"]["n"] == 1


def test_of_local_they_train_as_a_client_does_in_its_first_round() -> None:
    """With the epochs that were asked for, on its own rows, in its own random streams."""
    one = Training(rounds=1, batch_size=8, lr=0.1)
    held = run_held(Local(), HELD, one)
    trained = run_held(Local(), Evaluation(), one.model_copy(update={"local_epochs": 2}))
    longer = run_held(Local(), HELD.model_copy(update={"held_out_epochs": 40}), one)
    mine = last(held)["held_out_per_client"]
    assert mine["after_training"] == {str(LAST): last(trained)["accuracy_per_client"][LAST]}
    assert last(longer)["held_out"]["after_training"]["mean"] > mine["received"][str(LAST)]
    assert last(longer)["held_out"]["received"] == last(held)["held_out"]["received"]


# executors and resuming -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", others_slow([FedAvg(), FedProto()], quick=[FedAvg()]), ids=lambda method: method.name
)
def test_workers_and_a_resumed_run_give_the_serial_result(method: Method, tmp_path: Path) -> None:
    evaluation = HELD.model_copy(update={"metrics": ["calibration_error", "auc"], "missing_classes": True})
    serial = run_held(method, evaluation)
    pool = run_held(method, evaluation, executor="processes", workers=2)
    assert difference(state(serial), state(pool)) is None
    with pytest.raises(RunInterrupted):
        run_held(method, evaluation, out=tmp_path / "run", loggers=[Interrupt(1)])
    again = usual(method).federation(method, THREE, evaluation=evaluation, out=tmp_path / "run")
    result = again.run(resume=True).result
    assert records(serial) == records(pool) == records(again)
    assert result["held_out"] == last(serial)["held_out"]
    assert result["held_out_per_client"] == last(serial)["held_out_per_client"]


# who they are ---------------------------------------------------------------------------------------------------------


def test_a_number_of_clients_is_drawn_by_the_seed() -> None:
    drawn = {}
    for seed in range(6):
        federation = usual(Local()).federation(Local(), evaluation=Evaluation(held_out=2), seed=seed)
        drawn[seed] = sorted(federation.held_out)
        assert len(drawn[seed]) == 2
        assert federation.present(1) == [number for number in range(6) if number not in drawn[seed]]
        assert federation.facts["evaluation"]["held_out"] == drawn[seed]
    assert len({tuple(numbers) for numbers in drawn.values()}) > 1
    same = usual(FedAvg()).federation(FedAvg(), evaluation=Evaluation(held_out=2), seed=3)
    assert sorted(same.held_out) == drawn[3]


@pytest.mark.parametrize(
    ("held_out", "says"),
    [
        (6, "expected fewer than the 6 clients, as one at least trains, got 6"),
        ([6], "expected numbers of clients from 0 to 5, got 6"),
        (["north"], "got 'north'; groups go by name in a recipe with data.partition 'by_group'"),
    ],
)
def test_who_is_not_there_cannot_be_held_out(held_out: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"evaluation.held_out: .*{says}"):
        usual(Local()).federation(Local(), evaluation=Evaluation(held_out=held_out))


def test_their_models_are_what_they_would_receive(tmp_path: Path) -> None:
    held = run_held(FedAvg(), out=tmp_path / "run")
    assert held.clients[LAST].weights is None
    of_all, ours = (export_state(held.export(number)) for number in (0, LAST))
    assert all(torch.equal(tensor, of_all[name]) for name, tensor in ours.items())
    assert not list((tmp_path / "run" / "models").glob(f"*-00{LAST}*"))
    table = load_runs(tmp_path)[0].result.clients_table
    assert table is not None
    assert [row.held_out for row in table] == [None] * LAST + [True]
    assert table[LAST].accuracy is None


# recipes --------------------------------------------------------------------------------------------------------------


def of_hospitals(tmp_path: Path, evaluation: dict[str, Any], **data: Any) -> Recipe:
    return Recipe.from_dict(hospitals(tmp_path, evaluation=evaluation, data=data))


def test_a_group_goes_by_its_name(tmp_path: Path) -> None:
    found = {}
    for name in ("north", "south", "west"):
        federation = build_federation(of_hospitals(tmp_path, {"held_out": [name]}))
        (found[name],) = federation.held_out
    assert found == {"north": 0, "south": 1, "west": 2}
    both = build_federation(of_hospitals(tmp_path, {}, num_clients=2))
    shared = max(both.clients, key=lambda client: client.n).id
    with pytest.raises(ConfigError, match=rf"got 'south', which shares client {shared} with '.*'; leave out data.num_"):
        build_federation(of_hospitals(tmp_path, {"held_out": ["south"]}, num_clients=2))
