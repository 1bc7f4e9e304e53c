"""The networks' layers against the networks themselves; the inputs common to all clients; which clients are shown."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from polyfed.analysis.representations import (
    ClientRef,
    clients_of,
    common_inputs,
    common_layers,
    layers_of,
    represent_runs,
    subsample_clients,
    unit_kernel,
)
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import load_run_data
from polyfed.experiments.prediction import load
from polyfed.models.zoo import build
from polyfed.records.stored_files import StoredRecipe
from polyfed.report.run_records import RunRecord


def test_the_layers_of_a_split_model() -> None:
    torch.manual_seed(0)
    model = build("digits-cnn3", (1, 8, 8), 3).eval()
    x = torch.randn(2, 1, 8, 8)
    found = layers_of(model, x)
    assert list(found) == ["extractor", "representation", "logits"]
    assert torch.equal(found["extractor"], model.extract(x))
    assert torch.equal(model.head(found["representation"]), found["logits"])
    assert torch.equal(found["logits"], model(x))
    assert common_layers([found, layers_of(torch.nn.Flatten(), x)]) == ["logits"]


def test_clients_of_one_architecture_stand_side_by_side(runs: list[RunRecord]) -> None:
    one, three = "digits-cnn1", "digits-cnn3"
    found = clients_of(runs[0].path)
    assert found == [ClientRef(0, one), ClientRef(2, one), ClientRef(1, three), ClientRef(3, three)]
    assert subsample_clients(found, 10) == found
    assert subsample_clients(found, 3) == [ClientRef(0, one), ClientRef(2, one), ClientRef(1, three)]
    assert subsample_clients([ClientRef(n, "a") for n in range(5)] + [ClientRef(9, "b")], 3) == [
        ClientRef(0, "a"),
        ClientRef(1, "a"),
        ClientRef(9, "b"),
    ]


def test_each_clients_own_network_is_used(runs: list[RunRecord]) -> None:
    (group,) = represent_runs(runs[:2], inputs=20, kernels=True, vectors=True)
    assert (group.seed, [each.run.seed for each in group.runs]) == (0, [0, 1])
    first, other = group.runs
    assert (first.total, len(other.kernels), other.vectors) == (4, 4, ()), "vectors of the seed shown alone"
    for who, kernels, vectors in zip(first.clients, first.kernels, first.vectors, strict=True):
        scores = load(runs[0].path, who.client).scores(first.inputs.x)
        torch.testing.assert_close(kernels["logits"], unit_kernel(scores))
        torch.testing.assert_close(kernels["representation"], unit_kernel(vectors))


def test_no_models_and_damaged_ones(runs: list[RunRecord], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no clients' models"):
        clients_of(tmp_path)
    copy = tmp_path / "run"
    shutil.copytree(runs[0].path, copy)
    (copy / "models" / "index.json").write_text("[1]")
    with pytest.raises(ConfigError, match="got nothing readable"):
        clients_of(copy)


def test_outputs_that_are_not_finite(runs: list[RunRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = {"extractor": torch.tensor([[1.0, float("nan")]])}
    monkeypatch.setattr("polyfed.analysis.representations.layer_outputs", lambda model, x: outputs)
    with pytest.raises(ConfigError, match="client 0's outputs at 'extractor' are not finite"):
        represent_runs(runs[:1], inputs=4, kernels=True)


# inputs -------------------------------------------------------------------------------------------------------------


def elsewhere(run: RunRecord, folder: Path) -> RunRecord:
    """The run with another recipe; its result does not say how many rows clients had."""
    return replace(run, path=folder, stored=run.result.model_copy(update={"clients_table": None}))


def test_rows_of_all_clients_that_nobody_trained_on(runs: list[RunRecord]) -> None:
    dealt = load_run_data(runs[0])
    tests = torch.cat([client.test.x for client in dealt.clients]).flatten(1)
    found = common_inputs(runs[0], 30)
    assert found.about == f"30 of the {len(tests)} test rows of all clients together, classes evenly"
    assert len(found.y) == 30
    assert max(torch.bincount(found.y)) <= 4
    trained = {row.numpy().tobytes() for client in dealt.clients for row in client.train.x}
    tested = {row.numpy().tobytes() for row in tests}
    mine = {row.numpy().tobytes() for row in found.x}
    assert mine <= tested
    assert not mine & trained
    again = common_inputs(runs[2], 30)
    assert runs[2].method != runs[0].method
    assert torch.equal(again.x, found.x), "the same for another method"
    assert not torch.equal(common_inputs(runs[1], 30).x, found.x), "others for another seed"
    everything = common_inputs(runs[0], 10_000)
    assert everything.about.startswith(f"all {len(tests)} ")


def test_the_common_test_set(runs: list[RunRecord], tmp_path: Path) -> None:
    recipe = (runs[0].path / "recipe.toml").read_text().replace('test = "local"', 'test = "global"')
    (tmp_path / "recipe.toml").write_text(recipe)
    found = common_inputs(elsewhere(runs[0], tmp_path), 10)
    assert "rows of the common test set" in found.about


def test_requests_that_cannot_be_met(runs: list[RunRecord], tmp_path: Path) -> None:
    recipe = (runs[0].path / "recipe.toml").read_text()
    (tmp_path / "recipe.toml").write_text(recipe.replace("max_train_per_client = 20", "max_train_per_client = 19"))
    with pytest.raises(ConfigError, match="gives other data now than the run had: client 0"):
        load_run_data(replace(runs[0], path=tmp_path))
    with pytest.raises(ConfigError, match="got none: the run was given its data"):
        load_run_data(replace(runs[0], recipe=StoredRecipe()))
