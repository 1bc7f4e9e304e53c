"""Images: decoded upright to uint8, and read from one folder per class (``train/cat/1.png`` or ``cat/1.png``).

Shapes: N images, C channels (1 gray, 3 RGB), H x W pixels.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyfed.data import cache
from polyfed.data.classes import natural_sort, negative_name
from polyfed.data.dataset import DatasetSource
from polyfed.data.files import check_sides, choose_splits, owners, split_of
from polyfed.data.options import CLIENT, SourceOptions
from polyfed.data.samples import LabeledSamples, upright
from polyfed.data.transforms import convert_channels, resize
from polyfed.errors import ConfigError, first_line, gathered
from polyfed.records.read import parse_json

_VERSION = "picture-folders-3"  # part of every cache key: raise it when decoding or the order of rows changes
PICTURES = (".png", ".jpg", ".jpeg")
_Rows = list[tuple[str, Path]]  # (class, file)
Sides = Mapping[str, LabeledSamples]  # "train" and, if there is one, "test"


def decode(data: bytes | None, place: str) -> Tensor:
    """One image as (C, H, W) uint8, upright as its EXIF tag says.

    Gray stays one channel, palettes become RGB, an alpha without effect goes.
    """
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise ConfigError(f"expected an encoded image, got none in {place}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            stored = Image.open(io.BytesIO(data))
        with stored:
            image = upright(stored)
            mode = {"1": "L", "P": "RGBA" if "transparency" in image.info else "RGB", "PA": "RGBA"}.get(image.mode)
            pixels = np.asarray(image.convert(mode) if mode else image)
            mode = mode or image.mode
    except Exception as error:  # Pillow's decoders raise nearly anything on foreign bytes
        why = "" if isinstance(error, UnidentifiedImageError) else f": {first_line(error)}"
        raise ConfigError(f"expected an image, got bytes that do not decode in {place}{why}") from error
    if mode in ("LA", "RGBA") and (pixels[..., -1] == 255).all():
        pixels = pixels[..., :-1]
        mode = mode[:-1]
    if mode not in ("L", "RGB"):
        raise ConfigError(f"expected a gray or an RGB image, got mode {mode} in {place}")
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1).transpose(2, 0, 1).copy())


# the decoded copy ----------------------------------------------------------------------------------------------------


def from_cache(key: str) -> tuple[Sides, tuple[str, ...]] | None:
    """The decoded sides and the classes' names; None where there are none, also where another program wrote them."""
    found = cache.load_entry(key)
    if found is None:
        return None
    tensors, facts = found
    try:
        names = parse_json(facts["class_names"].encode())
        sides = ("train", "test") if "test_x" in tensors else ("train",)
        read = {side: LabeledSamples(tensors[f"{side}_x"], tensors[f"{side}_y"]) for side in sides}
        return read, tuple(names)
    except (KeyError, ValueError, TypeError, ConfigError):
        return None


def into_cache(key: str, sides: Sides, names: tuple[str, ...]) -> None:
    """Leave a copy of decoded sides in the cache."""
    tensors = {f"{side}_{part}": getattr(sides[side], part) for side in sides for part in ("x", "y")}
    cache.save_entry(key, tensors, {"class_names": json.dumps(names)})


# folders of classes ------------------------------------------------------------------------------------------------


