"""With nodes for clients a run is what it is in one process; what nodes keep and share; and what goes wrong."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from polyfed.config.recipe import Recipe
from polyfed.core.message import Message
from polyfed.core.method import Method
from polyfed.core.modules import export_state
from polyfed.deploy.node_config import NodeConfig, data_of_node
from polyfed.deploy.node_registry import Answer
from polyfed.deploy.protocol import Envelope, NodeError, read_message
from polyfed.deploy.server import EVENT_LOG, serve
from polyfed.engine.evaluation import kept_stages
from polyfed.engine.executors.jobs import TrainJob
from polyfed.engine.federation import Run
from polyfed.engine.personal_predictor import PersonalPredictor
from polyfed.engine.wire import decode, encode
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache
from polyfed.experiments.prediction import predict
from polyfed.experiments.run import run as run_recipe
from polyfed.plugins.frozen_parameters import FrozenParameters
from polyfed.registry import METHODS
from polyfed.report.grouping import group_runs
from polyfed.report.run_records import load_runs
from polyfed.testing.fixtures import TIMES
from tests.helpers import regression
from tests.helpers.nearby import DATA, FIRST_NODE, Nearby, event_log, own_recipe, recipe_of
from tests.helpers.refusals import refusal

ONE: Mapping[str, Any] = {"models": {"architectures": ["digits-cnn1"]}}
SMALL: Mapping[str, Mapping[str, Any]] = {
    "fedhenn": {"alignment_data": {"size": 10}},
    "fedhenn-homogeneous": {"alignment_data": {"size": 10}},
    "feddf": {"server_steps": 2, "server_batch": 20},
    "fedet": {"server_steps": 2, "server_batch": 20},
}
RAD: Mapping[str, Any] = {"data": {"holdout": 20}, "hyperparameters": {"alignment_data": {"size": 10}}}
KERNELS = {**RAD, "hyperparameters": {"alignment_data": {"size": 10, "fixed": True}, "uploads": "kernels"}}

EVERYTHING: Mapping[str, Any] = {
    "training": {"rounds": 3, "client_fraction": 0.7, "batch_size": 16},
    "evaluation": {
        "extra_stages": ["received", "after_training", "personal"],
        "metrics": ["auc", "confusion"],
        "every_n_rounds": 2,
    },
    "availability": {"dropout_rate": 0.3, "dropout_stage": "after"},
    "privacy": {"upload_clip_norm": 1.0, "upload_noise_multiplier": 0.1},
}


def comparable(records: Any) -> list[dict[str, Any]]:
    """Records without what two runs never share."""
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records]


def models(folder: Path, stage: str = "personal") -> dict[int, dict[str, Tensor]]:
    """What nodes wrote of their clients' models, by number."""
    found = {}
    for index in sorted(folder.glob("node-*/*/models/index.json")):
        for number, entry in json.loads(index.read_text()).items():
            found[int(number)] = safetensors.torch.load_file(index.parent / entry["stages"][stage]["weights"])
    return found


