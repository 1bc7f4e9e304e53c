"""One file of arrays per client: both layouts, whose rows are whose, a whole run, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache
from tests.helpers.small_data import put, reading

read, refusal = reading("npz")
REST = {"models": {"architectures": ["mlp-64-32", "mlp-64-64-32"]}, "method": {"name": "fedproto"}}


def save(path: Path, x: Any, y: Any, plain: bool = False) -> None:
    """As `numpy.savez_compressed` writes a client: two arrays, or a dictionary, which it pickles."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {"x": x, "y": y} if plain else {"data": {"x": x, "y": y}}
    np.savez_compressed(path, **arrays)


def draw(client: int, rows: int, shape: tuple[int, ...] = (4,)) -> tuple[np.ndarray, np.ndarray]:
    """Inputs from 100 times the client's number on, labels in turn of two classes."""
    x = np.random.default_rng(client).random((rows, *shape)).astype(np.float32) + 100 * client
    return x, np.arange(rows) % 2 + client % 2


@pytest.fixture(params=[False, True], ids=["dictionary", "plain"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Clients 2, 9 and 10 with 6, 8 and 10 training rows and 4 test rows; classes 0 to 2."""
    for client, rows in ((2, 6), (9, 8), (10, 10)):
        save(tmp_path / "train" / f"{client}.npz", *draw(client, rows), plain=request.param)
        save(tmp_path / "test" / f"{client}.npz", *draw(client, 4), plain=request.param)
    return tmp_path


def test_rows_stay_with_their_client(place: Path) -> None:
    recipe = pf.Recipe.from_dict({"data": {"dataset": f"npz:{place}", "split": "official"}, **REST})
    assert (recipe.data.partition, recipe.data.group_by) == ("by_group", "client")
    dealt = DataCache().federated(recipe)
    assert dealt.source.class_names == ("0", "1", "2")
    assert dealt.label_table.tolist() == [[3, 3, 0], [0, 4, 4], [5, 5, 0]]
    for client, own, rows in zip((2, 9, 10), dealt.clients, (6, 8, 10), strict=True):
        assert torch.equal(own.train.x, torch.from_numpy(draw(client, rows)[0]))
        assert torch.equal(own.test.x, torch.from_numpy(draw(client, 4)[0]))
        assert own.test.y.tolist() == draw(client, 4)[1].tolist()


def test_floats_pass_unchanged_and_bytes_are_images(tmp_path: Path) -> None:
    x, y = draw(3, 6, (3, 2, 2))
    save(tmp_path / "train" / "a.npz", x.astype(np.float64), y.astype(np.int32))
    source = read(tmp_path)
    assert source.test is None
    assert source.train.x.dtype == torch.float32
    assert source.prepare(source.train.x) is source.train.x
    assert source.train_columns["client"].tolist() == ["a"] * 6
    save(tmp_path / "train" / "a.npz", (x - 300).astype(np.uint8) + np.uint8(51), y)
    source = read(tmp_path)
    assert source.mean == pytest.approx((0.2,) * 3)
    assert source.prepare(source.train.x).abs().max() < 1e-6


def test_config_says_how_many_classes_there_are(place: Path) -> None:
    config = {"num_clients": 3, "num_classes": 5, "non_iid": True, "alpha": 0.1}
    put(place / "config.json", json.dumps(config))
    assert read(place).class_names == ("0", "1", "2", "3", "4")
    for change, said in (
        ({"num_classes": 2}, "expected labels in 0..1 in"),
        ({"num_clients": 4}, f"expected 4 clients in {place / 'train'}, as {place / 'config.json'} says, got 3"),
        ({"num_classes": "5"}, "num_classes in"),
        ({"num_clients": True}, "num_clients in"),
    ):
        put(place / "config.json", json.dumps(config | change))
        assert said in refusal(place)
    put(place / "config.json", "[1")
    assert "expected a JSON object" in refusal(place)


def test_a_run(tmp_path: Path) -> None:
    for client in (0, 1):
        for side in ("train", "test"):
            save(tmp_path / side / f"{client}.npz", *draw(client, 10))
    data = {"dataset": f"npz:{tmp_path}", "split": "official"}
    done = pf.run(pf.Recipe.from_dict({"data": data, "training": {"rounds": 1}, **REST}))
    assert len(done.result["accuracy_per_client"]) == 2


def test_images_are_resized(tmp_path: Path) -> None:
    for client in (0, 1):
        save(tmp_path / "train" / f"{client}.npz", *draw(client, 10, (1, 4, 4)))
    models = {"models": {"architectures": ["digits-cnn1"]}, "method": {"name": "local"}}
    recipe = pf.Recipe.from_dict({"data": {"dataset": f"npz:{tmp_path}", "image_size": 8}, **models})
    assert DataCache().source(recipe).train.x.shape == (20, 1, 8, 8)


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (np.zeros((0, 4), np.float32), np.zeros(0, np.int64), "with N > 0 in"),
        (np.zeros((3, 4), np.float32), np.zeros(2, np.int64), "expected as many labels as training inputs in"),
        (
            np.zeros((3, 5), np.float32),
            np.zeros(3, np.int64),
            "of '2' ((4,), torch.float32), got (5,)",
        ),
        (np.zeros((3, 1, 4, 4), np.uint8), np.zeros(3, np.int64), "got (1, 4, 4), torch.uint8 in"),
        (np.full((3, 4), np.nan, np.float32), np.zeros(3, np.int64), "got NaN or infinite values"),
        (np.zeros((3, 4), np.float32), np.zeros(3), "whole-number training labels in"),
        (np.zeros((3, 4), np.float32), np.array([0, -1, 0]), "expected training labels from 0 on in"),
        (np.zeros((3, 4), np.int64), np.zeros(3, np.int64), "expected uint8 or float training inputs"),
        (np.array([([1], 1), ([2, 3], 2)], dtype=object), np.zeros(2, np.int64), "(texts as lists of ids?) for x"),
    ],
    ids=["empty", "lengths", "shape", "kind", "nan", "fractions", "negative", "ids", "texts"],
)
def test_a_client_that_cannot_be(tmp_path: Path, x: Any, y: Any, said: str) -> None:
    save(tmp_path / "train" / "2.npz", *draw(2, 4))
    save(tmp_path / "train" / "3.npz", x, y)
    message = refusal(tmp_path)
    assert said in message
    assert "3.npz" in message or "'3'" in message


def test_refusals(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    assert "expected one file per client (train/0.npz, train/1.npz) in" in refusal(empty / "none")
    for option in ({"label_column": "y"}, {"feature_columns": ["a"]}, {"image_column": "x"}, {"columns": ["user"]}):
        assert "has no use for" in refusal(place, **option)
    assert "no splits to choose from" in refusal(place, train_splits=["train", "more"])
    whole = (place / "train" / "2.npz").read_bytes()
    for content in (b"", b"no archive", whole[: len(whole) // 2]):
        put(place / "train" / "2.npz", content)
        assert f"got something else in {place / 'train' / '2.npz'}" in refusal(place)
    np.save(place / "train" / "array.npy", np.zeros(3))
    (place / "train" / "array.npy").rename(place / "train" / "2.npz")
    assert "expected arrays x and y as numpy.savez writes them" in refusal(place)
    np.savez(place / "train" / "2.npz", x=np.zeros((2, 4), np.float32))
    assert "got x for y" in refusal(place)
    np.savez(place / "train" / "2.npz", x=np.zeros((2, 4), np.float32), y=np.array([{}, {}], dtype=object))
    assert "pickle" not in refusal(place)
    put(place / "train" / "2.npz", whole)
    save(place / "test" / "2.npz", *draw(2, 4, (5,)))
    assert f"got (5,), torch.float32 in {place / 'test' / '2.npz'}" in refusal(place)
    (place / "test" / "2.npz").unlink()
    assert "got one of '9', unlike '2'" in refusal(place)
    save(place / "test" / "2.npz", *draw(2, 4))
    (place / "train" / "9.npz").unlink()
    assert f"got {place / 'test' / '9.npz'} without" in refusal(place)
    with pytest.raises(ConfigError, match="would leave out whole clients"):
        pf.Recipe.from_dict({"data": {"dataset": f"npz:{place}", "limit_train": 3}, **REST})
    with pytest.raises(ConfigError, match="no use for vocab_size, got '3'; text_column names a column of texts"):
        pf.run(pf.Recipe.from_dict({"data": {"dataset": f"npz:{place}", "vocab_size": 3}, **REST}))
