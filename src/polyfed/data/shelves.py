"""Where the files of data sets lie, and which are there; nothing is read."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from polyfed.places import place_of
from polyfed.registry import DATASETS, PACKAGED


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


def parquet_folders(place: Path) -> list[str]:
    """The folders below a place that hold Parquet files."""
    return [folder.name for folder in place.iterdir() if has_parquet(folder)]


def on_the_shelf() -> dict[str, bool | None]:
    """Data set -> whether it is there: its files below $POLYFED_DATA, or its package; None: it has none.

    Registered ones first, then the other folders of Parquet files.
    """
    place = shelf(None)
    found = [] if place is None or not place.is_dir() else sorted(parquet_folders(place))
    known: dict[str, bool | None] = {name: name in found for name in DATASETS}
    known |= {name: importlib.util.find_spec(package) is not None for name, package in PACKAGED.items()}
    others = (name for name in found if name not in DATASETS)
    return {**known, "digits": True, "parquet": None, **dict.fromkeys(others, True)}