def same(recipe: Recipe, run: Run, folder: Path) -> None:
    """A served run is that of one process: records, result and models."""
    expected = build_federation(recipe, data=DATA).run()
    assert comparable(run.history) == comparable(expected.history)
    assert run.result["accuracy_per_client"] == expected.result["accuracy_per_client"]
    assert not [row for row in run.result["clients_table"] if {"labels", "parameters"} & {*row}], (
        "they are at the nodes"
    )
    assert {k: run.result[k] for k in ("method", "dataset", "evaluation")} == {
        k: expected.result[k] for k in ("method", "dataset", "evaluation")
    }
    stage = kept_stages(expected.result["evaluation"]["stages"])[0]
    for found, here in ((models(folder, stage), expected.models), (models(folder), expected.personal_models)):
        assert list(found) == list(here)
        for number, network in here.items():
            theirs = export_state(network.network if isinstance(network, PersonalPredictor) else network)
            assert found[number].keys() == theirs.keys()
            assert all(torch.equal(found[number][name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedavg", ONE),
        ("fedavg", {**ONE, "hyperparameters": {"personalize": "shares"}}),
        ("fedprox", {**ONE, "training": {"momentum": 0.5}}),
        ("fedgh", {}),
        ("closed-form", {}),
        ("fedhenn", RAD),
        ("fedrep", {"hyperparameters": {"aggregation": "same-shape", "head_epochs": 1}}),  # first heads are not sent
        pytest.param("fedavg", {**ONE, "robust_aggregation": {"aggregator": "median"}}, marks=pytest.mark.slow),
    ],
)
def test_nodes_give_the_same_numbers(tmp_path: Path, method: str, options: Mapping[str, Any]) -> None:
    recipe = recipe_of(method, **options)
    wire = Nearby(recipe, tmp_path)
    run = serve(recipe, wire, out=tmp_path / "out", deadline=5)
    same(recipe, run, tmp_path)
    assert wire.kinds() == ["hello"] * 3 + (["train"] * 3 + ["score"] * 3) * 2 + ["finish"] * 3


@pytest.mark.parametrize(
    ("method", "options"),
    [("fedgh", {}), ("fedrep", {**ONE, "hyperparameters": {"head_epochs": 1, "final_head_epochs": 1}})],
)
def test_the_best_round_is_kept_as_in_one_process(tmp_path: Path, method: str, options: Mapping[str, Any]) -> None:
    """Also of a run that goes on for another round; a final one begins from the best round, not from the last."""
    for rounds in (4, 5) if method == "fedgh" else (4,):
        training = {"rounds": rounds, "lr": 0.3 if method == "fedgh" else 0.4}
        recipe = recipe_of(method, **options, data={"split": "6:2:2"}, training=training, run={"keep": "best"})
        run = serve(recipe, Nearby(recipe, tmp_path), out=tmp_path / "out", deadline=5, resume=rounds > 4)
        assert run.result["best_round"] == build_federation(recipe, data=DATA).run().result["best_round"]
        assert run.result["best_round"] != rounds or rounds == 5
        same(recipe, run, tmp_path)


@pytest.mark.parametrize(
    ("method", "hyperparameters"),
    [
        ("fedhenn-homogeneous", {"alignment_data": {"size": 10}, "final_average": True}),
        ("own-plus-common", {}),
    ],
)
def test_nodes_take_part_in_a_final_round(tmp_path: Path, method: str, hyperparameters: Mapping[str, Any]) -> None:
    recipe = recipe_of(method, **ONE, data={"holdout": 20}, hyperparameters=hyperparameters)
    run = serve(recipe, Nearby(recipe, tmp_path), out=tmp_path / "out", deadline=5)
    assert run.history[-1]["final_round"]
    assert run.history[-1]["dropped"] == []
    same(recipe, run, tmp_path)


def test_a_method_and_a_network_of_ones_own_are_found_beside_the_recipe(tmp_path: Path) -> None:
    recipe = own_recipe(tmp_path, "own_served")
    run = serve(recipe, Nearby(recipe, tmp_path), out=tmp_path / "out", deadline=5)
    same(recipe, run, tmp_path)
    assert run.result["method"] == "own_served:Mine"


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, "everything"])
def test_every_method_gives_the_same_numbers(tmp_path: Path, method: str) -> None:
    """Also FedGH with few clients a round, every stage, drops and noise."""
    few = {**ONE, "data": {"limit_train": 400, "holdout": 40}, "hyperparameters": SMALL.get(method)}
    recipe = recipe_of("fedgh", **EVERYTHING) if method == "everything" else recipe_of(method, **few)
    same(recipe, serve(recipe, Nearby(recipe, tmp_path), out=tmp_path / "out", deadline=5), tmp_path)


def test_an_upload_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    decode = FrozenParameters.decode

    def counted(self: FrozenParameters, upload: Message, job: TrainJob, method: Method) -> Message:
        seen.append(job.client.id)
        return decode(self, upload, job, method)

    monkeypatch.setattr(FrozenParameters, "decode", counted)
    recipe = recipe_of("fedgh", training={"rounds": 1})
    serve(recipe, Nearby(recipe, tmp_path), out=tmp_path / "out", deadline=5)
    assert seen == [0, 1, 2]


# what stays where ---------------------------------------------------------------------------------------------------


def test_the_run_folder_is_that_of_any_run_without_models_that_nobody_shares(tmp_path: Path) -> None:
    recipe, out = recipe_of("fedgh").with_run(loggers=["tensorboard"]), tmp_path / "out"
    wire = Nearby(recipe, tmp_path, configs={1: {"share-model": True}})
    run = serve(recipe, wire, out=out, deadline=5)
    assert {path.name for path in out.iterdir()} == {
        *(".lock", "recipe.toml", "rounds.jsonl", "result.json", "checkpoint", "models", "tensorboard"),
        EVENT_LOG,
    }
    assert Recipe.load(out / "recipe.toml").method.name == "fedgh"
    shared = safetensors.torch.load_file(out / "models" / "personal-001.safetensors")
    assert [path.name for path in (out / "models").glob("*.safetensors")] == ["personal-001.safetensors"]
    assert all(torch.equal(tensor, models(tmp_path)[1][name]) for name, tensor in shared.items())
    (theirs,) = (tmp_path / "node-1").glob("*/models/index.json")
    index = json.loads((out / "models" / "index.json").read_text())
    assert index == json.loads(theirs.read_text()), "made of the node's own recipe and data, as the server's is"
    assert index["1"]["samples"] > 0
    with pytest.raises(ConfigError, match="client 0's model is with its node"):
        run.models[0]
    lines = event_log(out)
    assert [line["event"] for line in lines] == ["experiment", "hello", "hello", "hello"]
    assert (tmp_path / "node-0" / lines[0]["experiment"]).is_dir()
    stored = [decode(path.read_bytes())["weights"] for path in (out / "checkpoint").glob("*/states.safetensors")]
    assert all(tensors == {} for each in stored for _, _, tensors in each.values())


