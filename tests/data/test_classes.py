"""Labels that are none, and classes that are odd: a label of -1 is refused by its row, gaps are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.data.classes import remarks
from polyfed.data.datasets import from_tensors, load_dataset
from polyfed.data.samples import LabeledSamples
from polyfed.errors import ConfigError
from polyfed.experiments.estimate import check
from tests.helpers.small_data import encode, put, some_images, write_parquet

NONE = "; -1 often means that there is none; drop such rows, or name the column of the labels in label_column"


def refusal(name: str, root: Path | None, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_dataset(name, root, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_of_parquet_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", some_images(3), {"label": [0, 1, 2]})
    write_parquet(tmp_path / "train-1.parquet", some_images(3), {"label": [2, -1, -1]})
    where = tmp_path / "train-1.parquet"
    problem = f"expected labels from 0 on in column 'label', got -1 in row 1 of {where}, the first of 2 such rows{NONE}"
    assert refusal("parquet", tmp_path) == problem


def test_of_tables(tmp_path: Path) -> None:
    put(tmp_path / "both" / "train.csv", "a,label\n1,0\n2,1\n3,2\n")
    put(tmp_path / "both" / "test.csv", "a,label\n1,0\n2,-2\n3,-1\n")
    where = tmp_path / "both" / "test.csv"
    start = f"expected labels from 0 on in column 'label', got -2 in line 3 of {where}, the first of 2 such rows; drop"
    assert refusal("csv:both", tmp_path).startswith(start)


def test_of_a_folder_for_each_client(tmp_path: Path) -> None:
    put(tmp_path / "clinics" / "north" / "train.csv", "a,label\n1,0\n2,1\n3,2\n")
    put(tmp_path / "clinics" / "south" / "train.csv", "a,label\n1,0\n2,2\n3,-1\n")
    assert f"got -1 in line 4 of {tmp_path / 'clinics' / 'south'}" in refusal("clients:clinics", tmp_path)
    put(tmp_path / "clinics" / "south" / "train.csv", "a,label\n1,1\n2,1\n3,-1\n")  # 1 and -1 alone may be two classes
    assert f"got -1 in line 4 of {tmp_path / 'clinics' / 'south'}" in refusal("clients:clinics", tmp_path)
    put(tmp_path / "clinics" / "north" / "train.csv", "a,label\n1,1\n2,1\n3,-1\n")
    assert load_dataset("clients:clinics", tmp_path).class_names == ("-1", "1")


def test_of_folders_of_images(tmp_path: Path) -> None:
    for name in ("-1", "0", "1"):
        put(tmp_path / "photos" / name / "1.png", encode(some_images(1)[0]))
    assert f"in {tmp_path / 'photos'}, got '-1', which often means" in refusal("images:photos", tmp_path)
    (tmp_path / "photos" / "0").rename(tmp_path / "photos" / "cat")  # words, of which -1 is one
    assert load_dataset("images:photos", tmp_path).class_names == ("-1", "1", "cat")


def test_of_arrays(tmp_path: Path) -> None:
    problem = "; rows without a label, often marked -1, have to be dropped first"
    y = np.array([0, 1, -1, -1])
    (tmp_path / "train").mkdir()
    np.savez(tmp_path / "train" / "0.npz", x=np.zeros((4, 3), np.float32), y=y)
    where = f"got -1 in row 2, the first of 2 such rows{problem}"
    file = tmp_path / "train" / "0.npz"
    assert refusal(f"npz:{tmp_path}", tmp_path) == f"training side of '{file}': expected labels from 0 on, {where}"
    pair = (np.zeros((4, 3), np.float32), y)
    good = (pair[0], abs(y))
    for make, message in (
        (lambda: from_tensors(good, pair, name="mine"), f"test side of 'mine': expected labels from 0 on, {where}"),
        (lambda: LabeledSamples(torch.zeros(4, 3), torch.tensor(y)), f"expected labels from 0 on, {where}"),
        (lambda: pf.Client("mlp-64-32", good, pair), f"test: expected labels from 0 on, {where}"),
        (lambda: from_tensors([(1.0, 0), (2.0, -1), (3.0, 1)]), f"as label of item 1, got -1{problem}"),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert str(caught.value).endswith(message)


def test_remarks_on_classes() -> None:
    assert remarks(["cat", "owl"], {0, 1}, {1}) == []
    assert remarks(["1", "2", "3"], {0, 1, 2}, set()) == []  # they start elsewhere, without a gap
    assert remarks([str(n) for n in range(30)], set(range(20)) | {25}, set()) == [
        "classes that nobody trains on or is tested on (9): 20, 21, 22, 23, 24, 26, 27, 28, 29"
    ]
    names = [f"kind {n}" for n in range(40)]
    (line,) = remarks(names, {0}, set(range(40)))
    assert line.startswith("classes with test rows that nobody trains on (39): 1 (kind 1), 2 (kind 2), ")
    assert line.endswith(", 12 (kind 12) and 27 more")


class Hears:
    """Keeps the messages of a run."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture
def stray(tmp_path: Path) -> pf.Recipe:
    """Two classes and a stray label of a million in training, and a label of 7 in the test side alone."""
    rows = [f"{n},{n % 5},{n % 2}" for n in range(40)]
    put(tmp_path / "table" / "train.csv", "\n".join(["a,b,label", *rows, "41,1,1000000"]) + "\n")
    put(tmp_path / "table" / "test.csv", "\n".join(["a,b,label", *rows[:10], "42,1,7"]) + "\n")
    data = {
        "dataset": f"csv:{tmp_path / 'table'}",
        "num_clients": 2,
        "partition": "iid",
        "test": "global",
        "split": "official",
    }
    models = {"architectures": ["mlp-64-32"]}
    rest = {"models": models, "method": {"name": "local"}, "training": {"rounds": 1, "batch_size": 8}}
    return pf.Recipe.from_dict({"data": data, **rest})


ODD = [
    "labels are numbers with gaps: 4 of 0 to 1000000 became the classes 0 to 3; a stray one is a class of its own",
    "classes with test rows that nobody trains on (1): 2 (7)",
]


def test_a_run_and_a_check_say_what_is_odd(stray: pf.Recipe) -> None:
    hears = Hears()
    pf.run(stray, loggers=[hears])
    assert hears.messages == ODD
    found = check(stray)
    assert list(found.class_remarks) == ODD
    assert all(line in str(found).splitlines() for line in ODD)
