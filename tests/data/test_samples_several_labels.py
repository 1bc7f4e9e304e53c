"""An input has one label: several, in whatever form they come, are refused in one line that says so."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import polyfed as pf
from polyfed.data.datasets import load_dataset
from polyfed.data.text import TextConfig
from polyfed.errors import ConfigError

SAID = "an input has one label, multi-label data are not supported$"
X, Y = torch.rand(6, 3), torch.randint(0, 2, (6, 4))


@pytest.mark.parametrize("given", [(X, Y), TensorDataset(X, Y), [{"x": [1.0, 2.0], "label": [0, 1]}] * 3])
def test_arrays_and_data_sets(given: object) -> None:
    """A row of labels for every input."""
    with pytest.raises(ConfigError, match=SAID):
        pf.from_tensors(given)


def test_files_of_arrays(tmp_path: Path) -> None:
    """As PFLlib keeps them."""
    (tmp_path / "train").mkdir()
    np.savez(tmp_path / "train" / "0.npz", x=X.numpy(), y=Y.numpy())
    with pytest.raises(ConfigError, match=SAID):
        load_dataset(f"npz:{tmp_path}")


@pytest.mark.parametrize("column", ["img", "text"])
def test_lists_in_parquet_files(tmp_path: Path, column: str) -> None:
    """Of images and of texts."""
    stream = io.BytesIO()
    Image.new("RGB", (4, 4)).save(stream, "PNG")
    cell = stream.getvalue() if column == "img" else "a text"
    (tmp_path / "mine").mkdir()
    pq.write_table(pa.table({column: [cell] * 2, "label": [[0, 1], [1]]}), tmp_path / "mine" / "train.parquet")
    words = TextConfig(column="text" if column == "text" else None)
    with pytest.raises(ConfigError, match=SAID):
        load_dataset("mine", tmp_path, label_column="label", words=words)


def test_several_columns_in_a_recipe() -> None:
    """One column of labels."""
    data = {"dataset": "csv:a.csv", "label_column": ["ill", "old"]}
    with pytest.raises(ConfigError, match=r"expected one column, got \['ill', 'old'\]; an input has one label"):
        pf.Recipe.from_dict({"data": data, "models": {"architectures": ["mlp-64-32"]}, "method": {"name": "local"}})
