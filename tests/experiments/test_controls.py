"""What `polyfed compare --controls` runs beside the methods: alone, and training on the rows of all."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.cli import app as cli
from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import get_group, get_tensor
from polyfed.data.samples import ClientData, LabeledSamples
from polyfed.engine.federation import Federation
from polyfed.engine.task import Task
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.experiments.build import build_federation
from polyfed.experiments.controls import controls_of, pooled, runs_alone
from polyfed.experiments.data_cache import DataCache
from polyfed.experiments.pooled import pool
from polyfed.methods import Local
from polyfed.models.zoo import build
from polyfed.report.run_records import load_runs, rows_of_pooled
from polyfed.testing.fixtures import all_state, difference
from tests.helpers.interrupt import Interrupt
from tests.helpers.small_recipe import SMALL

pytestmark = pytest.mark.usefixtures("unrendered")

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    **SMALL,
    "data": {
        "dataset": "digits",
        "num_clients": 3,
        "holdout": 30,
        "max_train_per_client": 40,
        "max_test_per_client": 20,
    },
    "training": {"rounds": 2, "batch_size": 10, "local_epochs": 2},
    "methods": {"fedrep": {"aggregation": "same-shape"}},
}


def recipe(name: str = "", **sections: Mapping[str, Any]) -> Recipe:
    """The small recipe with other settings; its own method or the one of this name."""
    settings = {
        section: {**SETTINGS.get(section, {}), **sections.get(section, {})} for section in {**SETTINGS, **sections}
    }
    found = Recipe.from_dict(settings)
    return found.choose(name) if name else found


def weights(federation: Federation) -> dict[int, dict[str, Tensor]]:
    return {client.id: dict(client.weights or {}) for client in federation.clients}


def run(asked: Recipe, **how: Any) -> Federation:
    federation = build_federation(asked, **how)
    federation.run()
    return federation


# alone, in recipes ------------------------------------------------------------------------------------------------


def test_a_variant_is_alone() -> None:
    asked = recipe(methods={"mine": {"name": "fedgh", "alone": True, "header_epochs": 3}})
    mine = asked.choose("mine")
    assert (mine.name, mine.chosen_method.is_alone, mine.chosen_method.header_epochs) == ("mine", True, 3)
    assert mine.to_dict()["method"]["alone"] is True
    again = Recipe.from_dict(mine.to_dict())
    assert (again.name, again.chosen_method.is_alone) == ("mine", True)
    assert "alone" not in asked.to_dict()["method"]


def test_a_control_of_a_method_is_not_run_alone() -> None:
    asked = recipe(methods={"flat": {"name": "fd", "control": "flat"}})
    assert runs_alone(asked.choose("fd"))
    assert not runs_alone(asked.choose("flat"))


# pooled -----------------------------------------------------------------------------------------------------------


def of_all(data: Any) -> LabeledSamples:
    return LabeledSamples(torch.cat([c.train.x for c in data.clients]), torch.cat([c.train.y for c in data.clients]))


def test_pooled_is_plain_training_on_the_rows_of_all() -> None:
    asked = pooled(recipe())
    done = run(asked)
    data = DataCache().federated(asked)
    # by hand: one client, which has all rows; its number is 0, as that of the first client of its network
    central = Federation(
        [Client("digits-cnn1", of_all(data), data.clients[0].test, prepare=done.clients[0].prepare)],
        Local(),
        asked.training,
        task=Task(classes=10),
        builders={"digits-cnn1": lambda: build("digits-cnn1", (1, 8, 8), 10)},
    )
    central.run()
    mine = weights(done)
    for name, tensor in weights(central)[0].items():
        assert torch.equal(tensor, mine[0][name]), name
    assert all(torch.equal(mine[0][name], mine[2][name]) for name in mine[0]), "clients 0 and 2 share a network"
    assert mine[0].keys() != mine[1].keys() or any(not torch.equal(mine[0][n], mine[1][n]) for n in mine[0])
    assert all(record["bytes_up"] == record["bytes_down"] == 0 for record in done.history[:-1])


def test_a_client_is_tuned_on_its_own_rows() -> None:
    done = build_federation(pooled(recipe(data={"max_train_per_client": [40, 25]})))
    local = build_federation(recipe("local", data={"max_train_per_client": [40, 25]}))
    for client, own in zip(done.clients, local.clients, strict=True):
        client.exchange = "tune 1"
        client.bound = torch.nn.Linear(1, 1)
        rows = done.method.receive(client, {"is_best": torch.tensor(False)})["rows"]
        assert torch.equal(client.data.train.x[rows], own.data.train.x)
        assert torch.equal(client.data.train.y[rows], own.data.train.y)


def test_scores_by_shares_by_hand(done: Federation) -> None:
    for client in done.clients:
        own = [count / 40 for count in counted(client.data.train.y[40 * client.id : 40 * client.id + 40])]
        every = [count / 120 for count in counted(client.data.train.y)]
        shift = [math.log(one / other) if one else -1e4 for one, other in zip(own, every, strict=True)]
        predict = done.method.alternative_predictors["shares"].predict
        scores = predict(lambda x: x, torch.ones(2, 10), client.state)
        assert torch.allclose(scores, 1 + torch.tensor([shift, shift]))
        assert bool(scores.log_softmax(dim=1).isfinite().all())


def counted(y: Tensor) -> list[int]:
    return [int((y == label).sum()) for label in range(10)]


def test_the_epochs_of_tuning_are_those_of_the_best_validation(done: Federation) -> None:
    found = done.history[-1]["server"]
    after = [found[f"validation_after_{epochs}"] for epochs in range(1, 6)]
    assert found["tuned_epochs"] == 1 + after.index(max(after)) > 1, "another setting, if the first one is the best"
    right = {"validation": 0, "validation_by_shares": 0, "tuned": 0}
    for client in done.clients:  # by hand, from the weights that were kept
        model = done.export(client.id)
        samples = client.data.validation
        scores = model(client.prepare(samples.x))
        model.load_state_dict(get_group(client.state, "tuned weights"))
        tuned = model(client.prepare(samples.x))
        for name, given in zip(right, (scores, scores + get_tensor(client.state, "shift"), tuned), strict=True):
            right[name] += int((given.argmax(dim=1) == samples.y).sum())
        assert list(client.state) == ["shift", "tuned weights"], "no other weights are kept"
    rows = sum(len(client.data.validation) for client in done.clients)
    assert right["tuned"] / rows == max(after)
    for name in ("validation", "validation_by_shares"):
        assert found[name] == right[name] / rows


def test_the_final_round_leaves_the_pooled_network_as_it_was(done: Federation) -> None:
    *_, last, final = done.history
    kept = ("accuracy", "accuracy_per_client", "accuracy_per_architecture", "metrics", "validation")
    assert [final[key] for key in kept] == [last[key] for key in kept]
    assert (last["final_round"], final["final_round"]) == (False, True)
    assert last["accuracy_by_predictor"]["personal"]["tuned"] == last["accuracy"]["personal"]
    assert final["accuracy_by_predictor"]["personal"]["tuned"] != final["accuracy"]["personal"], "it bites"
    assert final["accuracy_by_predictor"]["personal"]["shares"] != final["accuracy"]["personal"]


@pytest.fixture(scope="module")
def done() -> Federation:
    """Pooled data on few rows, after which clients still have something to learn."""
    return run(pooled(recipe(training={"rounds": 2, "batch_size": 10, "lr": 0.1})))


def test_without_validation_rows_clients_are_tuned_for_one_epoch() -> None:
    final = run(pooled(recipe(data={"split": "8:0:2"}, training={"rounds": 1}))).history[-1]
    assert final["server"] == {"tuned_epochs": 1}


@pytest.mark.parametrize("where", [{"within": 3}, pytest.param({"after": 1}, marks=pytest.mark.slow)])
def test_a_pooled_run_goes_on_also_in_its_final_round(tmp_path: Path, where: dict[str, int], done: Federation) -> None:
    asked = pooled(recipe(training={"rounds": 2, "batch_size": 10, "lr": 0.1}))
    with pytest.raises(RunInterrupted):
        build_federation(asked, out=tmp_path, loggers=[Interrupt(**where)]).run()
    resumed = build_federation(asked, out=tmp_path)
    resumed.run(resume=True)
    same_end(done, resumed)


def same_end(one: Federation, other: Federation) -> None:
    assert difference(all_state(one), all_state(other)) is None
    assert one.history[-1]["accuracy_by_predictor"] == other.history[-1]["accuracy_by_predictor"]


def test_rows_of_pooled_data_are_of_the_best_round_where_a_run_stops_early(tmp_path: Path) -> None:
    """The rate is such that the second round is worse than the first."""
    asked = pooled(recipe(training={"rounds": 9, "lr": 1.0}, evaluation={"patience": 1}))
    done = build_federation(asked, out=tmp_path).run()
    best = done.history[done.result["best_round"] - 1]
    *_, last, final = done.history
    assert best["round"] < last["round"]
    assert best["accuracy"] != last["accuracy"]
    assert done.result["accuracy"] == final["accuracy"]["personal"]["mean"] == best["accuracy"]["personal"]["mean"]
    shares = [one["accuracy_by_predictor"]["personal"]["shares"] for one in (best, final)]
    assert shares[0] == shares[1] == done.result["accuracy_by_predictor"]["personal"]["shares"]
    rows = {row.label_or_method: row.figure("accuracy") for row in rows_of_pooled(load_runs([tmp_path]))}
    assert rows["pooled-shares"] == shares[0]["mean"]
    assert rows["pooled"] == best["accuracy"]["personal"]["mean"]


def numbers() -> list[ClientData]:
    none = LabeledSamples(torch.empty(0), torch.empty(0))
    return [ClientData(LabeledSamples(torch.ones(n, 2), torch.arange(float(n))), none, none) for n in (3, 2)]


def test_the_lowest_error_of_numbers_is_the_best() -> None:
    method, _, _ = pool(pooled(recipe()), numbers(), classes=0)
    server: Any = SimpleNamespace(state={}, log={}, classes=0, exchange="tune 1")
    for epochs, squares in ((1, 8.0), (2, 2.0), (3, 2.0)):
        server.exchange = f"tune {epochs}"
        method.aggregate(server, {0: {"total": torch.tensor(squares), "n": torch.tensor(2)}})
    errors = {f"validation_after_{epochs}": error for epochs, error in ((1, 2.0), (2, 1.0), (3, 1.0))}
    assert server.log == {**errors, "tuned_epochs": 2}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"method": {"name": "fedgh"}}, "the method 'fedgh'"),
        ({"method": {"name": "local"}, "training": {"client_fraction": 0.5}}, "training.client_fraction = 0.5"),
        ({"method": {"name": "local"}, "availability": {"dropout_rate": 0.5}}, r"\[availability\]"),
    ],
)
def test_what_cannot_be_pooled_is_refused(sections: dict[str, dict[str, Any]], said: str) -> None:
    asked = recipe(**sections)
    with pytest.raises(ConfigError, match=f"run.control 'pooled': expected plain training .* got {said}"):
        build_federation(asked.with_run(control="pooled"))


# which are run ----------------------------------------------------------------------------------------------------


def test_the_controls_of_a_comparison() -> None:
    base = recipe(methods={"own": {"name": "fedproto", "alone": True}})
    chosen = {name: base.choose(name) for name in ("local", "fedgh", "fedrep", "own")}
    found = controls_of(base, chosen, DataCache().source(base))
    assert list(found) == ["fedgh-alone", "fedrep-alone", "own-linear", "pooled"]


def test_compare_with_controls_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(recipe().dumps())
    words = ["compare", "tiny.toml", "--methods", "fedgh", "--out", "all", "--controls"]
    assert cli.status(words) == 0
    said = capsys.readouterr()
    assert "What federation is worth: gain over Local = gain alone + federated gain" in said.out
    rows = list(csv.DictReader(Path("all/comparison.csv").read_text().splitlines()))
    of_pooled = {name: name for name in ("pooled", "pooled-shares", "pooled-tuned")}
    controls = {row["name"]: row["control"] for row in rows}
    assert controls == {"local": "", "fedgh": "", "fedgh-alone": "alone", "own-linear": "own-linear", **of_pooled}
    (fedgh,) = [row for row in rows if row["name"] == "fedgh"]
    parts = float(fedgh["gain_alone"]) + float(fedgh["federated_gain"])
    assert float(fedgh["gain"]) == pytest.approx(float(fedgh["difference"])) == pytest.approx(parts)
    for row in rows:
        assert (int(row["bytes_up"]) == 0) == (row["name"] != "fedgh")
    assert [row["name"] for row in rows if row["gain"]] == ["fedgh"]
    stored = tomllib.loads(Path("all/pooled/seed-0/recipe.toml").read_text())
    assert stored["run"]["control"] == "pooled"
    result = json.loads(Path("all/pooled/seed-0/result.json").read_text())
    kept = {name: Path(f"all/{name}/seed-0/models").exists() for name in ("own-linear", "pooled")}
    assert kept == {"own-linear": False, "pooled": True}, "a network that nobody trained predicts nothing"
    scores = {row["name"]: float(row["accuracy"]) for row in rows}
    assert scores["pooled"] == result["accuracy"]
    for kind, summary in result["accuracy_by_predictor"]["personal"].items():
        assert scores[f"pooled-{kind}"] == summary["mean"]
    assert "pooled-tuned: epochs on a client's own rows: " in Path("all/comparison.md").read_text()
    before = Path("all/comparison.csv").read_text()
    assert cli.status(words) == 0
    assert capsys.readouterr().err.count("already done") == 5
    assert Path("all/comparison.csv").read_text() == before
    assert "--controls" in Path("all/command.txt").read_text()


def test_alone_nothing_is_summed() -> None:
    recipe = Recipe.from_dict({**SMALL, "method": {"name": "closed-form"}, "secure_sums": {"enabled": True}})
    assert not recipe.choose_alone("closed-form").secure_sums.enabled
