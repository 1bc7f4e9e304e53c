"""Files of a data set: which are the training side and which the test side, and what one may ask for before it is read.

A pipe may never say anything, a device such as ``/dev/zero`` never stops, and a few packed bytes may stand for more
than the machine has memory for.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from polyfed.data.classes import natural_sort
from polyfed.errors import ConfigError
from polyfed.places import check_name, place_of

Part = TypeVar("Part")
SPLITS = {"train": ("train", "training"), "test": ("test", "testing"), "validation": ("validation", "valid", "val")}

_UNPACKED = 2**28  # bytes that an archive of any size may hold
_RATIO = 100  # or this many times its own size; arrays of numbers shrink to a tenth or so, zeros to a thousandth


def shelf(root: str | Path | None) -> Path | None:
    """The folder of all data sets: `root`, else $POLYFED_DATA, else None."""
    chosen = root if root not in (None, "") else os.environ.get("POLYFED_DATA")
    return place_of(chosen) if chosen else None


def files_of(folder: Path, suffix: str) -> list[Path]:
    """The files of a folder that end so, sorted by name; those one folder down when it has none itself."""
    for pattern in (f"*.{suffix}", f"*/*.{suffix}"):
        found = sorted(p for p in folder.glob(pattern) if p.is_file() and not p.name.startswith("."))
        if found:
            return found
    return []


def has_parquet(folder: Path) -> bool:
    """Whether `folder`, or a folder right under it, holds a file named ``*.parquet``."""
    return folder.is_dir() and bool(files_of(folder, "parquet"))


def check_file(path: Path) -> None:
    """Whether a path that is there is a file or a folder, or a link to one."""
    check_name(path)
    try:
        mode = path.stat().st_mode
    except OSError:  # the reader says why
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ConfigError(f"expected a file, got a pipe or a device: {path}; write what comes out of it into a file")


def check_unpacked(archive: ZipFile, path: Path) -> None:
    """Whether an archive unpacks to no more than its size allows."""
    packed = path.stat().st_size
    size = sum(member.file_size for member in archive.infolist())
    if size > max(_UNPACKED, _RATIO * packed):
        raise ConfigError(
            f"expected at most {max(_UNPACKED, _RATIO * packed)} bytes of arrays in {path}, a file of {packed} bytes, "
            f"got {size}; store them with numpy.savez"
        )


def find_split_files(folder: Path, suffix: str = "parquet") -> dict[str, list[Path]]:
    """The files of the training side and, if there are any, of the test side; `suffix` is parquet or csv."""
    kind = {"parquet": "Parquet", "csv": "CSV"}[suffix]
    if not folder.is_dir():
        raise ConfigError(f"expected a folder with {kind} files at {folder}, got no such folder")
    found = files_of(folder, suffix)
    if not found:
        raise ConfigError(f"expected {kind} files (train*.{suffix}, test*.{suffix}) in {folder}, got none")
    splits: dict[str, list[Path]] = {}
    for path in found:
        above = "" if path.parent == folder else split_of(path.parent.name)
        splits.setdefault(split_of(path.stem) or above, []).append(path)
    sides = choose_splits(splits, folder, f"a training file (train*.{suffix})", [path.name for path in found])
    homes = sorted({path.parent.name for path in sides["train"]})
    if len(homes) > 1:
        raise ConfigError(f"expected one data set in {folder}, got several: {', '.join(homes)}; name one as the root")
    return sides


def split_of(name: str) -> str:
    """Which split a name is of, by a whole word in it: "train", "test", "validation"; "" where it does not say."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    return next((split for split, spellings in SPLITS.items() if words & set(spellings)), "")


def choose_splits(splits: Mapping[str, Part], where: object, expected: str, names: Sequence[str]) -> dict[str, Part]:
    """The training side and, if there is one, the test side: the test split, or without one the validation split.

    Args:
        splits: by the split that their names say, see `split_of`. What says nothing is the training side where it is
            alone, and else not read.
        where, expected, names: for the error that there is no training split: what was expected, and what is there.
    """
    if set(splits) == {""}:
        return {"train": splits[""]}
    if "train" not in splits:
        raise ConfigError(f"expected {expected} in {where}, got only {', '.join(names[:4])}")
    test = splits.get("test", splits.get("validation"))
    return {"train": splits["train"]} | ({} if test is None else {"test": test})


# one folder per client -----------------------------------------------------------------------------------------------


def client_folders(place: Path) -> tuple[str, list[Path]]:
    """The clients' folders, in the order of their names, by value where all are whole numbers, and what they hold.

    The latter is "parquet", "csv" or "images" (a folder per class), the same for all.
    """
    if not place.is_dir():
        raise ConfigError(f"expected a folder with one folder per client at {place}, got no such folder")
    homes = {p.name: p for p in place.iterdir() if p.is_dir() and not p.name.startswith(".")}
    if not homes:
        raise ConfigError(f"expected one folder per client (0/train.csv, 1/train.csv) in {place}, got none")
    names = natural_sort(homes)
    kinds = {name: _kind(homes[name]) for name in names}
    for name, kind in kinds.items():
        if not kind:
            raise ConfigError(
                f"expected Parquet files, CSV files or folders of images of client '{name}' in {homes[name]}, got none"
            )
        if kind != kinds[names[0]]:
            raise ConfigError(
                f"expected {kinds[names[0]]} of every client in {place}, as of '{names[0]}', got {kind} of '{name}'"
            )
    return kinds[names[0]], [homes[name] for name in names]


def _kind(home: Path) -> str:
    for suffix in ("parquet", "csv"):
        if files_of(home, suffix):
            return suffix
    return "images" if any(p.is_dir() and not p.name.startswith(".") for p in home.iterdir()) else ""


def check_sides(tested: Mapping[str, bool]) -> None:
    """Refuse clients of which some have a test side and others none."""
    first = next(iter(tested))
    for name, has_test in tested.items():
        if has_test != tested[first]:
            raise ConfigError(
                f"expected a test side of every client or of none, got {'one' if has_test else 'none'} of '{name}', "
                f"unlike '{first}'"
            )


def owners(names: Sequence[str], rows: Sequence[int]) -> NDArray[Any]:
    """The name of each row's owner, for the rows of every name in turn: numbers where all names are, else text."""
    numbers = all(name.isascii() and name.isdigit() for name in names)
    return np.repeat(np.array([int(name) for name in names] if numbers else list(names)), list(rows))
