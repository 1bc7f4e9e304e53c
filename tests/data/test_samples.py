"""Data sets of PyTorch and of the package `datasets`, read item by item, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import polyfed as pf
from polyfed.data.datasets import load_dataset
from polyfed.data.samples import from_dataset
from polyfed.data.text import TextConfig
from polyfed.errors import ConfigError


class Items(Dataset[Any]):
    """Any items."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        return self.items[row]


def test_tensors() -> None:
    x, y = torch.rand(6, 3, dtype=torch.float64), torch.arange(6) % 2
    read = from_dataset(Subset(TensorDataset(x, y), [4, 1, 2]))
    assert torch.equal(read.x, x[[4, 1, 2]].float())
    assert read.y.tolist() == [0, 1, 0]


def test_arrays_numbers_and_every_kind_of_label() -> None:
    labels = (2, np.int64(1), torch.tensor(0), np.array(3))
    read = from_dataset(Items(*((np.full(2, row, dtype=np.float32), label) for row, label in enumerate(labels))))
    assert read.x.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert read.y.tolist() == [2, 1, 0, 3]
    assert from_dataset(Items(([1.0, 2.0], 0))).x.dtype == torch.float32


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 3)])
def test_pillow_images(shape: tuple[int, ...]) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    read = from_dataset(Items((Image.fromarray(pixels), 1)))
    assert read.x.dtype == torch.uint8
    assert torch.equal(read.x[0], torch.from_numpy(pixels.reshape(4, 5, -1).transpose(2, 0, 1)))


def test_a_data_set_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    from PIL import Image

    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = {"img": [Image.fromarray(image) for image in pixels], "label": [1, 0]}
    given = datasets.Dataset.from_dict(rows, features=features)
    read = from_dataset(given)
    assert torch.equal(read.x[:, 0], torch.from_numpy(pixels))
    assert read.y.tolist() == [1, 0]
    with pytest.raises(ConfigError, match="got img, label, user; keep two columns"):
        from_dataset(given.add_column("user", [1, 2]))


class Stream(IterableDataset[Any]):
    """No length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(2), 0)])


MASKED = np.ma.masked_array(np.ones((3, 2), dtype=np.float32), mask=[[0, 0], [1, 0], [0, 1]])
LABELS = np.array([0, 1, 0])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((MASKED, LABELS), r"train: expected inputs without masked values, got 2; fill them in"),
        ((MASKED.data, np.ma.masked_equal(LABELS, 1)), "expected labels without masked values, got 1"),
        (Items(*zip(MASKED, LABELS, strict=True)), "expected an input in item 1 without masked values, got 1"),
        (Stream(), "got Stream"),
        ({"train": 1}, "got dict"),
        (Items(), "at least one item"),
        (Items(torch.zeros(2)), "as item 0, got Tensor"),
        (Items((torch.zeros(2), 0), (torch.zeros(3), 1)), r"\(2,\).* got \(3,\).* in item 1"),
        (Items((torch.zeros(2), None)), "label of item 0, got None"),
        (Items((torch.zeros(2), torch.tensor([1, 2]))), "label of item 0"),
        (Items((torch.tensor([0, float("nan")]), 1)), "finite"),
        (Items((object(), 1)), "got object"),
        (Items({"img": [1.0], "kind": 1}), "got img, kind"),
    ],
)
def test_refusals(data: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        pf.Client(nn.Linear(2, 2), train=data)
    assert "\n" not in str(caught.value)


PROBLEM = "an input has one label, multi-label data are not supported$"
X, Y = torch.rand(6, 3), torch.randint(0, 2, (6, 4))


@pytest.mark.parametrize("given", [(X, Y), TensorDataset(X, Y), [{"x": [1.0, 2.0], "label": [0, 1]}] * 3])
def test_arrays_and_data_sets(given: object) -> None:
    """A row of labels for every input."""
    with pytest.raises(ConfigError, match=PROBLEM):
        pf.from_tensors(given)


@pytest.mark.parametrize("column", ["img", "text"])
def test_lists_in_parquet_files(tmp_path: Path, column: str) -> None:
    """Of images and of texts."""
    stream = io.BytesIO()
    Image.new("RGB", (4, 4)).save(stream, "PNG")
    cell = stream.getvalue() if column == "img" else "a text"
    (tmp_path / "mine").mkdir()
    pq.write_table(pa.table({column: [cell] * 2, "label": [[0, 1], [1]]}), tmp_path / "mine" / "train.parquet")
    words = TextConfig(column="text" if column == "text" else None)
    with pytest.raises(ConfigError, match=PROBLEM):
        load_dataset("mine", tmp_path, label_column="label", words=words)
