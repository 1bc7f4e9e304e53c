"""Data sets of PyTorch and of `datasets`, read item by item; labels that are none, and classes that are odd."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import polyfed as pf
from polyfed.data.classes import remarks
from polyfed.data.datasets import from_tensors, load_dataset
from polyfed.data.samples import LabeledSamples, from_dataset
from polyfed.errors import ConfigError
from tests.helpers.refusals import refusal
from tests.helpers.small_data import encode, put, some_images, write_parquet


class Items(Dataset[Any]):
    """Any items."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        return self.items[row]


def test_tensors_arrays_numbers_and_every_kind_of_label() -> None:
    x, y = torch.rand(6, 3, dtype=torch.float64), torch.arange(6) % 2
    read = from_dataset(Subset(TensorDataset(x, y), [4, 1, 2]))
    assert torch.equal(read.x, x[[4, 1, 2]].float())
    assert read.y.tolist() == [0, 1, 0]
    labels = (2, np.int64(1), torch.tensor(0), np.array(3))
    read = from_dataset(Items(*((np.full(2, row, dtype=np.float32), label) for row, label in enumerate(labels))))
    assert read.x.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert read.y.tolist() == [2, 1, 0, 3]
    assert from_dataset(Items(([1.0, 2.0], 0))).x.dtype == torch.float32


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 3)])
def test_pillow_images(shape: tuple[int, ...]) -> None:

    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    read = from_dataset(Items((Image.fromarray(pixels), 1)))
    assert read.x.dtype == torch.uint8
    assert torch.equal(read.x[0], torch.from_numpy(pixels.reshape(4, 5, -1).transpose(2, 0, 1)))


def test_a_data_set_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)

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


LABELS = np.array([0, 1, 0])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Stream(), "got Stream"),
        (Items(), "at least one item"),
        (Items((torch.zeros(2), 0), (torch.zeros(3), 1)), r"\(2,\).* got \(3,\).* in item 1"),
        (Items((torch.zeros(2), torch.tensor([1, 2]))), r"labels of shape \(N,\), got \(1, 2\)"),
        (Items((torch.tensor([0, float("nan")]), 1)), "finite"),
        (Items({"img": [1.0], "kind": 1}), "got img, kind"),
    ],
)
def test_refusals(data: Any, words: str) -> None:
    assert re.search(words, refusal(lambda: pf.Client(nn.Linear(2, 2), train=data)))


PROBLEM = "an input has one label, multi-label data are not supported$"
X, Y = torch.rand(6, 3), torch.randint(0, 2, (6, 4))


@pytest.mark.parametrize(
    "given",
    [
        (X, Y),
        TensorDataset(X, Y),
        *([{"x": [1.0, 2.0], "label": cell}] * 3 for cell in ([0, 1], {0, 1}, np.array([0, 1]))),
        (X, [[0], [0, 1]] * 3),
    ],
)
def test_arrays_and_data_sets(given: object) -> None:
    """A row of labels for every input."""
    with pytest.raises(ConfigError, match=PROBLEM):
        pf.from_tensors(given)


@pytest.mark.parametrize(("scale", "offset", "told"), [(50.0, 0.0, False), (1e3, 0, True), (1, 1e5, True)])
def test_inputs_that_are_far_from_0_are_named(scale: float, offset: float, told: bool) -> None:
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    made = [pf.Client(nn.Linear(3, 2), (x, y)), pf.Client(nn.Linear(3, 2), (scale * x + offset, y), name="north")]
    lines = pf.Federation(made, pf.methods.Local()).remarks()
    assert len(lines) == told
    assert not told or "client 1 ('north')" in lines[0]


def test_series_of_different_lengths_are_refused() -> None:
    short, long = (torch.randn(4, 1, 50), torch.arange(4) % 2), (torch.randn(4, 1, 100), torch.arange(4) % 2)
    with pytest.raises(
        ConfigError, match=r"expected test inputs like the training inputs of .*\(1, 50\).* got \(1, 100\)"
    ):
        pf.from_tensors(short, long)
    with pytest.raises(ConfigError, match=r"all have to have one shape, these have \(1, 50\), \(1, 100\)"):
        pf.from_tensors(([short[0][0], long[0][0]], torch.tensor([0, 1])))


