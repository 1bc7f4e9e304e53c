"""Labeled images from Parquet files in the layout of the Hugging Face Hub, decoded once to uint8.

The files are read with pyarrow, not with ``datasets.load_dataset``: that one first writes
a converted copy of every file, and needs no less memory. What `datasets` knows about the columns (which are images,
which are labels and what the classes are called) stands in the files' own schema and is read from there.

Shapes: N images, C channels (1 gray, 3 RGB), H x W pixels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data import bounds, cache
from polyfed.data.column_schema import Columns, pick_columns
from polyfed.data.label_encoding import encode_labels
from polyfed.data.parquet_files import open_parquet, read_extra_columns, same_columns
from polyfed.data.samples import LabeledSamples
from polyfed.data.split_files import find_split_files
from polyfed.errors import ConfigError, first_line
from polyfed.results.read import parse_json

_VERSION = "images-3"  # part of every cache key: raise it when decoding or label handling changes
_ROWS = 1000  # rows decoded at a time


@dataclass(frozen=True)
class LabeledImages:
    """What was read: both sides, what the classes are called, and further columns (name -> (N,) values) by side.

    label_column: where the labels stood in the files; None: in none. turned: how many images their EXIF tags turned.
    """

    train: LabeledSamples
    test: LabeledSamples | None
    class_names: tuple[str, ...]
    train_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    test_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    label_column: str | None = None
    turned: int = 0


def read_folder(
    folder: Path,
    image_column: str | None = None,
    label_column: str | None = None,
    train_splits: Sequence[str] = ("train",),
    columns: Sequence[str] = (),
) -> LabeledImages:
    """Read and decode a folder of Parquet files, or take the decoded copy from the cache.

    Files whose name (or folder) says train are the training side, those that say test the test side. Without a test
    file, validation files are the test side (Tiny-ImageNet); beside one they are not read. When no name says anything,
    all files are training files.

    Labels are kept as they are when the files name the classes (a ClassLabel feature) or when they are whole numbers
    that fill 0..C-1. Otherwise (say 0 and 4, or strings) the sorted distinct values of both sides become 0..C-1 and
    their spelling the classes' names.

    Args:
        folder: holds ``*.parquet``, directly or one folder down.
        image_column: the column with encoded images; None to find it.
        label_column: the column with labels; None to find it.
        train_splits: the words in files' names that say "training side", in the order in which their rows follow.
        columns: further columns of whole numbers or strings; one that the test side lacks is left out there.

    Raises:
        ConfigError: no training files, a file that is not whole Parquet, columns missing or ambiguous, an image that
            does not decode, images of several shapes, labels that are missing, negative or out of range.
    """
    files = find_split_files(folder, train_splits)
    every = [path for paths in files.values() for path in paths]
    found = same_columns(every, pick_columns, image_column, label_column)
    try:
        sums = cache.file_checksums(every)
    except OSError as error:
        raise ConfigError(f"cannot read the files in {folder}: {first_line(error)}") from error
    sides = [side for side, paths in files.items() for _ in paths]
    parts = (f"{side} {checksum}" for side, checksum in zip(sides, sums, strict=True))
    key = cache.cache_key([_VERSION, found.image, found.label, *parts])
    read = from_cache(key) or _decoded(files, found, key)
    more = {side: read_extra_columns(paths, columns, needed=side == "train") for side, paths in files.items()}
    return replace(read, train_columns=more["train"], test_columns=more.get("test", {}), label_column=found.label)


def from_cache(key: str) -> LabeledImages | None:
    """The decoded copy, or None."""
    found = cache.load_entry(key)
    if found is None:
        return None
    tensors, facts = found
    try:
        names = parse_json(facts["class_names"].encode())
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("no names of classes")
        turned = int(facts["turned"])
        train = _side_of(tensors, "train", len(names))
        test = _side_of(tensors, "test", len(names)) if "test_x" in tensors else None
        if test is not None and test.x.shape[1:] != train.x.shape[1:]:
            raise ValueError("images of two sizes")
    except (KeyError, ValueError):  # it is another file's, or somebody wrote it anew
        return None
    return LabeledImages(train, test, tuple(names), turned=turned)


def _side_of(tensors: Mapping[str, torch.Tensor], side: str, classes: int) -> LabeledSamples:
    """The images (N, C, H, W) and labels (N,) of a side as `cache_decoded` stores them.

    Raises:
        ValueError: they are others.
    """
    images = tensors[f"{side}_x"]
    labels = tensors[f"{side}_y"]
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3) or not images.numel():
        raise ValueError("no images")
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise ValueError("no labels of these images")
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError("a label that is no class")
    return LabeledSamples(images, labels)


def _decoded(files: dict[str, list[Path]], columns: Columns, key: str) -> LabeledImages:
    """Decode all files and leave a copy in the cache."""
    images: dict[str, torch.Tensor] = {}
    raw: dict[str, NDArray[Any]] = {}
    shape: tuple[int, ...] | None = None
    turned = 0
    for side, paths in files.items():
        pixels, raw[side], of_side = _read_side(paths, columns, shape)
        turned += of_side
        shape = pixels.shape[1:]
        images[side] = torch.from_numpy(pixels)
    rows = {
        side: [(path, range(open_parquet(path).metadata.num_rows)) for path in paths] for side, paths in files.items()
    }
    labels, names = encode_labels(raw, columns, rows)
    sides = {side: LabeledSamples(images[side], torch.from_numpy(labels[side])) for side in files}
    return cache_decoded(key, sides, names, turned)


def cache_decoded(key: str, sides: Mapping[str, LabeledSamples], names: tuple[str, ...], turned: int) -> LabeledImages:
    """Decoded sides ("train", "test"), of which a copy is left in the cache."""
    tensors = {f"{side}_{part}": getattr(sides[side], part) for side in sides for part in ("x", "y")}
    cache.save_entry(key, tensors, {"class_names": json.dumps(names), "turned": str(turned)})
    return LabeledImages(sides["train"], sides.get("test"), names, turned=turned)


# rows ----------------------------------------------------------------------------------------------------------------


def _read_side(
    paths: Sequence[Path], columns: Columns, shape: tuple[int, ...] | None
) -> tuple[NDArray[np.uint8], NDArray[Any], int]:
    """Every image and raw label of some files, in file order.

    Args:
        paths: the files of one side.
        columns: what to read.
        shape: (C, H, W) that the images must have; None for that of the first.

    Returns:
        (N, C, H, W) uint8, (N,) labels, int64 or strings, and how many images were turned.
    """
    total = sum(open_parquet(path).metadata.num_rows for path in paths)
    if total < 1:
        raise ConfigError(f"expected at least one row in {paths[0]}, got an empty file")
    pixels: NDArray[np.uint8] | None = None
    labels: list[NDArray[Any]] = []
    row = 0
    turned = 0
    for path in paths:
        start = row
        for cells, marks in _batches(path, columns):
            labels.append(marks)
            for cell in cells:
                image, is_turned = decode(cell, path, row - start)
                turned += is_turned
                shape = shape or image.shape
                if pixels is None:
                    pixels = allocate((total, *shape), path)
                check_shape(image.shape, shape, row - start, path)
                if row == total:
                    raise ConfigError(f"expected {total} rows, as the files say, got more from {paths[0].parent}")
                pixels[row] = image
                row += 1
    if pixels is None or row != total:
        raise ConfigError(f"expected {total} rows, as the files say, got {row} from {paths[0].parent}")
    return pixels, np.concatenate(labels), turned


def allocate(shape: tuple[int, ...], path: Path) -> NDArray[np.uint8]:
    """Memory for images (N, C, H, W); N is what the files say."""
    bounds.check_room(math.prod(shape), "images", path)
    try:
        return np.empty(shape, dtype=np.uint8)
    except (MemoryError, ValueError):
        raise ConfigError(f"expected images for which there is memory, got {shape[0]} rows, as {path} says") from None


def _batches(path: Path, columns: Columns) -> Iterator[tuple[list[bytes | None], NDArray[Any]]]:
    """Encoded images and labels of one file, some rows at a time."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as types

    try:
        for batch in open_parquet(path).iter_batches(batch_size=_ROWS, columns=[columns.image, columns.label]):
            cells = batch.column(columns.image)
            marks = batch.column(columns.label)
            if types.is_struct(cells.type):
                cells = pc.struct_field(cells, "bytes")
            if marks.null_count:
                raise ConfigError(f"expected a label in every row, got an empty one in '{columns.label}' of {path}")
            whole = types.is_integer(marks.type) or types.is_boolean(marks.type)
            yield cells.to_pylist(), np.array(marks.to_pylist(), dtype=np.int64 if whole else None)
    except (pa.ArrowException, OSError, OverflowError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected a whole Parquet file, got {path}: {first_line(error)}") from error


def decode(cell: bytes | None, path: Path, row: int) -> tuple[NDArray[np.uint8], bool]:
    """One image as (C, H, W) uint8, upright, and whether it was turned.

    Gray stays one channel; black-and-white becomes gray, a palette RGB.
    """
    if not cell:
        raise ConfigError(f"expected an encoded image in row {row} of {path}, got none (paths alone are not followed)")
    return to_pixels(lambda: bounds.open_image(cell), row, path)


def to_pixels(opened: Callable[[], Any], row: int, where: object) -> tuple[NDArray[np.uint8], bool]:
    """What `opened` gives, a Pillow image, as (C, H, W) uint8, and whether it was turned (see `decode`).

    Raises:
        ConfigError: it does not decode, or is neither gray nor RGB.
    """
    try:
        with opened() as stored:
            image, is_turned = bounds.upright(stored)
            mode = {"1": "L", "P": "RGB"}.get(image.mode, image.mode)
            pixels = np.asarray(image if mode == image.mode else image.convert(mode))
    except Exception as error:  # Pillow's decoders raise nearly anything on foreign bytes
        raise ConfigError(
            f"expected an image in row {row} of {where}, got bytes that do not decode: {first_line(error)}"
        ) from error
    if mode == "L":
        return pixels[None], is_turned
    if mode == "RGB":
        return pixels.transpose(2, 0, 1), is_turned
    raise ConfigError(f"expected gray (L) or RGB images, got mode {mode} in row {row} of {where}")


def check_shape(came: tuple[int, ...], shape: tuple[int, ...], row: int, where: object) -> None:
    """Refuse an image (C, H, W) that is unlike the first one."""
    if came != shape:
        raise ConfigError(
            f"expected every image to have {_words(shape)}, as the first one has, "
            f"got {_words(came)} in row {row} of {where}"
        )


def _words(shape: tuple[int, ...]) -> str:
    color = {1: "gray", 3: "RGB"}[shape[0]]
    return f"{color} {shape[1]}x{shape[2]} pixels"