@pytest.mark.parametrize("kind", ["a table", "texts"])
def test_a_nodes_model_reads_files_as_one_of_a_run_does(tmp_path: Path, kind: str) -> None:
    table = [f"{'' if i % 3 else i},{'uvw'[i % 3]},{'ab'[i * 7 % 5 % 2]}" for i in range(60)]
    texts = [f"{['good', 'bad', 'fine'][i % 3]} {['one', 'two'][i % 2]},{'ab'[i % 2]}" for i in range(60)]
    file = tmp_path / "rows.csv"
    file.write_text("\n".join(["age,ward,label", *table] if kind == "a table" else ["text,label", *texts]) + "\n")
    data = {"dataset": f"csv:{file}", "num_clients": 2, "partition": "iid"}
    data |= (
        {"category_columns": ["ward"], "missing_values": "client_mean"}
        if kind == "a table"
        else {"text_column": "text"}
    )
    recipe = Recipe.from_dict(
        {
            "data": data,
            "models": {"architectures": ["mlp-16-32" if kind == "a table" else "text-linear"]},
            "method": {"name": "closed-form", "features": 8},
            "training": {"rounds": 2},
        }
    )
    run_recipe(recipe, out=tmp_path / "run")
    wire = Nearby(recipe, tmp_path, range(2), {1: {"share-model": True}})
    serve(recipe, wire, out=tmp_path / "out", deadline=5)
    expected = predict(tmp_path / "run", 1, file)
    folders = [tmp_path / "node-1" / experiment(tmp_path / "out")]
    for folder in [*folders, tmp_path / "out"] if kind == "a table" else folders:
        assert torch.equal(predict(folder, 1, file).scores, expected.scores)


