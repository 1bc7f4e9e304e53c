"""A folder or a file per client: whose rows are whose, classes over all, and every refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.errors import ConfigError, ConfigErrors
from polyfed.experiments.data_cache import DataCache
from tests.helpers.small_data import encode, put, reading, some_images, write_parquet

REST = {"models": {"architectures": ["mlp-64-32", "mlp-64-64-32"]}, "method": {"name": "fedproto"}}
read, refusal = reading("clients")


@pytest.fixture
def clinics(tmp_path: Path) -> Path:
    """Three clients 2, 9, 10 with 4, 6 and 8 training rows and 2 test rows each; the first knows one class alone."""
    for name, count in ((10, 8), (2, 4), (9, 6)):
        label = (lambda row, name=name: "ill" if name == 2 or row % 2 else "well") if name != 9 else lambda row: "odd"
        for side, rows in (("train", count), ("test", 2)):
            lines = [f"{name * 100 + row},{row},{label(row)}" for row in range(rows)]
            put(tmp_path / str(name) / f"{side}.csv", "\n".join(["a,b,label", *lines]) + "\n")
    return tmp_path


def label_counts(federated: FederatedDataset) -> list[list[int]]:
    """How many training rows of each of three classes each client has."""
    return [client.train.y.bincount(minlength=3).tolist() for client in federated.clients]


def test_rows_stay_with_their_client(clinics: Path) -> None:
    recipe = pf.Recipe.from_dict({"data": {"dataset": f"clients:{clinics}", "split": "official"}, **REST})
    assert (recipe.data.partition, recipe.data.group_by) == ("by_group", "client")
    federated = DataCache().federated(recipe)
    assert [len(client.train) for client in federated.clients] == [4, 6, 8]  # 2, 9, 10: by value
    for name, client in zip((2, 9, 10), federated.clients, strict=True):
        assert (client.train.x[:, 0] // 100).unique().tolist() == [name]
        assert (client.test.x[:, 0] // 100).unique().tolist() == [name]
    assert federated.unused == 0
    assert federated.source.class_names == ("ill", "odd", "well")
    assert label_counts(federated) == [[4, 0, 0], [0, 6, 0], [4, 0, 4]]


def test_parquet_files(tmp_path: Path) -> None:
    pictures = some_images(5)
    write_parquet(tmp_path / "b" / "train.parquet", pictures[:2], {"label": [7, 4]})
    write_parquet(tmp_path / "a" / "train.parquet", pictures[2:], {"label": [10, 10, 7]})
    source = read(tmp_path)
    assert source.class_names == ("4", "7", "10")
    assert source.train.y.tolist() == [2, 2, 1, 1, 0]
    assert source.train_columns["client"].tolist() == ["a", "a", "a", "b", "b"]
    assert torch.equal(source.train.x[3].permute(1, 2, 0), torch.from_numpy(pictures[0]))


def texts_of_three(place: Path) -> None:
    for name, rows in (("b", "so good,1\nbad,2\n"), ("a", "bad day,2\nbad,x\n"), ("c", "good,1\n")):
        put(place / name / "train.csv", f"problem,kind\n{rows}")
        put(place / name / "test.csv", "problem,kind\ngood zebra,1\n")


def test_texts(tmp_path: Path) -> None:
    texts_of_three(tmp_path)
    source = read(tmp_path, text_column="problem", max_length=2, label_column="kind")
    assert source.class_names == ("1", "2", "x")
    assert source.train.y.tolist() == [1, 2, 0, 1, 0]
    assert source.train_columns["client"].tolist() == ["a", "a", "b", "b", "c"]
    assert source.train.x.tolist() == [[2, 4], [2, 0], [5, 3], [2, 0], [3, 0]]  # bad, good, day, so: over all clients
    assert source.test is not None
    assert source.test.x.tolist() == [[3, 1]] * 3
    data = {"dataset": f"clients:{tmp_path}", "split": "official", "text_column": "problem", "label_column": "kind"}
    federated = DataCache().federated(pf.Recipe.from_dict({"data": data, **REST}))
    assert label_counts(federated) == [[0, 1, 1], [1, 1, 0], [1, 0, 0]]


def test_refusals_of_texts(tmp_path: Path) -> None:
    texts_of_three(tmp_path)
    asked = {"text_column": "problem", "label_column": "kind"}
    assert "no use for image_column beside text_column" in refusal(tmp_path, **asked, image_column="kind")
    (tmp_path / "c" / "test.csv").unlink()
    assert "got none of 'c', unlike 'a'" in refusal(tmp_path, **asked)
    put(tmp_path / "c" / "train.csv", "text,kind\ngood,1\n")
    put(tmp_path / "c" / "test.csv", "text,kind\ngood,1\n")
    assert f"text column 'problem' in {tmp_path / 'c' / 'train.csv'}" in refusal(tmp_path, **asked)


def test_folders_of_images(tmp_path: Path) -> None:
    gray = np.zeros((4, 4), dtype=np.uint8)
    for place, level in (("x/train/cat", 1), ("x/test/cat", 2), ("y/train/dog", 3), ("y/test/cat", 4)):
        put(tmp_path / place / "0.png", encode(gray + level))
    source = read(tmp_path)
    assert source.class_names == ("cat", "dog")
    assert source.train.y.tolist() == [0, 1]
    assert source.train.x[:, 0, 0, 0].tolist() == [1, 3]
    assert source.test is not None
    assert source.test.y.tolist() == [0, 0]
    put(tmp_path / "z" / "train" / "cat" / "0.png", encode(np.tile(gray, (2, 2))))
    put(tmp_path / "z" / "test" / "cat" / "0.png", encode(np.tile(gray, (2, 2))))
    assert "got 8x8 in" in refusal(tmp_path)
    assert len(read(tmp_path, image_size=4).train) == 3


def test_refusals(clinics: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    assert "got no such folder" in refusal(empty / "none")
    assert "one folder per client" in refusal(empty)
    (clinics / "11").mkdir()
    assert "of client '11'" in refusal(clinics)
    put(clinics / "11" / "train.csv", "a,b,label\n1,2,ill\n")
    assert "'11', unlike '2'" in refusal(clinics)
    put(clinics / "11" / "test.csv", "a,c,label\n1,2,ill\n")
    assert f"feature column 'b' in {clinics / '11' / 'test.csv'}, got no such" in refusal(clinics)
    put(clinics / "11" / "train.csv", "a,c,label\n1,2,ill\n")
    with pytest.raises(ConfigErrors) as caught:
        read(clinics)
    of_11, others = caught.value.problems
    assert others.startswith(f"expected the feature column 'c' in {clinics / '2' / 'train.csv'}, ")
    assert f"{clinics / '9' / 'test.csv'} and 1 more, got no such" in others
    assert others.endswith("; 2 others have it, and feature_columns may name others")
    assert of_11.startswith(f"expected the feature column 'b' in {clinics / '11' / 'train.csv'}, ")
    put(clinics / "11" / "train.csv", "a,b,label\n1,2,ill\n")
    assert read(clinics, feature_columns=["a"]).feature_names == ("a",)
    write_parquet(clinics / "12" / "train.parquet", some_images(1), {"label": [0]})
    assert "expected csv of every client" in refusal(clinics)
    for kind in ("clients", "npz"):
        with pytest.raises(ConfigError, match="could leave out whole clients"):
            pf.Recipe.from_dict({"data": {"dataset": f"{kind}:{clinics}", "limit_train": 3}, **REST})


read_arrays, refusal_arrays = reading("npz")


def save(path: Path, x: Any, y: Any) -> None:
    """A client's two arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, x=x, y=y)