NONE = "; -1 often means that there is none; drop such rows, or name the column of the labels in label_column"


def refused(name: str, root: Path | None = None) -> str:
    return refusal(lambda: load_dataset(name, root))


def test_of_parquet_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", some_images(3), {"label": [0, 1, 2]})
    write_parquet(tmp_path / "train-1.parquet", some_images(3), {"label": [2, -1, -1]})
    assert refused(f"parquet:{tmp_path}") == f"expected labels from 0 on in column 'label', got -1{NONE}"


def test_of_a_folder_for_each_client(tmp_path: Path) -> None:
    put(tmp_path / "clinics" / "north" / "train.csv", "a,label\n1,0\n2,1\n3,2\n")
    put(tmp_path / "clinics" / "south" / "train.csv", "a,label\n1,0\n2,2\n3,-1\n")
    assert f"got -1{NONE}" in refused("clients:clinics", tmp_path)
    put(tmp_path / "clinics" / "south" / "train.csv", "a,label\n1,1\n2,1\n3,-1\n")  # 1 and -1 alone may be two classes
    assert f"got -1{NONE}" in refused("clients:clinics", tmp_path)
    put(tmp_path / "clinics" / "north" / "train.csv", "a,label\n1,1\n2,1\n3,-1\n")
    assert load_dataset("clients:clinics", tmp_path).class_names == ("-1", "1")


def test_of_folders_of_images(tmp_path: Path) -> None:
    for name in ("-1", "0", "1"):
        put(tmp_path / "photos" / name / "1.png", encode(some_images(1)[0]))
    assert f"in {tmp_path / 'photos'}, got '-1', which often means" in refused("images:photos", tmp_path)
    (tmp_path / "photos" / "0").rename(tmp_path / "photos" / "cat")  # words, of which -1 is one
    assert load_dataset("images:photos", tmp_path).class_names == ("-1", "1", "cat")


def test_of_arrays(tmp_path: Path) -> None:
    problem = "; rows without a label, often marked -1, have to be dropped first"
    y = np.array([0, 1, -1, -1])
    (tmp_path / "train").mkdir()
    np.savez(tmp_path / "train" / "0.npz", x=np.zeros((4, 3), np.float32), y=y)
    where = f"got -1 in row 2, the first of 2 such rows{problem}"
    file = tmp_path / "train" / "0.npz"
    assert refused(f"npz:{tmp_path}", tmp_path) == f"training side of '{file}': expected labels from 0 on, {where}"
    pair = (np.zeros((4, 3), np.float32), y)
    good = (pair[0], abs(y))
    for make, message in (
        (lambda: from_tensors(good, pair, name="mine"), f"test side of 'mine': expected labels from 0 on, {where}"),
        (lambda: LabeledSamples(torch.zeros(4, 3), torch.tensor(y)), f"expected labels from 0 on, {where}"),
        (lambda: pf.Client("mlp-64-32", good, pair), f"test: expected labels from 0 on, {where}"),
        (lambda: from_tensors([(1.0, 0), (2.0, -1), (3.0, 1)]), f"expected labels from 0 on, got -1 in row 1{problem}"),
    ):
        assert refusal(make).endswith(message)


def test_remarks_on_classes() -> None:
    assert remarks(["cat", "owl"], {0, 1}, {1}) == []
    assert remarks([str(n) for n in range(30)], set(range(20)) | {25}, set()) == [
        "classes that nobody trains on or is tested on (9): 20, 21, 22, 23, 24, 26, 27, 28, 29"
    ]
    names = [f"kind {n}" for n in range(40)]
    (line,) = remarks(names, {0}, set(range(40)))
    assert line.startswith("classes with test rows that nobody trains on (39): 1 (kind 1), 2 (kind 2), ")
    assert line.endswith(", 12 (kind 12) and 27 more")


def test_samples_stay_in_main_memory_where_a_gpu_has_not_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = LabeledSamples(torch.zeros(4, 3), torch.arange(4))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    assert samples.at(torch.device("cuda")).x is samples.x