def read_folders(options: SourceOptions, places: Sequence[Path], of_clients: bool = False) -> DatasetSource:
    """Read and decode folders of class folders, or take the decoded copy from the cache.

    Where a folder right below is called train, the folders right below are sides
    (`polyfed.data.files.choose_splits`); otherwise they are the classes of a training side without a test side. Classes
    are called as their folders; rows are sorted by class, then by name. Gray images among RGB ones become RGB (three
    equal channels).

    Args:
        options: of it image_size, pixels a side, to which each image is resized; None: all have one size.
        places: one folder, or with `of_clients` one of each client.
        of_clients: gives the further column "client"; a client may lack classes, and have some in its test side alone.
    """
    options.check_used()
    size = options.image_size
    read = gathered(partial(_sides, place) for place in places)
    check_sides({place.name: "test" in sides for place, sides in zip(places, read, strict=True)})
    sides = {side: [row for of_place in read for row in of_place[side]] for side in read[0]}
    where = places[0].parent if of_clients else places[0]
    names = natural_sort(name for side, rows in sides.items() for name, _ in rows if side == "train" or of_clients)
    if (negative := negative_name(names)) is not None:
        raise ConfigError(
            f"expected folders of classes from 0 on in {where}, got '{negative}', which often means that there is no "
            "label; move it elsewhere, or call it by a word if it is a class"
        )
    if len(names) < 2:
        raise ConfigError(f"expected folders of two or more classes in {where}, got '{names[0]}' alone")
    if strange := sorted({name for name, _ in sides.get("test", [])} - set(names)):
        raise ConfigError(f"expected test images in {where} of classes with training images, got '{strange[0]}'")
    rows = [(side, name, path) for side, found in sides.items() for name, path in found]
    marks = cache.file_marks(path for _, _, path in rows)
    of_rows = (f"{side} {name} {mark}" for (side, name, _), mark in zip(rows, marks, strict=True))
    key = cache.cache_key([_VERSION, str(size), *of_rows])
    found = from_cache(key)
    if found is None:
        found = _decoded(sides, names, size), names
        into_cache(key, *found)
    further = {}
    if of_clients:
        homes = [place.name for place in places]
        further = {side: {CLIENT: owners(homes, [len(of_place[side]) for of_place in read])} for side in sides}
    return DatasetSource.of(options.dataset, *found, further)


def _decoded(sides: dict[str, _Rows], names: tuple[str, ...], image_size: int | None) -> dict[str, LabeledSamples]:
    """Both sides, decoded, in one number of channels."""
    number = {name: place for place, name in enumerate(names)}
    read = iter(gathered(partial(_picture, path, image_size) for rows in sides.values() for _, path in rows))
    pixels = {side: [next(read) for _ in rows] for side, rows in sides.items()}
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
    return found


def read_picture(path: Path) -> Tensor:
    """The image in a file, (C, H, W) uint8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {first_line(error)}") from error
    return decode(data, str(path))


def _picture(path: Path, image_size: int | None) -> Tensor:
    x = read_picture(path)[None]
    return resize(LabeledSamples(x, torch.zeros(1, dtype=torch.int64)), image_size).x


def images_in(folder: Path) -> list[Path]:
    """The PNG and JPEG files of a folder, sorted."""
    found = [p for p in folder.iterdir() if p.suffix.lower() in PICTURES and p.is_file()]
    return sorted(p for p in found if not p.name.startswith("."))


def _sides(folder: Path) -> dict[str, _Rows]:
    """The files of the training side and, if there is one, of the test side."""
    below = _folders(folder)
    splits = {split_of(place.name): place for place in below}
    if "train" not in splits:
        return {"train": _rows(folder, below)}
    sides = choose_splits(splits, folder, "a folder 'train'", [])
    return {side: _rows(place, _folders(place)) for side, place in sides.items()}


def _folders(place: Path) -> list[Path]:
    if not place.is_dir():
        raise ConfigError(f"expected a folder with one folder of images per class at {place}, got no such folder")
    return sorted(p for p in place.iterdir() if p.is_dir() and not p.name.startswith("."))


def _rows(place: Path, classes: Sequence[Path]) -> _Rows:
    if not classes:
        raise ConfigError(f"expected one folder of images per class (cat/1.png, dog/1.png) in {place}, got none")
    rows = []
    for home in classes:
        found = images_in(home)
        if not found:
            raise ConfigError(f"expected images (.png, .jpg) of class '{home.name}' in {home}, got none")
        rows += [(home.name, path) for path in found]
    return rows