def own_network(in_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network that only its node knows."""
    width = in_shape[0] * in_shape[1] * in_shape[2]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(width, 30), nn.Tanh(), nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, classes)
    )


OWN = f"{__name__}:own_network"


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedgh", {}),
        pytest.param("fd", {}, marks=pytest.mark.slow),
        pytest.param("fedhenn", KERNELS, marks=pytest.mark.slow),
    ],
)
def test_the_server_never_sees_a_network_of_a_nodes_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, options: Mapping[str, Any]
) -> None:
    recipe = recipe_of(method, **options)
    wire = Nearby(recipe, tmp_path, configs={1: {"architecture": OWN}})
    asked: list[str] = []
    real = wire.ask
    made = own_network

    def watched(in_shape: tuple[int, ...], classes: int) -> nn.Module:
        assert asked, "the server has built a network that is the node's own"
        return made(in_shape, classes)

    def ask(node: int, envelope: Envelope) -> Any:
        asked.append(envelope.kind)
        try:
            return real(node, envelope)
        finally:
            asked.pop()

    monkeypatch.setitem(globals(), "own_network", watched)
    monkeypatch.setattr(wire, "ask", ask)
    run = serve(recipe, wire, out=tmp_path / "out", deadline=5)
    assert run.result["clients_table"][1]["architecture"] == OWN
    assert not any(record["dropped"] or record["refused"] for record in run.history)
    assert models(tmp_path)[1]["1.weight"].shape == (30, 64)
    sent = [read_message(envelope.body) for _, envelope in wire.sent if envelope.body]
    assert all("unseen" not in name for message in sent for name in message)


def test_a_method_that_needs_the_network_at_the_server_says_whose_it_lacks(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", hyperparameters={"aggregation": "same-shape"}, training={"rounds": 1})
    wire = Nearby(recipe, tmp_path, configs={1: {"architecture": OWN}})
    with pytest.raises(ConfigError, match=r"client 1 has the network '.*own_network', which the server does not have"):
        serve(recipe, wire, out=tmp_path / "out", deadline=5)


def test_a_run_goes_on_with_as_many_clients_as_it_has(tmp_path: Path) -> None:
    for client in range(3):
        rows = [f"{i * 0.1},{-i * 0.2},site-{client},{'ab'[i % 2]}" for i in range(40)]
        (tmp_path / f"own-{client}.csv").write_text("one,two,site,label\n" + "\n".join(rows) + "\n")
    data = {
        "dataset": f"csv:{tmp_path}/own-0.csv",
        "partition": "by_group",
        "group_by": "site",
        "class_names": ["a", "b"],
    }
    configs = {client: {"data": f"csv:{tmp_path}/own-{client}.csv"} for client in range(3)}
    for rounds, clients in ((2, 2), (3, 3), (3, 2)):
        sections = {"models": {"architectures": ["mlp-16-32"]}, "method": {"name": "fedavg"}, "data": data}
        recipe = Recipe.from_dict({**sections, "training": {"rounds": rounds, "lr": 0.1, "batch_size": 10}})
        wire = Nearby(recipe, tmp_path, range(clients), configs)
        options: dict[str, Any] = {"clients": clients, "resume": rounds > 2}
        if clients == 3:
            with pytest.raises(ConfigError, match=r"expected 2 clients, .* got 3"):
                served(recipe, wire, tmp_path, deadline=5, **options)
        else:
            assert len(served(recipe, wire, tmp_path, deadline=5, **options).history) == rounds


@pytest.mark.parametrize("method", ["fedrep", "fml", "own-plus-common"])
def test_nodes_predict_numbers_with_the_scores_of_a_run_and_in_their_unit(tmp_path: Path, method: str) -> None:
    path = regression.write_table(tmp_path / "rows.csv")
    data = {"dataset": f"csv:{path}", "label_column": "cost", "task": "regression", "num_clients": 3}
    data |= {"partition": "by_group", "group_by": "site", "split": "6:2:2"}
    sections = {"data": data, "models": {"architectures": ["mlp-16-32"]}, "training": {"rounds": 2, "lr": 0.02}}
    recipe = Recipe.from_dict({**sections, "method": {"name": method}, "run": {"executor": "serial"}})
    wire = Nearby(recipe, tmp_path, configs={1: {"share-model": True}})
    out = tmp_path / "out"
    served = serve(recipe, wire, out=out, deadline=5)
    expected = build_federation(recipe, data=DATA, out=tmp_path / "alone").run()
    for key in ("rmse", "rmse_per_client", "metrics"):
        assert served.result[key] == expected.result[key]
    own = tmp_path / "node-1" / experiment(out)
    values = [predict(folder, 1, path).values.tolist() for folder in (tmp_path / "alone", own, out)]
    assert values[0] == values[1] == values[2]
    assert 80 < sum(values[0]) / len(values[0]) < 120, "in the unit of the table: the client's mean is 100"


def test_nodes_have_rows_of_their_own_with_unlike_classes_and_categories(tmp_path: Path) -> None:
    """Their networks have an output for each of the recipe's classes, and a vector for each of its categories."""
    for number, (wards, labels) in enumerate((("ab", "xy"), ("bc", "yz"))):
        rows = [f"{row % 7},{wards[row % 3 // 2]},{labels[row % 2]}" for row in range(60)]
        (tmp_path / f"{number}.csv").write_text("\n".join(["age,ward,ill", *rows]) + "\n")
    data = {"label_column": "ill", "class_names": ["x", "y", "z"], "num_clients": 2, "mean": [3.0, 0.0]}
    data |= {"categories": {"ward": ["a", "b", "c"]}, "std": [2.0, 1.0], "dataset": f"csv:{tmp_path / '0.csv'}"}
    sections = {"models": {"architectures": ["mlp-16-32"]}, "method": {"name": "fedavg"}, "training": {"rounds": 1}}
    recipe = Recipe.from_dict({"data": data, **sections})
    own = {k: {"data": f"csv:{tmp_path / f'{k}.csv'}", "share-model": True} for k in (0, 1)}
    run = serve(recipe, Nearby(recipe, tmp_path, (0, 1), own), out=tmp_path / "out", deadline=5)
    assert all(value is not None for value in run.result["accuracy_per_client"])
    assert [entry["samples"] for entry in run.result["clients_table"]] == [48, 48]
    assert [hello["claims"]["categories"] for hello in event_log(tmp_path / "out")[1:]] == [[0, 4], [0, 4]]
    index = json.loads((tmp_path / "node-1" / experiment(tmp_path / "out") / "models" / "index.json").read_text())
    assert index["1"]["class_names"] == ["x", "y", "z"]
    new = tmp_path / "new.csv"
    new.write_text("age,ward\n3,c\n3,\n")
    scores = predict(tmp_path / "out", 0, new).scores
    assert scores.shape == (2, 3)
    assert not torch.equal(scores[0], scores[1]), "a category that only others have seen is none that is missing"


@pytest.mark.parametrize(
    "privacy",
    [
        {"upload_clip_norm": 1.0, "upload_noise_multiplier": 0.5},
        {"max_grad_norm": 1.0, "noise_multiplier": 1.0},
    ],
    ids=["uploads", "DP-SGD"],
)
def test_noise_is_drawn_from_a_nodes_secret(tmp_path: Path, privacy: Mapping[str, float]) -> None:
    """The secret is sent nowhere. Without one, noise comes from the run's seed (the test of all settings above)."""
    recipe = recipe_of("fedavg", **ONE, data={"limit_train": 60}, privacy=privacy)  # two rounds: a loss tells
    secret = tmp_path / "node-1" / "noise.secret"

    def history(out: str) -> list[dict[str, Any]]:
        wire = Nearby(recipe, tmp_path, configs={1: {"secret-noise": True}})
        run = serve(recipe, wire, out=tmp_path / out, deadline=5)
        known = secret.read_bytes()
        assert not any(known in envelope.body or known.hex() in repr(envelope.facts) for _, envelope in wire.sent)
        assert not any(known in path.read_bytes() for path in (tmp_path / out).rglob("*") if path.is_file())
        assert not any(record["dropped"] for record in run.history)
        return comparable(run.history)

    first = history("first")
    assert first != comparable(build_federation(recipe, data=DATA).run().history)
    assert history("again") == first, "the same work, the same noise"
    assert [path.parent.name for path in tmp_path.glob("node-*/noise.secret")] == ["node-1"]
    assert (secret.parent.stat().st_mode & 0o777, secret.stat().st_mode & 0o777, secret.stat().st_size) == (
        0o700,
        0o600,
        32,
    )
    secret.write_bytes(secret.read_bytes()[::-1])
    for answered in tmp_path.glob("node-*/answered"):  # it counts against another run
        shutil.rmtree(answered)
    assert history("other") != first


def test_where_rows_are_protected_their_mean_and_spread_are_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"{i * 0.1},{-i * 0.2},{'ab'[i % 2]}" for i in range(40)]
    (tmp_path / "own.csv").write_text("one,two,label\n" + "\n".join(rows) + "\n")
    settings: dict[str, Any] = {
        "models": {"architectures": ["mlp-64-32"]},
        "privacy": {"upload_clip_norm": 1.0, "upload_noise_multiplier": 1.0},
    }
    plain = recipe_of("fedavg", data={"num_clients": 1}, **settings)
    own = f"csv:{tmp_path}/own.csv"
    said = turned_away(plain, plain, tmp_path, monkeypatch, data=own)
    assert "expected data.mean and data.std in the recipe, as with [privacy] mean and spread of client 0's own" in said
    data = {"num_clients": 1, "mean": [1.0, -2.0], "std": [3.0, 4.0]}
    recipe = recipe_of("fedavg", data=data, training={"rounds": 1}, **settings)
    wire = Nearby(recipe, tmp_path, (0,), {0: {"data": own}})
    serve(recipe, wire, out=tmp_path / "out", deadline=5)
    lines = event_log(tmp_path / "out")
    assert (lines[1]["claims"]["mean"], lines[1]["claims"]["std"]) == ([1.0, -2.0], [3.0, 4.0])


