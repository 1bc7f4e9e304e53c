"""Tables with numbers to predict: read, dealt and standardized client by client."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.data.dataset import DatasetSource
from polyfed.data.samples import LabeledSamples, TargetScale
from polyfed.errors import ConfigError
from tests.helpers import regression


def table(folder: Path) -> DatasetSource:
    path = regression.write_table(folder / "costs.csv")
    return pf.load_dataset(f"csv:{path}", label_column="cost", columns=["site"], regression=True)


def test_labels_of_a_table_are_read_as_numbers(tmp_path: Path) -> None:
    source = table(tmp_path)
    assert source.is_regression
    assert (source.classes, source.class_names) == (0, ())
    assert source.feature_names == ("a", "b", "c")
    stored = [line.split(",")[3] for line in (tmp_path / "costs.csv").read_text().splitlines()[1:]]
    assert source.train.y.tolist() == np.array(stored, dtype=np.float32).tolist()
    assert "numbers to predict" in repr(source)


def test_each_clients_numbers_are_standardized_by_its_own_training_rows(tmp_path: Path) -> None:
    source = table(tmp_path)
    dealt = pf.federate(source, num_clients=None, partition="by_group", group_by="site", split="6:2:2")
    scales = []
    for client in dealt.clients:
        y = client.train.scale.restored(client.train.y)
        assert client.train.scale.mean == pytest.approx(float(y.mean()), rel=1e-5)
        assert client.train.scale.std == pytest.approx(float(y.std(correction=0)), rel=1e-5)
        assert float(client.train.y.mean()) == pytest.approx(0, abs=1e-5)
        assert client.test.scale == client.validation.scale == client.train.scale
        parts = [part.scale.restored(part.y) for part in (client.train, client.validation, client.test)]
        assert all(any(abs(float(value) - known) < 1e-3 for known in source.train.y.tolist()) for value in parts[2])
        scales.append(client.train.scale)
    assert len(set(scales)) == 3
    assert [round(scale.mean / 100) for scale in scales] == [0, 1, 2]
    assert dealt.label_table.tolist() == [[len(client.train)] for client in dealt.clients]


def test_a_common_test_set_stays_in_its_own_unit(tmp_path: Path) -> None:
    dealt = pf.federate(table(tmp_path), num_clients=3, test="global", split="8:0:2")
    assert dealt.test is not None
    assert dealt.test.scale == TargetScale()
    assert float(dealt.test.y.max()) > 100


def test_numbers_that_do_not_vary_are_only_centered() -> None:
    x = torch.zeros(4, 2)
    dealt = pf.federate(pf.from_tensors((x, torch.full((4,), 7.0))), num_clients=1, split="2:0:2")
    assert dealt.clients[0].train.scale == TargetScale(7.0, 1.0)
    assert dealt.clients[0].test.y.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("partition", ["dirichlet", "by_class"])
def test_partitions_by_class_are_refused(tmp_path: Path, partition: str) -> None:
    with pytest.raises(ConfigError, match=f"partition '{partition}' deals by classes; expected iid, .*by_group"):
        pf.federate(table(tmp_path), num_clients=2, partition=partition)


def test_what_cannot_be_predicted_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "words.csv"
    path.write_text("a,cost\n1,2.5\n2,much\n")
    with pytest.raises(ConfigError, match=r"expected a finite number to predict in line 3 of column 'cost' .*'much'"):
        pf.load_dataset(f"csv:{path}", label_column="cost", regression=True)
    path.write_text("a,cost\n1,2.5\n2,3.5\n")
    with pytest.raises(ConfigError, match=r"got '2.5'; data.task = 'regression' predicts numbers"):
        pf.load_dataset(f"csv:{path}", label_column="cost")
    with pytest.raises(ConfigError, match=r"data\.task 'regression': expected a table, .* got 'digits'"):
        pf.load_dataset("digits", regression=True)
    with pytest.raises(ConfigError, match="expected finite numbers to predict, got nan in row 1"):
        LabeledSamples(torch.zeros(2, 1), torch.tensor([1.0, float("nan")]))
    with pytest.raises(ConfigError, match="expected no classes, as labels of 'tensors' are floats"):
        pf.from_tensors((torch.zeros(2, 1), torch.zeros(2)), classes=2)
    with pytest.raises(ConfigError, match=r"of shape \(N,\), got \(2, 2\)"):  # several numbers per row
        pf.from_tensors((torch.zeros(2, 1), torch.zeros(2, 2)))


def test_items_with_float_labels_are_numbers() -> None:
    source = pf.from_tensors([(torch.zeros(2), 0.5), (torch.ones(2), -1.5), (torch.ones(2), 2.0)])
    assert source.train.y.tolist() == [0.5, -1.5, 2.0]
    with pytest.raises(ConfigError, match=r"expected a float as label of item 1, as of item 0, got 2"):
        pf.from_tensors([(torch.zeros(2), 0.5), (torch.ones(2), 2), (torch.ones(2), 2.0)])
