"""Inputs common to all clients: whose rows they are, how they are spread, when data are not the run's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from polyfed.analysis.probe_inputs import balanced_order, common_inputs, load_run_data
from polyfed.errors import ConfigError
from polyfed.report.run_records import RunRecord
from polyfed.results.stored_files import StoredRecipe


def elsewhere(run: RunRecord, folder: Path) -> RunRecord:
    """The run with another recipe; its result does not say how many rows clients had."""
    return replace(run, path=folder, stored=run.result.model_copy(update={"clients_table": None}))


def test_every_beginning_has_the_classes_evenly() -> None:
    y = torch.tensor([0] * 50 + [1] * 3 + [4] * 20)
    order = balanced_order(y, np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(73))
    for count, expected in ((3, (1, 1, 1)), (9, (3, 3, 3)), (13, (5, 3, 5)), (53, (30, 3, 20)), (73, (50, 3, 20))):
        found = torch.bincount(y[order[:count]], minlength=5)
        assert tuple(found[[0, 1, 4]].tolist()) == expected
    assert order.tolist() != balanced_order(y, np.random.default_rng(1)).tolist()


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
    held = common_inputs(runs[0], 10, "holdout")
    assert held.about == "10 of the 20 rows that the server set aside, classes evenly"


def test_the_common_test_set(runs: list[RunRecord], tmp_path: Path) -> None:
    recipe = (runs[0].path / "recipe.toml").read_text().replace('test = "local"', 'test = "global"')
    (tmp_path / "recipe.toml").write_text(recipe)
    found = common_inputs(elsewhere(runs[0], tmp_path), 10)
    assert "rows of the common test set" in found.about


def test_requests_that_cannot_be_met(runs: list[RunRecord], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown rows 'tests'; did you mean 'test'"):
        common_inputs(runs[0], 10, "tests")
    recipe = (runs[0].path / "recipe.toml").read_text()
    (tmp_path / "recipe.toml").write_text(recipe.replace("max_train_per_client = 20", "max_train_per_client = 19"))
    with pytest.raises(ConfigError, match="deals other data now than the run had: client 0"):
        load_run_data(replace(runs[0], path=tmp_path))
    (tmp_path / "recipe.toml").write_text(recipe.replace("holdout = 20", "holdout = 0"))
    with pytest.raises(ConfigError, match=r"data\.holdout"):
        common_inputs(elsewhere(runs[0], tmp_path), 10, "holdout")
    with pytest.raises(ConfigError, match="got none: the run was given its data"):
        load_run_data(replace(runs[0], recipe=StoredRecipe()))
