"""One folder per client, as a real federation keeps its data: ``0/train.csv``, ``clinic-a/train/cat/1.png``, ...

Shapes: N samples over all clients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data import parquet_images
from polyfed.data.column_schema import Columns
from polyfed.data.label_encoding import natural_sort, negative_name
from polyfed.data.samples import LabeledSamples
from polyfed.data.split_files import files_of
from polyfed.data.text import RawTexts
from polyfed.errors import ConfigError, gathered

T = TypeVar("T")

COLUMN = "client"  # the further column that says whose a row is

_Read = parquet_images.LabeledImages
_Texts = tuple[Mapping[str, RawTexts], Columns]


def client_directories(place: Path) -> tuple[str, list[Path]]:
    """The clients' folders and what all of them hold: "parquet", "csv" or "images" (a folder per class).

    They are in the order of their names, by value where all are whole numbers.

    Raises:
        ConfigError: no such folder, no folder in it, a client's without data, or clients with several kinds of data.
    """
    if not place.is_dir():
        raise ConfigError(f"expected a folder with one folder per client at {place}, got no such folder")
    homes = {p.name: p for p in place.iterdir() if p.is_dir() and not p.name.startswith(".")}
    if not homes:
        raise ConfigError(f"expected one folder per client (0/train.csv, 1/train.csv) in {place}, got none")
    names = natural_sort(homes)
    kinds = {name: _kind(homes[name]) for name in names}
    kind = kinds[names[0]]
    for name in names:
        if kinds[name] is None:
            raise ConfigError(
                f"expected Parquet files, CSV files or folders of images of client '{name}' in {homes[name]}, got none"
            )
        if kinds[name] != kind:
            raise ConfigError(
                f"expected {kind} of every client in {place}, as of '{names[0]}', got {kinds[name]} of '{name}'"
            )
    assert kind is not None  # the first client was looked at above
    return kind, [homes[name] for name in names]


def _kind(home: Path) -> str | None:
    for suffix in ("parquet", "csv"):
        if files_of(home, suffix):
            return suffix
    below = any(p.is_dir() and not p.name.startswith(".") for p in home.iterdir())
    return "images" if below else None


def read(homes: Sequence[Path], one: Callable[[Path], _Read]) -> _Read:
    """All clients' rows, client by client, with the further column `COLUMN`: numbers where all names are, else text.

    Classes are those of all clients, in the order of the files where all name the same, else sorted.

    Args:
        homes: the clients' folders, called as the clients.
        one: reads one.

    Raises:
        ConfigError: some clients have a test side and others none, inputs of one are unlike the first one's, or a
            label is below 0 (unless all are -1 and 1).
    """
    parts = _of_each(homes, one)
    first = parts[homes[0].name]
    check_sides({name: part.test is not None for name, part in parts.items()})
    for name, part in parts.items():
        if (part.train.x.shape[1:], part.train.x.dtype) != (first.train.x.shape[1:], first.train.x.dtype):
            raise ConfigError(
                f"expected inputs of every client like those of '{homes[0].name}' ({_by(first)}), got {_by(part)} of "
                f"'{name}'; data.image_size resizes folders of images"
            )
    names = {part.class_names for part in parts.values()}
    classes = first.class_names if len(names) == 1 else natural_sort({name for every in names for name in every})
    if (negative := negative_name(classes)) is not None:
        whose = next(name for name, part in parts.items() if negative in part.class_names)
        raise ConfigError(
            f"expected labels from 0 on of every client, got {negative} of '{whose}'; drop such rows, or name the "
            "column of the labels in label_column"
        )
    train = {name: part.train for name, part in parts.items()}
    test = {name: part.test for name, part in parts.items() if part.test is not None}
    return _Read(
        _joined(train, parts, classes),
        _joined(test, parts, classes) if test else None,
        classes,
        _columns({name: part.train_columns for name, part in parts.items()}, train),
        _columns({name: part.test_columns for name, part in parts.items()}, test) if test else {},
        first.label_column,
        sum(part.turned for part in parts.values()),
    )


def read_texts(homes: Sequence[Path], one: Callable[[Path], _Texts]) -> _Texts:
    """The same of clients with texts: all clients' sides, and the columns that they stand in.

    Raises:
        ConfigError: some clients have a test side and others none, or columns or classes unlike the first one's.
    """
    parts = _of_each(homes, one)
    first = homes[0].name
    sides, columns = parts[first]
    check_sides({name: "test" in own for name, (own, _) in parts.items()})
    for name, (_, found) in parts.items():
        if found != columns:
            raise ConfigError(
                f"expected texts in column '{columns.image}' and the same classes in '{columns.label}' of every client "
                f"as of '{first}', got others ('{found.image}', '{found.label}') of '{name}'"
            )
    return {side: _joined_texts({name: own[side] for name, (own, _) in parts.items()}) for side in sides}, columns


def _of_each(homes: Sequence[Path], one: Callable[[Path], T]) -> dict[str, T]:
    """What is read of each client, or all that is wrong with any."""
    read_ones = gathered(functools.partial(one, home) for home in homes)
    return {home.name: read_one for home, read_one in zip(homes, read_ones, strict=True)}


def _joined_texts(parts: Mapping[str, RawTexts]) -> RawTexts:
    """One side of all clients; labels are words where they are so of one client."""
    labels = [part.labels for part in parts.values()]
    if any(values.dtype.kind == "U" for values in labels):
        labels = [values.astype(np.str_) for values in labels]
    further = _columns({name: part.columns for name, part in parts.items()}, parts)
    files = [file for part in parts.values() for file in part.files]
    return RawTexts([text for part in parts.values() for text in part.texts], np.concatenate(labels), further, files)


def check_sides(tested: Mapping[str, bool]) -> None:
    """Refuse clients of which some have a test side and others none."""
    first = next(iter(tested))
    for name, has_test in tested.items():
        if has_test != tested[first]:
            raise ConfigError(
                f"expected a test side of every client or of none, got {'one' if has_test else 'none'} of '{name}', "
                f"unlike '{first}'"
            )


def owners(rows: Mapping[str, int]) -> NDArray[Any]:
    """Whose each row is, of so many of every client: numbers where all names are, else text."""
    numbers = all(name.isascii() and name.isdigit() for name in rows)
    return np.repeat(np.array([int(name) for name in rows] if numbers else list(rows)), list(rows.values()))


def _by(part: _Read) -> str:
    kind = "" if part.train.x.dtype == torch.uint8 else f" of type {str(part.train.x.dtype).removeprefix('torch.')}"
    return " x ".join(map(str, part.train.x.shape[1:])) + kind


def _joined(sides: Mapping[str, LabeledSamples], parts: Mapping[str, _Read], classes: Sequence[str]) -> LabeledSamples:
    """One side of all clients, its labels numbered as `classes`."""
    number = {name: place for place, name in enumerate(classes)}
    known = {name: torch.tensor([number[label] for label in parts[name].class_names]) for name in sides}
    y = torch.cat([side.y if side.are_numbers else known[name][side.y] for name, side in sides.items()])
    return LabeledSamples(torch.cat([side.x for side in sides.values()]), y)


def _columns(given: Mapping[str, Mapping[str, NDArray[Any]]], sides: Mapping[str, Sized]) -> dict[str, NDArray[Any]]:
    """Further columns of one side that all clients have, and whose the rows are."""
    common = set.intersection(*(set(columns) for columns in given.values()))
    whose = {COLUMN: owners({name: len(side) for name, side in sides.items()})}
    return {
        column: np.concatenate([columns[column] for columns in given.values()]) for column in sorted(common)
    } | whose