def experiment(out: Path) -> str:
    """The name under which nodes keep what is a run's."""
    return str(event_log(out)[0]["experiment"])


# what goes wrong before a run ---------------------------------------------------------------------------------------


def test_a_node_with_another_recipe_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = turned_away(
        recipe_of("fedgh", hyperparameters={"header_lr": 0.5}), recipe_of("fedgh"), tmp_path, monkeypatch
    )
    assert "method.header_lr is 0.01 at the server and 0.5 here" in said


def turned_away(theirs: Recipe, recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> str:
    """What a server is told when the node of client 0 of one is turned away; then it gives up."""
    said: list[str] = []

    class GivenUp(Exception):
        pass

    class Watch:
        def message(self, text: str) -> None:
            said.append(text)
            if "is no client" in text:
                raise GivenUp

    with pytest.raises(GivenUp):
        serve(recipe, Nearby(theirs, folder, (0,), {0: config}), out=folder / "out", deadline=5, loggers=[Watch()])
    assert not (folder / "out").exists()
    return said[-1]


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"client-id": -1}, "node-config.client-id: expected at least 0, got -1"),
        ({"state-dirr": "x"}, "unknown key 'node-config.state-dirr'; did you mean 'state-dir'?"),
        ({"architecture": "digits-cnn7"}, "unknown model 'digits-cnn7'; did you mean"),
        ({"device": "tpu"}, "expected a device that is here"),
    ],
)
def test_wrong_node_configuration_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Mapping[str, Any], line: str
) -> None:
    recipe = recipe_of("local")
    said = turned_away(recipe, recipe, tmp_path, monkeypatch, **config)
    assert line in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"clients": 4}, "clients: expected 3, the clients of the recipe, got 4"),
        ({"adversaries": {"label_flip_fraction": 0.3}}, "^adversaries: expected none in a deployment"),
        ({"pretraining": {"epochs": 1}}, "pretraining"),
        ({"run": {"keep": "nothing"}}, "run.keep: expected 'last' or 'best'"),
        ({"evaluation": {"missing_classes": True}}, "evaluation.missing_classes: expected false"),
    ],
)
def test_wrong_settings_of_a_run_are_one_line(tmp_path: Path, options: Mapping[str, Any], line: str) -> None:
    sections = {key: value for key, value in options.items() if isinstance(value, dict)}
    options = {key: value for key, value in options.items() if key not in sections}
    recipe = recipe_of("local", **sections)
    with pytest.raises(ConfigError, match=line):
        serve(recipe, Nearby(recipe, tmp_path), out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def table_of(dataset: str, **data: Any) -> Recipe:
    sections = {"data": {"dataset": dataset, "num_clients": 2, "partition": "iid", **data}}
    return Recipe.from_dict({**sections, "models": {"architectures": ["mlp-16-32"]}, "method": {"name": "local"}})


def test_rows_that_a_deployment_cannot_use_are_one_line(tmp_path: Path) -> None:
    rows = [f"{20 + row},{'ab'[row % 2]},{row / 4}" for row in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["age,ward,cost", *rows]) + "\n")
    own = f"csv:{tmp_path / 'rows.csv'}"

    def refused(config: Mapping[str, Any], **data: Any) -> str:
        place = NodeConfig(**{"client-id": 0, "state-dir": str(tmp_path / "state"), **config})
        recipe = recipe_of(data=data) if "label_column" not in data else table_of(own, **data)
        return refusal(lambda: data_of_node(recipe, place, DATA))

    assert "expected one label space, got data.label_space" in refused({}, label_space="own")
    assert "data.categories in the recipe with all categories of column 'cost'" in refused(
        {"data": own}, label_column="ward", category_columns=["cost"]
    )
    assert "one of data.categories (20, 21) in line 4" in refused(
        {"data": own}, label_column="ward", categories={"age": ["20", "21"]}
    )
    assert "as data.test is 'global', got data of its own" in refused({"data": "digits"}, test="global")
    assert "expected a client-id below 3, got 3" in refused({"client-id": 3})


