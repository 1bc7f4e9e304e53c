"""Labeled images from one folder per class: ``<class>/*.png``, or ``train/<class>/*.png`` and ``test/<class>/*.png``.

Shapes: N images, C channels (1 gray, 3 RGB), H x W pixels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from polyfed.data import cache, inference_inputs, parquet_images
from polyfed.data.label_encoding import natural_sort, negative_name
from polyfed.data.samples import LabeledSamples
from polyfed.data.split_files import SPLITS, choose_splits
from polyfed.data.transforms import convert_channels, resize
from polyfed.errors import ConfigError, first_line, gathered

_VERSION = "picture-folders-2"  # part of every cache key: raise it when decoding or the order of rows changes
_Rows = list[tuple[str, Path]]  # (class, file)


def read(
    folder: Path, train_splits: Sequence[str] = ("train",), image_size: int | None = None, whole: bool = True
) -> parquet_images.LabeledImages:
    """Read and decode a folder of class folders, or take the decoded copy from the cache.

    Where a folder right below is called train (or as `train_splits` says), the folders right below are sides; which is
    which: `polyfed.data.split_files.choose_splits`. Otherwise they are the classes of a training side without
    a test side.

    A class is called as its folder; classes are in sorted order, by value where all are whole numbers. Rows go through
    the classes in turn, the first file of each, then the second, so that the first rows are of all classes. Gray images
    among RGB ones become RGB (three equal channels).

    Args:
        folder: see above; files are PNG or JPEG, other files are passed over.
        train_splits: the folders that make the training side, in this order.
        image_size: pixels a side, to which each image is resized; None: all have one size.
        whole: whether this is a whole data set, whose training side has every class, two or more.

    Raises:
        ConfigError: no class folders, fewer than two classes, a class without images, a test class without training
            images, an image that does not decode, images of several sizes without image_size.
    """
    sides = _sides(folder, train_splits)
    names = natural_sort(name for side, rows in sides.items() for name, _ in rows if side == "train" or not whole)
    negative = negative_name(names)
    if whole and negative is not None:
        raise ConfigError(
            f"expected folders of classes from 0 on in {folder}, got '{negative}', which often means that there is no "
            "label; move it elsewhere, or call it by a word if it is a class"
        )
    if whole and len(names) < 2:
        raise ConfigError(f"expected folders of two or more classes in {folder}, got '{names[0]}' alone")
    if strange := sorted({name for name, _ in sides.get("test", [])} - set(names)):
        raise ConfigError(f"expected test images in {folder} of classes with training images, got '{strange[0]}'")
    every = [path for rows in sides.values() for _, path in rows]
    try:
        sums = cache.file_checksums(every)
    except OSError as error:
        raise ConfigError(f"cannot read the files in {folder}: {first_line(error)}") from error
    marks = (f"{side} {name}" for side, rows in sides.items() for name, _ in rows)
    key = cache.cache_key([_VERSION, str(image_size), *itertools.chain(*zip(marks, sums, strict=True))])
    found = parquet_images.from_cache(key)
    return found or parquet_images.cache_decoded(key, *decode_sides(sides, names, image_size))


def decode_sides(
    sides: dict[str, _Rows], names: tuple[str, ...], image_size: int | None
) -> tuple[dict[str, LabeledSamples], tuple[str, ...], int]:
    """Both sides, decoded, in one number of channels, the classes' names, and how many images were turned."""
    number = {name: place for place, name in enumerate(names)}
    read = iter(gathered(partial(_picture, path, image_size) for rows in sides.values() for _, path in rows))
    decoded = {side: [next(read) for _ in rows] for side, rows in sides.items()}
    pixels = {side: [x for x, _ in rows] for side, rows in decoded.items()}
    channels = max(x.shape[1] for rows in pixels.values() for x in rows)
    first = pixels["train"][0].shape[2:]
    found = {}
    for side, rows in sides.items():
        for x, (_, path) in zip(pixels[side], rows, strict=True):
            if x.shape[2:] != first:
                raise ConfigError(
                    f"expected images of one size, {first[0]}x{first[1]} pixels as the first, got "
                    f"{x.shape[2]}x{x.shape[3]} in {path}; set data.image_size to resize all"
                )
        x = torch.cat([convert_channels(x, channels) for x in pixels[side]])
        found[side] = LabeledSamples(x, torch.tensor([number[name] for name, _ in rows]))
    return found, names, sum(is_turned for rows in decoded.values() for _, is_turned in rows)


def _picture(path: Path, image_size: int | None) -> tuple[Tensor, bool]:
    """One image, (1, C, H, W) uint8, and whether it was turned."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {first_line(error)}") from error
    x, is_turned = inference_inputs.decode_image(data, str(path))
    return resize(LabeledSamples(x, torch.zeros(1, dtype=torch.int64)), image_size).x, is_turned


# folders -------------------------------------------------------------------------------------------------------------


def _sides(folder: Path, train_splits: Sequence[str]) -> dict[str, _Rows]:
    """The files of the training side and, if there is one, of the test side."""
    below = _folders(folder)
    named = {spelling: split for split, spellings in SPLITS.items() for spelling in spellings}
    splits = {named.get(place.name.lower(), place.name): place for place in below}
    if "train" not in splits and list(train_splits) == ["train"]:
        return {"train": _rows(folder, below)}
    chosen = choose_splits(splits, train_splits, folder)
    return {
        side: [row for split in parts for row in _rows(splits[split], _folders(splits[split]))]
        for side, parts in chosen.items()
    }


def _folders(place: Path) -> list[Path]:
    if not place.is_dir():
        raise ConfigError(f"expected a folder with one folder of images per class at {place}, got no such folder")
    return sorted(p for p in place.iterdir() if p.is_dir() and not p.name.startswith("."))


def _rows(place: Path, classes: Sequence[Path]) -> _Rows:
    """The files of some class folders, the classes in turn."""
    if not classes:
        raise ConfigError(f"expected one folder of images per class (cat/1.png, dog/1.png) in {place}, got none")
    files: dict[str, list[Path]] = {}
    for home in classes:
        files[home.name] = inference_inputs.images_in(home)
        if not files[home.name]:
            raise ConfigError(f"expected images (.png, .jpg) of class '{home.name}' in {home}, got none")
    turns = itertools.zip_longest(*(files[name] for name in natural_sort(files)))
    return [(path.parent.name, path) for turn in turns for path in turn if path is not None]
