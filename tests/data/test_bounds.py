"""Files that never end, and small ones that stand for more than there is memory for, end in one line."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.data.arrow_tables import open_parquet
from polyfed.data.datasets import load_dataset
from polyfed.data.inference_inputs import InputSpec, read
from polyfed.data.labeled_texts import load_word_vectors
from polyfed.data.samples import upright
from polyfed.errors import ConfigError
from tests.helpers.quick import others_slow
from tests.helpers.small_data import encode, put, write_parquet


def test_an_archive_as_people_pack_them_is_read(tmp_path: Path) -> None:
    """Zeros, packed to a thousandth of their size."""
    (tmp_path / "train").mkdir()
    x = np.zeros((2, 1, 1024, 1024), dtype=np.uint8)
    np.savez_compressed(tmp_path / "train" / "0.npz", x=x, y=np.arange(2))
    assert (tmp_path / "train" / "0.npz").stat().st_size < x.nbytes / 500
    assert load_dataset(f"npz:{tmp_path}").train.x.shape == x.shape


READERS: dict[str, Callable[[Path], object]] = {
    "csv": lambda path: load_dataset(f"csv:{path}"),
    "csv of texts": lambda path: load_dataset(f"csv:{path}", text_column="text"),
    "vectors": lambda path: load_word_vectors(path, {"a"}),
    "parquet": lambda path: open_parquet(path),
    "new inputs": lambda path: read(path, InputSpec((2,), torch.float32, None, ("a", "b"), ("c", "d"))),
    "recipe": Recipe.load,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_is_not_waited_for(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"expected a file, got a pipe or a device: .*pipe"):
        READERS[reader](path)


@pytest.fixture
def pixels(tmp_path: Path) -> Path:
    """Two classes with an image each, of 90 million black pixels in 11 kB."""
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.new("1", (10_000, 9_000)).save(tmp_path / name / "0.png")
    return tmp_path


@pytest.mark.parametrize("image_size", others_slow([None, 8], quick=[8]))
def test_an_image_of_too_many_pixels(pixels: Path, image_size: int | None) -> None:
    """Without so much as Pillow's warning, which would be another line."""
    with pytest.raises(ConfigError, match=r"expected an image, got .*\(90000000 pixels\) exceeds limit"):
        load_dataset(f"images:{pixels}", image_size=image_size)


@pytest.fixture
def turned() -> bytes:
    """A PNG that is stored with its upper half bright, to be shown with its right half bright."""
    stream = io.BytesIO()
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(np.repeat(np.uint8([250, 0]), 8).reshape(4, 4)).save(stream, "PNG", exif=exif)
    return stream.getvalue()


def is_upright(x: torch.Tensor) -> bool:
    """x: (1, 4, 4)."""
    return x[0].tolist() == [[0, 0, 250, 250]] * 4


def test_images_are_read_upright_whatever_holds_them(turned: bytes, tmp_path: Path) -> None:
    """A folder, twice as the second time it comes from the cache; Parquet files; Python; a folder of each client."""
    plain = encode(np.full((4, 4), 9, np.uint8))
    put(tmp_path / "photos" / "train" / "a" / "0.png", turned)
    put(tmp_path / "photos" / "train" / "b" / "0.png", plain)
    for place in ("table", "clients/0"):
        write_parquet(tmp_path / place / "train.parquet", [turned, plain], {"label": [0, 1]})
    for name in (
        f"images:{tmp_path}/photos",
        f"images:{tmp_path}/photos",
        "parquet:table",
        "parquet:table",
        "clients:clients",
    ):
        source = load_dataset(name, tmp_path)
        assert is_upright(source.train.x[0]), name
    pillow = [(Image.open(io.BytesIO(data)), label) for label, data in enumerate((turned, plain, plain))]
    assert is_upright(pf.from_tensors(pillow).train.x[0])
    form = InputSpec((1, 4, 4), torch.uint8, None, ("a", "b"))
    assert is_upright(read(tmp_path / "photos" / "train" / "a", form).x[0])


def test_a_tag_that_cannot_be_read_does_not_count(turned: bytes) -> None:
    image = Image.open(io.BytesIO(turned))
    image.info["exif"] = b"Exif\0\0II*\0\xff\xff\xff\xff"
    assert upright(image).tobytes() == image.tobytes()
    plain = Image.new("L", (2, 2))
    plain.getexif()[ExifTags.Base.Orientation] = 1
    assert upright(plain).tobytes() == plain.tobytes()