def test_the_caps_of_a_node_draw_the_rows_that_the_recipe_draws(tmp_path: Path) -> None:
    rows = [f"{row},{'ab'[row % 2]}" for row in range(200)]
    (tmp_path / "rows.csv").write_text("\n".join(["time,ward", *rows]) + "\n")
    own = f"csv:{tmp_path / 'rows.csv'}"
    caps = {"limit_train": 100, "max_train_per_client": [20, 16], "max_test_per_client": 6, "split": "1:0:1"}
    recipe = table_of(own, label_column="ward", **caps)
    place = NodeConfig(**{"client-id": 1, "state-dir": str(tmp_path / "state")})
    for config in ({}, {"data": own}):
        data, number = data_of_node(recipe, place.model_copy(update=config), DataCache())
        here = data.clients[number]
        assert (len(here.train), len(here.test)) == (16, 6)
        assert 0.3 < float(torch.cat([here.train.x, here.test.x]).mean()) / 200 < 0.7
        if not config:
            there = DataCache().federated(recipe).clients[1]
            assert torch.equal(here.train.x, there.train.x)
            assert torch.equal(here.test.x, there.test.x)


BAD = FIRST_NODE + 1


class _Killed(Exception):
    """The server's end."""


def three_rounds(method: str = "fedgh", **options: Any) -> Recipe:
    return recipe_of(method, **{"training": {"rounds": 3, "batch_size": 16, "lr": 0.05}, **options})


def troubles(out: Path) -> list[tuple[int, int, str]]:
    """Round, client and reason."""
    return [(line["round"], line["client"], line["reason"]) for line in event_log(out) if line["event"] == "trouble"]


def served(recipe: Recipe, wire: Nearby, folder: Path, **options: Any) -> Run:
    return serve(recipe, wire, out=folder / "out", **{"deadline": 0.05, **options})


def in_round(wire: Nearby, number: int, answer: Callable[[Envelope], Answer]) -> None:
    """Client 1 gives another answer to its job of one round."""

    def fault(node: int, envelope: Envelope) -> Answer | None:
        hit = node == BAD and envelope.kind == "train" and envelope.facts["round"] == number
        return answer(envelope) if hit else None

    wire.fault = fault


# nodes that say nothing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dies", ["is away", "is silent"])
def test_whose_node_is_dead_is_scored_no_more(tmp_path: Path, dies: str) -> None:
    recipe = three_rounds("local")
    wire = Nearby(recipe, tmp_path)

    def kill(record: Mapping[str, Any]) -> None:
        if dies == "is away":
            wire.away = {BAD}
        wire.fault = lambda node, envelope: NodeError("silence") if node == BAD else None

    run = served(recipe, wire, tmp_path, loggers=[kill])
    first, *later = run.history
    assert [record["accuracy"]["personal"]["n"] for record in run.history] == [3, 2, 2]
    assert [value is None for value in first["accuracy_per_client"]] == [False, False, False]
    for record in later:
        known = record["accuracy_per_client"]
        assert known[1] is None
        assert record["accuracy"]["personal"]["mean"] == pytest.approx((known[0] + known[2]) / 2)
    assert [row.get("last_evaluated") for row in run.result["clients_table"]] == [None, 1, None]
    line = "clients 1 were not evaluated after round 1; last figures are of the others"
    assert f"local: {line}" in group_runs(load_runs(tmp_path / "out"))[0][0].notes


