"""One file of arrays per client, as PFLlib and HtFLlib keep them: ``train/0.npz``, ``test/0.npz``, ``config.json``.

A file holds the arrays ``x`` and ``y``; or, as those libraries write it, a pickled dictionary of the two called
``data``, of which the arrays are read and nothing is run (`polyfed.data.safe_pickle`).

Shapes: N samples of a client.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.data import bounds, parquet_images, per_client_folders, safe_pickle
from polyfed.data.label_encoding import natural_sort
from polyfed.data.samples import LabeledSamples, classes_up_to
from polyfed.errors import ConfigError, first_line
from polyfed.results.read import parse_json

_NO_ARRAYS: tuple[type[Exception], ...] = (*safe_pickle.NO_ARRAY, OSError, zipfile.BadZipFile, zlib.error)

_Check = Callable[[tuple[Any, Any], str, str], LabeledSamples]


def read(place: Path, checked: _Check) -> parquet_images.LabeledImages:
    """All clients' rows, client by client, with the further column `client_folders.COLUMN`.

    Clients are in the order of their files' names, by value where all are whole numbers. Class c is called c; how many
    there are says ``num_classes`` in config.json, if it is there, else the largest label.

    Args:
        place: the folder.
        checked: makes samples of (x, y), the name of a side, and where they stand.

    Raises:
        ConfigError: no such folder or files; another number of clients than config.json says; a test side of some
            clients only; a file without x and y, without rows, of another shape or type than the first, with a label
            out of range or values that are not finite.
    """
    sides = {side: _files(place / side) for side in ("train", "test")}
    train = sides["train"]
    test = sides["test"]
    if not train:
        raise ConfigError(f"expected one file per client (train/0.npz, train/1.npz) in {place}, got none")
    if alone := sorted(set(test) - set(train)):
        raise ConfigError(f"expected training data of every client in {place}, got {test[alone[0]]} without")
    names = natural_sort(train)
    said = _config(place / "config.json")
    if said.get("num_clients", len(names)) != len(names):
        raise ConfigError(
            f"expected {said['num_clients']} clients in {place / 'train'}, as {place / 'config.json'} says, got "
            f"{len(names)}"
        )

    def one(home: Path) -> parquet_images.LabeledImages:
        parts = {side: _side(side, files[home.name], checked) for side, files in sides.items() if home.name in files}
        _check_alike(parts, test.get(home.name))
        largest = max(int(part.y.max()) for part in parts.values())
        classes = said["num_classes"] if "num_classes" in said else classes_up_to(largest, home)
        for side, part in parts.items():
            low, high = (int(label) for label in part.y.aminmax())
            if low < 0 or high >= classes:
                raise ConfigError(
                    f"expected labels in 0..{classes - 1} in {sides[side][home.name]}, got {low if low < 0 else high}"
                )
        return parquet_images.LabeledImages(parts["train"], parts.get("test"), tuple(map(str, range(classes))))

    return per_client_folders.read([place / name for name in names], one)


def _files(folder: Path) -> dict[str, Path]:
    """The clients' files of one side, by the clients' names."""
    return {path.stem: path for path in folder.glob("*.npz") if path.is_file() and not path.name.startswith(".")}


def _config(path: Path) -> dict[str, int]:
    """The numbers of clients and classes that config.json says; empty where there is none."""
    if not path.exists():
        return {}
    bounds.check_file(path)
    try:
        given = dict(parse_json(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"expected a JSON object in {path}, got something else: {first_line(error)}") from error
    found = {key: given[key] for key in ("num_clients", "num_classes") if key in given}
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"expected {key} in {path} as a whole number >= 1, got {value!r:.40}")
        if key == "num_classes":
            classes_up_to(value - 1, path)
    return found


def _side(side: str, path: Path, checked: _Check) -> LabeledSamples:
    """One client's rows of one side."""
    try:
        with zipfile.ZipFile(path) as archive:
            bounds.check_unpacked(archive, path)
            names = [name for name in ("x", "y") if f"{name}.npy" in archive.namelist()]
            if archive.namelist() == ["data.npy"]:
                found = safe_pickle.read_arrays(_pickled(archive), path)
            else:
                found = {name: _array(archive, name) for name in names}
    except _NO_ARRAYS as error:
        raise ConfigError(
            f"expected arrays x and y as numpy.savez writes them, got something else in {path}"
        ) from error
    x = found.get("x")
    y = found.get("y")
    if x is None or y is None:
        what = "x" if x is None else "y"
        came = "something else (texts as lists of ids?)" if what in found else f"{', '.join(found) or 'neither'}"
        raise ConfigError(f"expected arrays of numbers x and y in {path}, got {came} for {what}")
    if np.ndim(x) > 1 and len(x) and not np.size(x):
        raise ConfigError(f"expected inputs of one number or more in {path}, got the shape {np.shape(x)}")
    what = {"train": "training"}.get(side, side)
    samples = checked((x, y), what, str(path))
    if samples.are_numbers:
        raise ConfigError(f"expected whole-number {what} labels in {path}, got {np.asarray(y).dtype}")
    return samples


def _array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """An array of numbers; NumPy refuses others."""
    with archive.open(f"{name}.npy") as stream:
        array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
        return array


def _pickled(archive: zipfile.ZipFile) -> bytes:
    """What follows the header of an array of objects."""
    with archive.open("data.npy") as stream:
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("a header of another version")
        shape, _, kind = np.lib.format.read_array_header_1_0(stream)
        if shape != () or kind != np.dtype(object):
            raise ValueError("an array that is no dictionary")
        return stream.read()


def _check_alike(parts: dict[str, LabeledSamples], where: Path | None) -> None:
    """Test inputs of a client are like its training inputs."""
    train = parts["train"].x
    test = parts["test"].x if "test" in parts else parts["train"].x
    if test.shape[1:] != train.shape[1:] or test.dtype != train.dtype:
        raise ConfigError(
            f"expected test inputs like the training inputs ({tuple(train.shape[1:])}, {train.dtype}), got "
            f"{tuple(test.shape[1:])}, {test.dtype} in {where}"
        )
