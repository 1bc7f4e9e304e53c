"""The label table against the data dealt, and what is drawn of it."""

from dataclasses import replace

import numpy as np
import pytest

from polyfed.analysis.label_distribution import label_table
from polyfed.config.recipe import Recipe
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache
from polyfed.records.schema import ClientRow
from polyfed.report.run_records import RunRecord


def test_counts_of_each_client(runs: list[RunRecord]) -> None:
    table = label_table(runs[0])
    dealt = DataCache().federated(Recipe.of_run(runs[0].path))
    for client, row in zip(dealt.clients, table.to_numpy(), strict=True):
        assert list(row) == np.bincount(client.train.y.numpy(), minlength=10).tolist()
    assert list(table) == list("0123456789")


def test_clients_with_classes_of_their_own_and_records_without_counts(runs: list[RunRecord]) -> None:
    def counted(**counts: object) -> RunRecord:
        names: dict[str, object] = {"class_names": [], "client_names": ["north"]}
        rows = [ClientRow(id=n, architecture="a", samples=9, **one) for n, one in enumerate(counts.values())]
        return replace(runs[0], stored=runs[0].result.model_copy(update={"clients_table": rows, **names}))

    table = label_table(
        counted(
            one={"labels": {"0": 2, "1": 7}, "class_names": ["cat", "dog"]},
            other={"labels": {"0": 9}, "class_names": ["dog", "owl"]},
            unnamed={"labels": {"3": 9}},
        )
    )
    assert list(table) == ["cat", "dog", "3"]
    assert table.to_numpy().tolist() == [[2, 7, 0], [0, 9, 0], [0, 0, 9]]
    assert list(table.index) == ["0 north", "1", "2"]
    for without in ({}, {"labels": {}}):
        with pytest.raises(ConfigError, match="expected training samples by class"):
            label_table(counted(one=without))
