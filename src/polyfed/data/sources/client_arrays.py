"""One file of arrays ``x`` and ``y`` per client: ``train/0.npz``, ``test/0.npz``.

PFLlib and HtFLlib pickle the two as a dictionary; docs/coming-from-pfllib.md shows how to convert their files.

Shapes: N samples of a client.
"""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from polyfed.data.classes import natural_sort
from polyfed.data.dataset import DatasetSource, as_samples
from polyfed.data.files import check_sides, check_unpacked, owners
from polyfed.data.options import CLIENT, SourceOptions
from polyfed.data.samples import LabeledSamples, classes_up_to
from polyfed.data.sources import located, source
from polyfed.errors import ConfigError, gathered
from polyfed.escaping import visible

# What NumPy raises over bytes that are no array: headers are Python's own words; a size that is none, a lack of memory.
NO_ARRAY: tuple[type[Exception], ...] = (
    *(ValueError, EOFError, RuntimeError, MemoryError, SyntaxError, TypeError, OverflowError),
    *(tokenize.TokenError, zipfile.BadZipFile),
)
_NO_ARRAYS: tuple[type[Exception], ...] = (*NO_ARRAY, OSError, zlib.error)


@source("npz:PATH", files=True, by_client=True)
def client_arrays(options: SourceOptions) -> DatasetSource:
    """A file of arrays per client.

    Clients are in the order of their files' names, by value where all are whole numbers. Class c is called c.
    """
    options.without_client().check_used()
    place = located(options)
    sides = {side: _files(place / side) for side in ("train", "test")}
    if not sides["train"]:
        raise ConfigError(f"expected one file per client (train/0.npz, train/1.npz) in {place}, got none")
    if alone := sorted(set(sides["test"]) - set(sides["train"])):
        raise ConfigError(f"expected training data of every client in {place}, got {sides['test'][alone[0]]} without")
    names = natural_sort(sides["train"])
    check_sides({name: name in sides["test"] for name in names})
    files = {side: [paths[name] for name in names] for side, paths in sides.items() if paths}
    parts = {side: gathered(partial(_read, side, path) for path in paths) for side, paths in files.items()}
    first = parts["train"][0].x
    every = [pair for side in files for pair in zip(files[side], parts[side], strict=True)]
    for path, part in every:
        if part.x.shape[1:] != first.shape[1:] or part.x.dtype != first.dtype:
            raise ConfigError(
                f"expected inputs of every client like those of '{names[0]}' ({tuple(first.shape[1:])}, {first.dtype}),"
                f" got {tuple(part.x.shape[1:])}, {part.x.dtype} in {path}"
            )
    classes = max(classes_up_to(int(part.y.max()), path) for path, part in every)
    joined = {
        side: LabeledSamples(torch.cat([part.x for part in found]), torch.cat([part.y for part in found]))
        for side, found in parts.items()
    }
    whose = {side: {CLIENT: owners(names, [len(part) for part in found])} for side, found in parts.items()}
    return DatasetSource.of(options.dataset, joined, tuple(map(str, range(classes))), whose)


def _files(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in folder.glob("*.npz") if path.is_file() and not path.name.startswith(".")}


def _read(side: str, path: Path) -> LabeledSamples:
    try:
        with zipfile.ZipFile(path) as archive:
            check_unpacked(archive, path)
            names = [Path(name).stem for name in archive.namelist()]
            if "x" not in names or "y" not in names:
                raise ConfigError(f"expected arrays x and y in {path}, got {_named(names)}")
            x, y = (np.lib.format.read_array(archive.open(f"{name}.npy"), allow_pickle=False) for name in ("x", "y"))
    except _NO_ARRAYS as error:
        raise ConfigError(
            f"expected arrays of numbers x and y as numpy.savez writes them, got something else in {path}"
        ) from error
    if np.ndim(x) > 1 and len(x) and not np.size(x):
        raise ConfigError(f"expected inputs of one number or more in {path}, got the shape {np.shape(x)}")
    what = {"train": "training"}.get(side, side)
    samples = as_samples((x, y), what, str(path))
    if samples.are_numbers:
        raise ConfigError(f"expected whole-number {what} labels in {path}, got {np.asarray(y).dtype}")
    return samples


def _named(names: Sequence[str]) -> str:
    if "data" in names:
        return "the array data; if PFLlib or HtFLlib wrote it, docs/coming-from-pfllib.md shows how to convert it"
    return visible(", ".join(names[:5])[:80]) or "nothing"
