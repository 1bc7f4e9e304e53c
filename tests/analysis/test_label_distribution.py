"""The label table against the data dealt, and what is drawn of it."""

from dataclasses import replace

import numpy as np
import pytest

from polyfed.analysis.label_distribution import label_table, plot_labels
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import load_run_data
from polyfed.report.grouping import group_runs
from polyfed.report.run_records import RunRecord
from polyfed.results.schema import ClientRow


def test_counts_of_each_client(runs: list[RunRecord]) -> None:
    table = label_table(runs[0])
    for client, row in zip(load_run_data(runs[0]).clients, table["matrix"], strict=True):
        assert list(row) == np.bincount(client.train.y.numpy(), minlength=10).tolist()
    assert table["architectures"] == ["digits-cnn1", "digits-cnn3"] * 2
    assert table["columns"] == list("0123456789")


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
    assert (table["columns"], table["matrix"]) == (["cat", "dog", "3"], [[2, 7, 0], [0, 9, 0], [0, 0, 9]])
    assert table["rows"] == ["0 north", "1", "2"]
    for without in ({}, {"labels": {}}):
        with pytest.raises(ConfigError, match="expected training samples by class"):
            label_table(counted(one=without))


def test_numbers_where_there_is_room_and_shades_everywhere(runs: list[RunRecord]) -> None:
    (group,), _ = group_runs(runs)
    table = label_table(runs[0])
    drawing = plot_labels(group, table)
    axes = drawing.figure.axes[0]
    assert axes.images[0].get_array().tolist() == table["matrix"]
    written = {text.get_position(): int(text.get_text()) for text in axes.texts}
    assert written == {(x, y): n for y, row in enumerate(table["matrix"]) for x, n in enumerate(row) if n}
    assert sum(row["samples"] for row in drawing.rows) == 80
    many = plot_labels(group, {**table, **{key: table[key] * 10 for key in ("matrix", "architectures", "rows")}})
    assert not many.figure.axes[0].texts
    assert len(many.figure.axes[0].get_yticklabels()) <= 30