def draw(client: int, rows: int, shape: tuple[int, ...] = (4,)) -> tuple[np.ndarray, np.ndarray]:
    """Inputs from 100 times the client's number on, labels in turn of two classes."""
    x = np.random.default_rng(client).random((rows, *shape)).astype(np.float32) + 100 * client
    return x, np.arange(rows) % 2 + client % 2


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Clients 2, 9 and 10 with 6, 8 and 10 training rows and 4 test rows; classes 0 to 2."""
    for client, rows in ((2, 6), (9, 8), (10, 10)):
        save(tmp_path / "train" / f"{client}.npz", *draw(client, rows))
        save(tmp_path / "test" / f"{client}.npz", *draw(client, 4))
    return tmp_path


def test_rows_of_arrays_stay_with_their_client(place: Path) -> None:
    recipe = pf.Recipe.from_dict({"data": {"dataset": f"npz:{place}", "split": "official"}, **REST})
    assert (recipe.data.partition, recipe.data.group_by) == ("by_group", "client")
    federated = DataCache().federated(recipe)
    assert federated.source.class_names == ("0", "1", "2")
    assert label_counts(federated) == [[3, 3, 0], [0, 4, 4], [5, 5, 0]]
    for client, own, rows in zip((2, 9, 10), federated.clients, (6, 8, 10), strict=True):
        assert torch.equal(own.train.x, torch.from_numpy(draw(client, rows)[0]))
        assert torch.equal(own.test.x, torch.from_numpy(draw(client, 4)[0]))
        assert own.test.y.tolist() == draw(client, 4)[1].tolist()


def test_floats_pass_unchanged_and_bytes_are_images(tmp_path: Path) -> None:
    x, y = draw(3, 6, (3, 2, 2))
    save(tmp_path / "train" / "a.npz", x.astype(np.float64), y.astype(np.int32))
    source = read_arrays(tmp_path)
    assert source.test is None
    assert source.train.x.dtype == torch.float32
    assert source.prepare(source.train.x) is source.train.x
    assert source.train_columns["client"].tolist() == ["a"] * 6
    save(tmp_path / "train" / "a.npz", (x - 300).astype(np.uint8) + np.uint8(51), y)
    source = read_arrays(tmp_path)
    assert source.mean == pytest.approx((0.2,) * 3)
    assert source.prepare(source.train.x).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("x", "y", "problem"),
    [
        (np.zeros((0, 4), np.float32), np.zeros(0, np.int64), "with N > 0 in"),
        (np.zeros((3, 4), np.float32), np.zeros(2, np.int64), "expected as many labels as inputs"),
        (np.zeros((3, 5), np.float32), np.zeros(3, np.int64), "of '2' ((4,), torch.float32), got (5,)"),
        (np.full((3, 4), np.nan, np.float32), np.zeros(3, np.int64), "got NaN or infinite values"),
        (np.zeros((3, 4), np.float32), np.zeros(3), "whole-number training labels in"),
        (np.zeros((3, 4), np.float32), np.array([0, -1, 0]), "expected labels from 0 on, got -1 in row 1"),
        (np.array([([1], 1), ([2, 3], 2)], dtype=object), np.zeros(2, np.int64), "got something else in"),
    ],
    ids=["empty", "lengths", "shape", "nan", "fractions", "negative", "texts"],
)
def test_a_client_that_cannot_be(tmp_path: Path, x: Any, y: Any, problem: str) -> None:
    save(tmp_path / "train" / "2.npz", *draw(2, 4))
    save(tmp_path / "train" / "3.npz", x, y)
    message = refusal_arrays(tmp_path)
    assert problem in message
    assert "3.npz" in message or "'3'" in message


def test_refusals_of_arrays(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    assert "expected one file per client (train/0.npz, train/1.npz) in" in refusal_arrays(empty / "none")
    assert "has no use for label_column" in refusal_arrays(place, label_column="y")
    whole = (place / "train" / "2.npz").read_bytes()
    for content in (b"", b"no archive", whole[: len(whole) // 2]):
        put(place / "train" / "2.npz", content)
        assert f"got something else in {place / 'train' / '2.npz'}" in refusal_arrays(place)
    np.savez(place / "train" / "2.npz", x=np.zeros((2, 4), np.float32))
    assert f"expected arrays x and y in {place / 'train' / '2.npz'}, got x" in refusal_arrays(place)
    np.savez(place / "train" / "2.npz", data={"x": np.zeros((2, 4), np.float32), "y": np.zeros(2, np.int64)})
    assert "docs/coming-from-pfllib.md shows how to convert it" in refusal_arrays(place)
    np.savez(place / "train" / "2.npz", x=np.zeros((2, 4), np.float32), y=np.array([{}, {}], dtype=object))
    assert "pickle" not in refusal_arrays(place)
    put(place / "train" / "2.npz", whole)
    save(place / "test" / "2.npz", *draw(2, 4, (5,)))
    assert f"got (5,), torch.float32 in {place / 'test' / '2.npz'}" in refusal_arrays(place)
    (place / "test" / "2.npz").unlink()
    assert "got one of '9', unlike '2'" in refusal_arrays(place)
    save(place / "test" / "2.npz", *draw(2, 4))
    (place / "train" / "9.npz").unlink()
    assert f"got {place / 'test' / '9.npz'} without" in refusal_arrays(place)
