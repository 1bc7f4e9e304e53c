"""A source knows in which column of its files the labels stood, named or found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polyfed.data.datasets import from_tensors, load_dataset
from polyfed.data.text import TextConfig
from tests.helpers.small_data import some_images, write_parquet

TABLE = "\n".join(["a,said,target", *(f"{n},word {n},{n % 2}" for n in range(12))])


def named(place: Path, name: str, **options: Any) -> str | None:
    return load_dataset(name, place, **options).label_column


def test_of_csv_files(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TABLE)
    assert named(tmp_path, "csv:a.csv") == "target"
    assert named(tmp_path, "csv:a.csv", words=TextConfig("said")) == "target"
    (tmp_path / "a.csv").write_text(TABLE.replace("target", "outcome"))
    assert named(tmp_path, "csv:a.csv", label_column="outcome") == "outcome"


def test_of_parquet_files(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    table = {"said": [f"word {n}" for n in range(6)], "liked": [n % 2 for n in range(6)]}
    pq.write_table(pa.table(table), tmp_path / "texts" / "train.parquet")
    assert named(tmp_path, "texts", words=TextConfig("said"), label_column="liked") == "liked"
    pictures = some_images(6)
    write_parquet(tmp_path / "photos" / "train.parquet", pictures, {"labels": [0, 1, 2] * 2}, features=False)
    options = {"image_column": "img"}
    assert named(tmp_path, "photos", **options) == "labels"
    assert named(tmp_path, "photos", **options) == "labels", "out of the cache"


def test_of_clients_folders(tmp_path: Path) -> None:
    for client in ("north", "south"):
        (tmp_path / "clinics" / client).mkdir(parents=True)
        (tmp_path / "clinics" / client / "train.csv").write_text(TABLE)
    assert named(tmp_path, "clients:clinics") == "target"
    assert named(tmp_path, "clients:clinics", words=TextConfig("said")) == "target"


def test_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    labels = {"fine_label": [0, 1, 2] * 2}
    write_parquet(tmp_path / "someone" / "a" / "data" / "train-0.parquet", some_images(6), labels, features=False)
    assert load_dataset("hub:someone/a", image_column="img").label_column == "fine_label"


def test_of_what_has_no_columns() -> None:
    assert load_dataset("digits").label_column is None
    assert from_tensors((np.zeros((4, 3)), np.arange(4) % 2)).label_column is None
