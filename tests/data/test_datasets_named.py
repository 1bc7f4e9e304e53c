"""The sets that are known by name, on small stand-ins in the layout of their copies on the Hub; further columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyfed.data.datasets import DatasetSource, from_tensors, load_dataset
from polyfed.errors import ConfigError
from polyfed.registry import DATASETS
from tests.helpers.small_data import some_images, write_parquet

FINE, COARSE = [f"fine {c}" for c in range(100)], [f"coarse {c}" for c in range(20)]


def hub_file(path: Path, count: int, image: str, labels: dict[str, list[str]], seed: int = 0) -> np.ndarray:
    """A Parquet file with the feature notes that `datasets` itself writes; returns its images (N, H, W, 3)."""
    datasets = pytest.importorskip("datasets")
    pictures = some_images(count, (32, 32, 3), seed)
    columns: dict[str, Any] = {image: list(pictures)}
    features: dict[str, Any] = {image: datasets.Image()}
    for name, classes in labels.items():
        columns[name] = [(7 * row + seed) % len(classes) for row in range(count)]
        features[name] = datasets.ClassLabel(names=classes)
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet(path)
    return np.stack(pictures)


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_dataset(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_cifar100_is_fine_unless_it_is_asked_coarse(tmp_path: Path) -> None:
    labels = {"fine_label": FINE, "coarse_label": COARSE}
    pictures = hub_file(tmp_path / "cifar100" / "train-00000-of-00001.parquet", 6, "img", labels)
    hub_file(tmp_path / "cifar100" / "test-00000-of-00001.parquet", 3, "img", labels, 1)
    fine = load_dataset("cifar100", tmp_path)
    assert (fine.name, fine.classes, fine.class_names[99]) == ("cifar100", 100, "fine 99")
    assert fine.train.y.tolist() == [0, 7, 14, 21, 28, 35]
    assert np.array_equal(fine.train.x.permute(0, 2, 3, 1), pictures)
    assert (fine.mean[0], fine.std[2]) == (0.5071, 0.2762)
    for coarse in (
        load_dataset("cifar100", tmp_path, label_column="coarse_label"),
        load_dataset("cifar100-coarse", tmp_path),
    ):
        assert coarse.classes == 20
        assert coarse.train.y.tolist() == [0, 7, 14, 1, 8, 15]
        assert (coarse.mean, coarse.std) == (fine.mean, fine.std)
    assert "use dataset 'cifar100'" in refusal("cifar100-coarse", tmp_path, label_column="fine_label")


def test_cinic10_leaves_its_validation_split_alone_unless_asked(tmp_path: Path) -> None:
    classes = {"label": [f"{c}" for c in range(10)]}
    for seed, (split, count) in enumerate((("train", 5), ("validation", 4), ("test", 3))):
        hub_file(tmp_path / "cinic10" / f"{split}-00000-of-00001.parquet", count, "image", classes, seed)
    plain, both = (
        load_dataset("cinic10", tmp_path),
        load_dataset("cinic10", tmp_path, train_splits=["train", "validation"]),
    )
    assert (len(plain.train), len(both.train)) == (5, 9)
    assert torch.equal(both.train.x[:5], plain.train.x)
    assert plain.test is not None
    assert both.test is not None
    assert torch.equal(plain.test.x, both.test.x)
    assert len(plain.test) == 3
    turned = load_dataset("cinic10", tmp_path, train_splits=["val", "train"])  # in the order asked for
    assert torch.equal(turned.train.x[4:], plain.train.x)
    assert (plain.mean[1], plain.std[1]) == (0.4723, 0.2383)


@pytest.mark.parametrize("below", ["", "cropped_digits"])
def test_svhn_reads_the_cropped_digits_and_extra_when_asked(tmp_path: Path, below: str) -> None:
    digits = {"label": [f"{c}" for c in range(10)]}
    place = tmp_path / "svhn" / below
    for seed, (split, count) in enumerate((("train", 5), ("test", 3), ("extra", 7))):
        hub_file(place / f"{split}-00000-of-00001.parquet", count, "image", digits, seed)
    if below:
        hub_file(tmp_path / "svhn" / "full_numbers" / "train-00000-of-00001.parquet", 2, "image", digits)
    source = load_dataset("svhn", tmp_path)
    assert source.test is not None
    assert (len(source.train), len(source.test), source.classes) == (5, 3, 10)
    assert (source.mean, source.std) == ((0.5,) * 3, (0.5,) * 3)
    assert len(load_dataset("svhn", tmp_path, train_splits=["train", "extra"]).train) == 12
    assert "did you mean 'extra'" in refusal("svhn", tmp_path, train_splits=["train", "extras"])


def test_splits_that_cannot_be_chosen(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", some_images(2), {"label": [0, 1]})
    for wrong in (["test"], [], ["train", "train"], ["train", "training"]):
        assert "expected train_splits" in refusal("parquet", tmp_path, train_splits=wrong)
    assert "expected a split 'validation'" in refusal("parquet", tmp_path, train_splits=["validation"])
    assert "no splits to choose from" in refusal("digits", train_splits=["train", "validation"])


@pytest.mark.parametrize("name", ["cifar100", "cifar100-coarse", "svhn", "cinic10"])
def test_absent_files_say_what_is_needed(tmp_path: Path, name: str) -> None:
    assert f"{name.removesuffix('-coarse')}/train*.parquet" in refusal(name, tmp_path)
    assert DATASETS[name].__doc__


# further columns -----------------------------------------------------------------------------------------------------


@pytest.fixture
def writers(tmp_path: Path) -> Path:
    """Two training files and a test file with a writer and a page per row."""
    for name, first, count in (("train-0", 0, 4), ("train-1", 4, 3), ("test", 7, 2)):
        rows = range(first, first + count)
        columns = {
            "label": [r % 2 for r in rows],
            "writer": [f"w{r % 3}" for r in rows],
            "page": [10 * r for r in rows],
        }
        write_parquet(tmp_path / f"{name}.parquet", some_images(count), columns)
    return tmp_path


def test_further_columns_follow_their_rows(writers: Path) -> None:
    source = load_dataset("parquet", writers, columns=["writer", "page"], label_column="label")
    assert source.train_columns["page"].tolist() == [0, 10, 20, 30, 40, 50, 60]
    assert source.train_columns["writer"].tolist() == ["w0", "w1", "w2", "w0", "w1", "w2", "w0"]
    assert source.test_columns["page"].tolist() == [70, 80]
    cut = source.head(5, 1)
    assert (len(cut.train), cut.train_columns["page"].tolist(), cut.test_columns["page"].tolist()) == (
        5,
        [0, 10, 20, 30, 40],
        [70],
    )
    assert load_dataset("parquet", writers, label_column="label").train_columns == {}
    assert "did you mean 'writer'" in refusal("parquet", writers, columns=["writers"], label_column="label")


def test_a_column_that_the_test_side_lacks_is_left_out_there(writers: Path) -> None:
    write_parquet(writers / "test.parquet", some_images(2), {"label": [0, 1]})
    source = load_dataset("parquet", writers, columns=["writer"], label_column="label")
    assert list(source.train_columns) == ["writer"]
    assert source.test_columns == {}


@pytest.mark.parametrize("values", [[0.5, 1.5], ["a", None], [None, None], [2**70, 1]])
def test_column_values_that_nobody_can_deal_by(tmp_path: Path, values: list[Any]) -> None:
    if 2**70 in values:
        with pytest.raises(ConfigError, match="whole numbers or strings"):
            from_tensors((np.zeros((2, 3)), [0, 1]), train_columns={"user": values})
        return
    write_parquet(tmp_path / "train.parquet", some_images(2), {"label": [0, 1], "user": values})
    assert "whole numbers or strings" in refusal("parquet", tmp_path, columns=["user"], label_column="label")


def test_columns_of_own_tensors_and_own_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(root: object, options: object) -> DatasetSource:
        return from_tensors((np.zeros((2, 3)), [0, 1]), train_columns={"user": np.array([5, 6], dtype=np.uint8)})

    monkeypatch.setitem(DATASETS.entries, "mine", mine)
    assert load_dataset("mine", columns=["user"]).train_columns["user"].dtype == np.int64
    listed = from_tensors((np.zeros((2, 3)), [0, 1]), train_columns={"user": [*np.array([5, 6], dtype=np.uint8)]})
    assert listed.train_columns["user"].tolist() == [5, 6]
    assert "did you mean 'user'" in refusal("mine", columns=["usr"])
    assert "no further columns" in refusal("digits", columns=["user"])
    with pytest.raises(ConfigError, match="expected 2 training values in column 'user'"):
        from_tensors((np.zeros((2, 3)), [0, 1]), train_columns={"user": [1]})
    with pytest.raises(ConfigError, match="expected 0 test values"):
        from_tensors((np.zeros((2, 3)), [0, 1]), test_columns={"user": [1]})
