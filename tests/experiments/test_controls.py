"""What `polyfed compare --controls` runs beside the methods: alone, a longer Local, training on the rows of all."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.cli import app as cli
from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.data.samples import LabeledSamples
from polyfed.engine.federation import Federation
from polyfed.engine.task import Task
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.experiments.controls import controls_of, epochs_of_local, longer, pooled, runs_alone
from polyfed.experiments.data_cache import DataCache
from polyfed.methods import Local
from polyfed.models.zoo import build

pytestmark = pytest.mark.usefixtures("unrendered")

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "data": {
        "dataset": "digits",
        "num_clients": 3,
        "holdout": 30,
        "max_train_per_client": 40,
        "max_test_per_client": 20,
    },
    "models": {"architectures": ["digits-cnn1", "digits-cnn2"]},
    "method": {"name": "fedgh"},
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
    assert (mine.name, mine.chosen_method.card.alone, mine.chosen_method.header_epochs) == ("mine", True, 3)
    assert mine.to_dict()["method"]["alone"] is True
    again = Recipe.from_dict(mine.to_dict())
    assert (again.name, again.chosen_method.card.alone) == ("mine", True)
    assert "alone" not in asked.to_dict()["method"]


def test_the_recipes_own_method_is_alone_and_called_so() -> None:
    alone = recipe(method={"name": "fedgh", "alone": True})
    assert (alone.name, alone.folder) == ("fedgh-alone", "runs/recipe-fedgh-alone-seed0")
    assert recipe("fedproto").choose_alone("fedproto").name == "fedproto-alone"
    with pytest.raises(ConfigError, match="alone"):
        recipe(method={"name": "fedgh", "alone": 3})


def test_a_control_of_a_method_is_not_run_alone() -> None:
    asked = recipe(methods={"flat": {"name": "fd", "control": "flat"}})
    assert runs_alone(asked.choose("fd"))
    assert not runs_alone(asked.choose("flat"))


# Local, longer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "epochs"),
    [
        ("local", 2),
        ("fedgh", 2),
        ("fedrep", 12),  # 10 epochs of the head, 2 of the rest
    ],
)
def test_how_many_epochs_of_local_are_a_methods_steps(method: str, epochs: int) -> None:
    assert epochs_of_local(build_federation(recipe(method))) == epochs


def test_longer_local_takes_that_many_steps() -> None:
    asked = longer(recipe(), 12, ["fedrep"])
    assert (asked.name, asked.run.control, asked.run.control_of) == ("local-longer-12", "longer", ["fedrep"])
    done, methods = run(asked), run(recipe("fedrep"))
    assert done.history[0]["samples"] == methods.history[0]["samples"]


# pooled -----------------------------------------------------------------------------------------------------------


def of_all(data: Any) -> LabeledSamples:
    return LabeledSamples(torch.cat([c.train.x for c in data.clients]), torch.cat([c.train.y for c in data.clients]))


def test_pooled_is_plain_training_on_the_rows_of_all() -> None:
    asked = pooled(recipe(), "pooled")
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
    assert done.history[-1]["bytes_up"] == done.history[-1]["bytes_down"] == 0


def test_pooled_is_scored_on_each_clients_own_rows() -> None:
    asked = pooled(recipe(), "pooled")
    own = [client.data.test for client in build_federation(recipe()).clients]
    for client, test in zip(build_federation(asked).clients, own, strict=True):
        assert torch.equal(client.data.test.x, test.x)
        assert client.n == 120


def test_pooled_steps_are_those_of_a_client() -> None:
    done = run(pooled(recipe(), "pooled-steps"))
    # 40 rows a client, 2 epochs: 80 rows a round for each of two networks, drawn of 120
    assert [record["samples"] for record in done.history] == [160, 160]


def test_no_pooled_run_is_told_that_local_epochs_do_nothing() -> None:
    for kind in ("pooled", "pooled-steps"):
        assert not [line for line in build_federation(pooled(recipe(), kind)).remarks() if "does nothing" in line]


@pytest.mark.slow
def test_pooled_does_as_well_in_processes_and_resumed(tmp_path: Path) -> None:
    asked = pooled(recipe(training={"rounds": 2, "batch_size": 10}), "pooled-steps")
    serial = weights(run(asked))
    processes = weights(run(asked.with_run(executor="processes", workers=2)))
    build_federation(pooled(recipe(training={"rounds": 1, "batch_size": 10}), "pooled-steps"), out=tmp_path).run()
    resumed = build_federation(asked, out=tmp_path)
    resumed.run(resume=True)
    for other in (processes, weights(resumed)):
        assert all(torch.equal(serial[i][name], other[i][name]) for i in serial for name in serial[i])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"method": {"name": "fedgh"}}, "the method 'fedgh'"),
        ({"method": {"name": "local"}, "training": {"client_fraction": 0.5}}, "training.client_fraction = 0.5"),
        ({"method": {"name": "local"}, "availability": {"dropout_rate": 0.5}}, r"\[availability\]"),
        ({"method": {"name": "local"}, "run": {"executor": "ray"}}, "run.executor"),
    ],
)
def test_what_cannot_be_pooled_is_refused(sections: dict[str, dict[str, Any]], said: str) -> None:
    asked = recipe(**sections)
    with pytest.raises(ConfigError, match=f"run.control 'pooled': expected plain training .* got {said}"):
        build_federation(asked.with_run(control="pooled"))


def test_hostile_clients_have_no_place_in_the_ceiling() -> None:
    with pytest.raises(ConfigError, match=r"expected no \[adversaries\]"):
        pooled(recipe(adversaries={"label_flip_fraction": 0.4}), "pooled")


# which are run ----------------------------------------------------------------------------------------------------


def test_the_controls_of_a_comparison() -> None:
    base = recipe(methods={"own": {"name": "fedproto", "alone": True}})
    chosen = {name: base.choose(name) for name in ("local", "local-mutual", "fedgh", "fedrep", "own")}
    found = controls_of(base, chosen, DataCache())
    assert list(found) == ["fedgh-alone", "fedrep-alone", "local-longer-12", "pooled", "pooled-steps"]


def test_compare_with_controls_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(recipe().dumps())
    words = ["compare", "tiny.toml", "--methods", "fedgh", "--out", "all", "--controls"]
    assert cli.status(words) == 0
    said = capsys.readouterr()
    assert "warning: 1 seed, by which no difference is more than chance" in said.err
    assert "What federation is worth: gain over Local = gain alone + federated gain" in said.out
    assert "nothing can be claimed of them below three seeds" in said.out.replace("\n  ", " ")
    rows = list(csv.DictReader(Path("all/comparison.csv").read_text().splitlines()))
    assert {row["name"]: row["control"] for row in rows} == {
        "local": "",
        "fedgh": "",
        "fedgh-alone": "alone",
        "pooled": "pooled",
        "pooled-steps": "pooled-steps",
    }
    (fedgh,) = [row for row in rows if row["name"] == "fedgh"]
    parts = float(fedgh["gain_alone"]) + float(fedgh["federated_gain"])
    assert float(fedgh["gain"]) == pytest.approx(float(fedgh["difference"])) == pytest.approx(parts)
    for row in rows:
        assert (int(row["bytes_up"]) == 0) == (row["name"] != "fedgh")
    table = json.loads(Path("all/comparison.json").read_text())["tables"][0]
    assert [row["name"] for row in table["rows"] if "gain" in row] == ["fedgh"]
    assert "federated" in Path("all/comparison.tex").read_text()
    assert "What federation is worth" in Path("all/report.html").read_text()
    assert Path("all/decomposition.png").exists()
    assert Path("all/decomposition.svg").exists()
    stored = tomllib.loads(Path("all/pooled-steps/seed-0/recipe.toml").read_text())
    assert stored["run"]["control"] == "pooled-steps"
    before = Path("all/comparison.csv").read_text()
    assert cli.status(words) == 0
    assert capsys.readouterr().err.count("already done") == 5
    assert Path("all/comparison.csv").read_text() == before
    assert "--controls" in json.loads(Path("all/compare.json").read_text())["command"]
