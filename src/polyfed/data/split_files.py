"""Which files, or which stored splits, are the training side and which the test side."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from polyfed.errors import ConfigError
from polyfed.registry import suggest

SPLITS = {"train": ("train", "training"), "test": ("test", "testing"), "validation": ("validation", "valid", "val")}


def files_of(folder: Path, suffix: str) -> list[Path]:
    """The files of a folder that end so, sorted by name; those one folder down when it has none itself."""
    for pattern in (f"*.{suffix}", f"*/*.{suffix}"):
        found = sorted(p for p in folder.glob(pattern) if p.is_file() and not p.name.startswith("."))
        if found:
            return found
    return []


def find_split_files(
    folder: Path, train_splits: Sequence[str] = ("train",), suffix: str = "parquet"
) -> dict[str, list[Path]]:
    """The files of the training side and, if there are any, of the test side; `suffix` is parquet or csv.

    Raises:
        ConfigError: no such file, no training file, or several data sets in one folder.
    """
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
    """Which splits are the training side and, if there is one, the test side; `others` are more names to suggest.

    Raises:
        ConfigError: a split of `train_splits` that is not there, is named twice, or is the test split.
    """
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