def test_an_answer_that_never_came_is_undone_at_the_node(tmp_path: Path) -> None:
    """It trained and kept its work; the server goes on from the round before, and so does the node."""
    recipe = three_rounds("local")
    wire, lost = Nearby(recipe, tmp_path / "lost"), []

    def after(envelope: Envelope) -> Answer:
        wire.ask(BAD, envelope)
        lost.append(envelope)
        return NodeError("silence")

    in_round(wire, 2, after)
    run = served(recipe, wire, tmp_path / "lost")
    dropped = Nearby(recipe, tmp_path / "dropped")
    in_round(dropped, 2, lambda envelope: NodeError("killed"))
    expected = served(recipe, dropped, tmp_path / "dropped")
    assert len(lost) == 1
    assert comparable(run.history) == comparable(expected.history)
    assert same_models(tmp_path / "lost", tmp_path / "dropped")


def same_models(one: Path, other: Path) -> bool:
    left, right = models(one), models(other)
    return left.keys() == right.keys() and all(
        torch.equal(tensor, right[number][name]) for number, tensors in left.items() for name, tensor in tensors.items()
    )


# nodes that say nonsense ----------------------------------------------------------------------------------------------


def changed(own: Envelope, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> Envelope:
    """An answer with other tensors and facts."""
    message = read_message(own.body)
    return Envelope("train", {**own.facts, **facts}, encode({**message, **tensors}))


NONSENSE: Mapping[int, tuple[Callable[[Envelope], Envelope], str, str]] = {  # round -> change, its effect, the reason
    2: (lambda own: changed(own, {"lars": torch.zeros(3, 7)}, {}), "refused", "in 'lars', got the shape (3, 7)"),
    3: (lambda own: changed(own, {}, {"loss": float("inf")}), "refused", "the training loss is inf"),
    4: (lambda own: Envelope("train", {}, b""), "dropped", "expected the facts of an envelope (task result)"),
    5: (lambda own: changed(own, {}, {"steps": -1}), "dropped", "got others at 'steps'"),
    6: (lambda own: dataclasses.replace(own, body=b"\xff" * 50), "dropped", "got 50 that are none"),
    7: (lambda own: changed(own, {"lars": torch.zeros(300, 1000)}, {}), "dropped", "at most 1000000 bytes, got 1200"),
}


def test_one_node_sends_all_kinds_of_nonsense_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = three_rounds(training={"rounds": 7, "batch_size": 16, "lr": 0.05})
    wire = Nearby(recipe, tmp_path)

    def fault(node: int, envelope: Envelope) -> Answer | None:
        if (node, envelope.kind) != (BAD, "train") or envelope.facts["round"] == 1:
            return None
        own = wire.ask(BAD, envelope)
        assert isinstance(own, Envelope)
        return NONSENSE[envelope.facts["round"]][0](own)

    wire.fault = fault
    monkeypatch.setattr("polyfed.deploy.node_registry.LARGEST_ANSWER", 10**6)
    run = served(recipe, wire, tmp_path)
    reasons = {number: reason for number, _, reason in troubles(tmp_path / "out")}
    for record in run.history[1:]:
        _, effect, reason = NONSENSE[record["round"]]
        assert [entry["client"] for entry in record["refused"]] == ([1] if effect == "refused" else [])
        assert record["dropped"] == ([1] if effect == "dropped" else [])
        given = record["refused"][0]["reason"] if effect == "refused" else reasons[record["round"]]
        assert reason in given
        assert "\n" not in given


def test_sums_that_no_rows_can_have_do_not_end_a_run_though_they_come_first(tmp_path: Path) -> None:
    """In round 1 no others are heard; in round 2 the sums are sent unasked, as wide as those of other inputs."""
    recipe = three_rounds("closed-form")
    wire = Nearby(recipe, tmp_path)
    sums: dict[str, Any] = {}

    def fault(node: int, envelope: Envelope) -> Answer | None:
        number = envelope.facts["round"]
        if envelope.kind != "train" or number == 3 or (node != BAD and number == 2):
            return None
        if node != BAD:
            return NodeError("silence")
        own = wire.ask(node, envelope)
        assert isinstance(own, Envelope)
        sums.update(read_message(own.body).get("sums", {}))
        lies = {1: {**sums, "products": -sums["products"]}, 2: {**sums, "sums": sums["sums"][:, 1:]}}
        return changed(own, {"sums": lies[number]}, {})

    wire.fault = fault
    run = served(recipe, wire, tmp_path)
    assert [record["server"].get("sums_left_out") for record in run.history] == [1, None, None]
    assert ["in 'sums/sums'" in str(record["refused"]) for record in run.history] == [False, True, False]
    assert [bool(record["bytes_down"]) for record in run.history] == [False, True, True]


def test_sums_by_a_network_with_other_weights_than_the_servers_are_refused_by_name(tmp_path: Path) -> None:
    recipe = own_recipe(tmp_path, "own_map")
    method = {"name": "closed-form", "map": "own_map:net"}
    recipe = Recipe.from_dict({**recipe.to_dict(), "method": method}, beside=[str(tmp_path)])
    wire = Nearby(recipe, tmp_path)
    same(recipe, served(recipe, wire, tmp_path, deadline=5), tmp_path)

    def fault(node: int, envelope: Envelope) -> Answer | None:
        if (node, envelope.kind) != (BAD, "train"):
            return None
        own = wire.ask(BAD, envelope)
        assert isinstance(own, Envelope)
        return changed(own, {"network": torch.zeros(32, dtype=torch.uint8)}, {})

    wire.fault = fault
    run = served(recipe, wire, tmp_path, deadline=5, overwrite=True)
    (refused,) = run.history[0]["refused"]
    assert refused["client"] == 1
    assert refused["reason"].startswith("its network 'own_map:net' has other weights than the server's: SHA-256 0000")


# coming, going, coming back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["fedgh", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedmd", "scaffold"))]
)
def test_a_server_that_was_killed_resumes_as_if_nothing_had_been(tmp_path: Path, method: str) -> None:
    """It dies in the middle of a round, when one node has already trained; the others are then a round behind it.

    What carries envelopes has died, too, and has forgotten nodes' numbers: they come back with others.
    """
    recipe = three_rounds(method, data={"holdout": 20}, models={"architectures": ["digits-cnn1"]})
    wire = Nearby(recipe, tmp_path / "killed")
    exchanges = recipe.chosen_method.exchanges(2)

    def die(node: int, envelope: Envelope) -> Answer | None:
        if (node, envelope.kind) == (BAD, "train"):
            at = envelope.facts["round"], envelope.facts["exchange_index"]
            if at == (2, len(exchanges) - 1):
                raise _Killed
        return None

    assert exchanges[-1].trains
    wire.fault = die
    with pytest.raises(_Killed):
        served(recipe, wire, tmp_path / "killed")
    with pytest.raises(ConfigError, match="already holds a run; continue it with --resume"):
        served(recipe, wire, tmp_path / "killed")
    again = Nearby(recipe, tmp_path / "killed", ())
    for client in range(3):
        again.add(client, node=9000 - client)
    run = served(recipe, again, tmp_path / "killed", resume=True)
    expected = served(recipe, Nearby(recipe, tmp_path / "whole"), tmp_path / "whole")
    assert comparable(run.history) == comparable(expected.history)
    assert same_models(tmp_path / "killed", tmp_path / "whole")
    read = served(recipe, Nearby(recipe, tmp_path / "killed", ()), tmp_path / "killed", resume=True)  # nobody is there
    assert comparable(read.history) == comparable(expected.history)


