"""Files of a data set: which are the training side and which the test side, and what one may ask for before it is read.

A pipe may never say anything, a device such as ``/dev/zero`` never stops, and a few packed bytes may stand for more
than the machine has memory for.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from polyfed.data.classes import natural_sort
from polyfed.data.shelves import files_of
from polyfed.errors import ConfigError
from polyfed.places import check_name
from polyfed.registry import suggest

CLIENT = "client"  # the further column that says whose a row is, where each client has a folder or a file
SPLITS = {"train": ("train", "training"), "test": ("test", "testing"), "validation": ("validation", "valid", "val")}

_UNPACKED = 2**28  # bytes that an archive of any size may hold
_RATIO = 100  # and beyond these so many times its own; arrays of numbers shrink to a tenth or so, zeros to a thousandth


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


def find_split_files(
    folder: Path, train_splits: Sequence[str] = ("train",), suffix: str = "parquet"
) -> dict[str, list[Path]]:
    """The files of the training side and, if there are any, of the test side; `suffix` is parquet or csv."""
    kind = {"parquet": "Parquet", "csv": "CSV"}[suffix]
    if not folder.is_dir():
        raise ConfigError(f"expected a folder with {kind} files at {folder}, got no such folder")
    found = files_of(folder, suffix)
    if not found:
        raise ConfigError(f"expected {kind} files (train*.{suffix}, test*.{suffix}) in {folder}, got none")
    splits: dict[str, list[Path]] = {}  # "" for files whose names say nothing
    for path in found:
        splits.setdefault(_split_of(path, folder, train_splits) or "", []).append(path)
    if set(splits) == {""}:
        splits = {"train": splits[""]}
    if "train" in train_splits and "train" not in splits:
        raise ConfigError(
            f"expected a training file (train*.{suffix}) in {folder}, got only {', '.join(p.name for p in found[:4])}"
        )
    unread = {word for path in splits.pop("", []) for word in _words_of(path.stem) if len(word) > 2}
    sides = choose_splits(splits, train_splits, folder, unread)
    for split in sides["train"]:
        homes = sorted({path.parent.name for path in splits[split]})
        if len(homes) > 1:
            raise ConfigError(
                f"expected one data set in {folder}, got several: {', '.join(homes)}; name one as the root"
            )
    return {side: [path for split in chosen for path in splits[split]] for side, chosen in sides.items()}


def choose_splits(
    splits: Collection[str], train_splits: Sequence[str], where: object, others: Collection[str] = ()
) -> dict[str, list[str]]:
    """Which splits are the training side and, if there is one, the test side; `others` are more names to suggest."""
    named = {spelling: split for split, spellings in SPLITS.items() for spelling in spellings}
    train = [named.get(word, word) for word in train_splits]
    if not train or len(set(train)) < len(train) or "test" in train:
        raise ConfigError(f"expected train_splits as different splits, none of them 'test', got {list(train_splits)}")
    for split in train:
        if split not in splits:
            raise ConfigError(f"expected a split '{split}' in {where}, got none{suggest(split, {*splits, *others})}")
    test = next((split for split in ("test", "validation") if split in splits and split not in train), None)
    return {"train": train, "test": [test]} if test else {"train": train}


def _split_of(path: Path, folder: Path, asked: Sequence[str]) -> str | None:
    """Which split a file is of, by a whole word in its own name, else in its folder's below `folder`.

    Args:
        path: the file.
        folder: of the data set.
        asked: words that say so, besides the usual ones.
    """
    spellings_of = {**{word: (word,) for word in asked}, **SPLITS}
    parts = [path.stem]
    if path.parent != folder:
        parts.append(path.parent.name)
    for part in parts:
        words = _words_of(part)
        for split, spellings in spellings_of.items():
            if words & set(spellings):
                return split
    return None


def _words_of(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower()))


# one folder per client -----------------------------------------------------------------------------------------------


def client_folders(place: Path) -> tuple[str, list[Path]]:
    """The clients' folders, in the order of their names, by value where all are whole numbers, and what they hold.

    That is "parquet", "csv" or "images" (a folder per class), of all the same.
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
    """Whose each row is, of so many of every name in turn: numbers where all names are, else text."""
    numbers = all(name.isascii() and name.isdigit() for name in names)
    return np.repeat(np.array([int(name) for name in names] if numbers else list(names)), list(rows))
