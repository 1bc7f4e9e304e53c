"""One folder per client: whose rows are whose, classes over all, the three kinds, and every refusal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.data.text import TextConfig
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


def test_rows_stay_with_their_client(clinics: Path) -> None:
    recipe = pf.Recipe.from_dict({"data": {"dataset": f"clients:{clinics}", "split": "official"}, **REST})
    assert (recipe.data.partition, recipe.data.group_by) == ("by_group", "client")
    dealt = DataCache().federated(recipe)
    assert [len(client.train) for client in dealt.clients] == [4, 6, 8]  # 2, 9, 10: by value
    for name, client in zip((2, 9, 10), dealt.clients, strict=True):
        assert (client.train.x[:, 0] // 100).unique().tolist() == [name]
        assert (client.test.x[:, 0] // 100).unique().tolist() == [name]
    assert dealt.unused == 0
    assert dealt.source.class_names == ("ill", "odd", "well")
    assert dealt.label_table.tolist() == [[4, 0, 0], [0, 6, 0], [4, 0, 4]]


def test_standardized_over_all_clients(clinics: Path) -> None:
    source = read(clinics)
    every = np.concatenate([name * 100 + np.arange(count) for name, count in ((2, 4), (9, 6), (10, 8))])
    assert source.mean[0] == pytest.approx(every.mean())
    assert source.std[0] == pytest.approx(every.std())
    assert source.train_columns["client"].tolist() == [2] * 4 + [9] * 6 + [10] * 8
    assert source.test_columns["client"].tolist() == [2, 2, 9, 9, 10, 10]


def test_another_partition_can_be_asked_for(clinics: Path) -> None:
    data = {"dataset": f"clients:{clinics}", "partition": "iid", "num_clients": 2}
    dealt = DataCache().federated(pf.Recipe.from_dict({"data": data, **REST}))
    assert len(dealt.clients) == 2
    assert all(len((client.train.x[:, 0] // 100).unique()) > 1 for client in dealt.clients)


def test_a_run(clinics: Path) -> None:
    data = {"dataset": f"clients:{clinics}", "split": "official"}
    done = pf.run(pf.Recipe.from_dict({"data": data, "training": {"rounds": 1}, **REST}))
    assert len(done.result["accuracy_per_client"]) == 3


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
        put(place / name / "train.csv", f"said,kind\n{rows}")
        put(place / name / "test.csv", "said,kind\ngood zebra,1\n")


def test_texts(tmp_path: Path) -> None:
    texts_of_three(tmp_path)
    source = read(tmp_path, words=TextConfig("said", length=2), label_column="kind")
    assert source.class_names == ("1", "2", "x")
    assert source.train.y.tolist() == [1, 2, 0, 1, 0]
    assert source.train_columns["client"].tolist() == ["a", "a", "b", "b", "c"]
    assert source.train.x.tolist() == [[2, 4], [2, 0], [5, 3], [2, 0], [3, 0]]  # bad, good, day, so: over all clients
    assert source.test is not None
    assert source.test.x.tolist() == [[3, 1]] * 3
    data = {"dataset": f"clients:{tmp_path}", "split": "official", "text_column": "said", "label_column": "kind"}
    dealt = DataCache().federated(pf.Recipe.from_dict({"data": data, **REST}))
    assert dealt.label_table.tolist() == [[0, 1, 1], [1, 1, 0], [1, 0, 0]]


def test_refusals_of_texts(tmp_path: Path) -> None:
    texts_of_three(tmp_path)
    asked = {"words": TextConfig("said"), "label_column": "kind"}
    assert "no use for feature_columns" in refusal(tmp_path, **asked, feature_columns=["kind"])
    assert "no use for image_column beside text_column" in refusal(tmp_path, **asked, image_column="kind")
    assert "text_column names a column" in refusal(tmp_path, words=TextConfig(length=3))
    wrong = [put(tmp_path / name / "train.csv", "said,kind\n,1\n") for name in "ab"]
    with pytest.raises(ConfigErrors) as caught:
        read(tmp_path, **asked)
    assert len(caught.value.problems) == 2
    assert all(
        f"a text in line 2 of column 'said' of {w}" in p for w, p in zip(wrong, caught.value.problems, strict=True)
    )
    texts_of_three(tmp_path)
    (tmp_path / "c" / "test.csv").unlink()
    assert "got none of 'c', unlike 'a'" in refusal(tmp_path, **asked)
    put(tmp_path / "c" / "train.csv", "text,kind\ngood,1\n")
    put(tmp_path / "c" / "test.csv", "text,kind\ngood,1\n")
    assert f"text column 'said' in {tmp_path / 'c' / 'train.csv'}" in refusal(tmp_path, **asked)


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
    assert "no use for label_column" in refusal(tmp_path, label_column="kind")
    assert "no use for text_column" in refusal(tmp_path, words=TextConfig("kind"))


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
    put(clinics / "11" / "train.csv", "a,b,label\n1,2,ill\nx,2,ill\n")
    put(clinics / "2" / "train.csv", "a,b,label\n1,2,ill\n1,,ill\n")
    with pytest.raises(ConfigErrors) as caught:
        read(clinics)
    assert [f"line 3 of column '{c}' of {clinics / n / 'train.csv'}" for n, c in (("11", "a"), ("2", "b"))] == [
        line.partition(" in ")[2].partition(",")[0] for line in caught.value.problems[1:]
    ]
    put(clinics / "11" / "train.csv", "a,b,label\n1,2,ill\n")
    assert read(clinics, feature_columns=["a"]).feature_names == ("a",)
    write_parquet(clinics / "12" / "train.parquet", some_images(1), {"label": [0]})
    assert "expected csv of every client" in refusal(clinics)
    with pytest.raises(ConfigError, match="would leave out whole clients"):
        pf.Recipe.from_dict({"data": {"dataset": f"clients:{clinics}", "limit_train": 3}, **REST})