def test_a_node_whose_rows_have_changed_is_out_until_they_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What travels says nothing of the rows."""

    def table(turned: bool) -> None:
        rows = [f"{i * 0.1},{-i * 0.2},{'ab'[(i + turned) % 2]}" for i in range(40)]
        (tmp_path / "own.csv").write_text("one,two,label\n" + "\n".join(rows) + "\n")

    def rounds(number: int, **more: Any) -> Run:
        monkeypatch.setattr("tests.helpers.nearby.DATA", DataCache())  # another process
        data = {"num_clients": 2, "class_names": ["a", "b"], "mean": [0.0, 0.0], "std": [1.0, 1.0]}
        recipe = recipe_of(
            "local",
            data=data,
            models={"architectures": ["mlp-16-32"]},
            training={"rounds": number},
            evaluation={"metrics": []},
        )
        configs = {client: {"data": f"csv:{tmp_path}/own.csv"} for client in (0, 1)}
        return served(recipe, Nearby(recipe, tmp_path, (0, 1), configs), tmp_path, **more)

    table(turned=False)
    rounds(1)
    table(turned=True)
    run = rounds(2, resume=True)
    assert run.history[1]["dropped"] == [0, 1]
    table(turned=False)
    run = rounds(3, resume=True)
    assert run.history[2]["dropped"] == []
    said = {(number, client): reason for number, client, reason in troubles(tmp_path / "out")}
    assert [*said] == [(2, 0), (2, 1)]
    assert all("expected the rows that this node has begun the run with" in reason for reason in said.values())
