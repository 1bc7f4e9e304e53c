"""A folder of images per class: sides, order, colors, sizes, the cache, a whole run, and every refusal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.data import images
from polyfed.data.datasets import load_dataset
from polyfed.data.samples import LabeledSamples
from polyfed.data.transforms import resize
from polyfed.errors import ConfigError
from polyfed.experiments import prediction
from tests.helpers.small_data import encode, reading

GRAY = np.arange(36, dtype=np.uint8).reshape(6, 6)
read, refusal = reading("images")


def put(place: Path, *pixels: np.ndarray, form: str = "PNG") -> None:
    """Images 0.png, 1.png, ... in a folder."""
    place.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(pixels):
        (place / f"{number}.{'png' if form == 'PNG' else 'jpg'}").write_bytes(encode(image, form))


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """Training: two bees (values from 0 and 2), one ape (1); test: one of each (3, 4); all gray, 6 x 6."""
    put(tmp_path / "train" / "bee", GRAY, GRAY + 2)
    put(tmp_path / "train" / "ape", GRAY + 1)
    put(tmp_path / "test" / "ape", GRAY + 3)
    put(tmp_path / "test" / "bee", GRAY + 4)
    return tmp_path


def test_sides_classes_and_order(animals: Path) -> None:
    (animals / "train" / "bee" / "notes.txt").write_text("no image")
    source = read(animals)
    assert source.class_names == ("ape", "bee")
    assert source.train.y.tolist() == [0, 1, 1]  # the classes in turn
    assert torch.equal(source.train.x[:, 0], torch.from_numpy(np.stack([GRAY + 1, GRAY, GRAY + 2])))
    assert source.test is not None
    assert source.test.y.tolist() == [0, 1]
    assert source.test.x[:, 0, 0, 0].tolist() == [3, 4]
    assert source.mean == pytest.approx([np.mean([GRAY + 1, GRAY, GRAY + 2]) / 255])


def test_several_sizes_need_image_size(tmp_path: Path) -> None:
    put(tmp_path / "a", GRAY)
    put(tmp_path / "b", np.tile(GRAY, (2, 2)))
    assert "6x6 pixels as the first, got 12x12" in refusal(tmp_path)
    assert "set data.image_size" in refusal(tmp_path)
    source = read(tmp_path, image_size=4)
    assert source.train.x.shape == (2, 1, 4, 4)
    large = LabeledSamples(torch.from_numpy(np.tile(GRAY, (2, 2)))[None, None], torch.tensor([0]))
    assert torch.equal(source.train.x[1:], resize(large, 4).x)


def test_gray_among_rgb_becomes_rgb_and_jpeg_is_read(tmp_path: Path) -> None:
    put(tmp_path / "a", GRAY)
    put(tmp_path / "b", np.full((6, 6, 3), (250, 10, 10), dtype=np.uint8), form="JPEG")
    x = read(tmp_path).train.x
    assert torch.equal(x[0], torch.from_numpy(GRAY).expand(3, 6, 6))
    assert x[1, 0].float().mean() > 200 > 50 > x[1, 1].float().mean()


def test_decoded_once_until_an_image_or_the_size_changes(animals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read(animals)
    with monkeypatch.context() as patched:
        patched.setattr(images, "_decoded", None)
        assert torch.equal(read(animals).train.x, first.train.x)
    assert read(animals, image_size=3).train.x.shape == (3, 1, 3, 3)
    put(animals / "train" / "ape", GRAY + 7)
    assert read(animals).train.x[0, 0, 0, 0] == 7


def test_refusals(animals: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    assert "got no such folder" in refusal(empty / "none")
    assert "one folder of images per class" in refusal(empty)
    put(empty / "a", GRAY)
    assert "two or more classes" in refusal(empty)
    (empty / "b").mkdir()
    assert "images (.png, .jpg) of class 'b'" in refusal(empty)
    (empty / "b" / "1.png").write_bytes(b"no image")
    assert "do not decode" in refusal(empty)
    put(animals / "test" / "cat", GRAY)
    assert "got 'cat'" in refusal(animals)
    assert "no use for label_column, got 'kind'" in refusal(animals, label_column="kind")
    assert "no use for image_column" in refusal(animals, image_column="kind")
    assert "no use for columns, got 'user'" in refusal(animals, columns=["user"])
    assert "no use for feature_columns" in refusal(animals, feature_columns=["a"])
    with pytest.raises(ConfigError, match="got none"):
        load_dataset("images:")


def test_a_run_on_image_folders_and_its_models_on_new_images(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 200)):
        put(tmp_path / "data" / name, *(draws.integers(level, level + 40, (12, 12), dtype=np.uint8) for _ in range(20)))
    recipe = {
        "data": {"dataset": "images:data", "root": str(tmp_path), "image_size": 8, "num_clients": 2},
        "models": {"architectures": ["digits-cnn1", "digits-cnn3"]},
        "method": {"name": "fedproto"},
        "training": {"rounds": 3, "batch_size": 4, "lr": 0.05},
    }
    done = pf.run(pf.Recipe.from_dict(recipe), out=tmp_path / "run")
    assert done.result["accuracy"] == 1.0
    found = prediction.predict(tmp_path / "run", 0, tmp_path / "data" / "light")
    assert {row["class_name"] for row in found.rows()} == {"light"}
