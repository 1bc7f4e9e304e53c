"""Labeled images or texts in Parquet files in the layout of the Hugging Face Hub.

They are read with pyarrow, not with ``datasets.load_dataset``: that one first writes a converted copy of every file,
and needs no less memory. What `datasets` knows about the columns (which are images, which are labels and what the
classes are called) stands in the files' own schema and is read from there.

Shapes: N images or texts, C channels (1 gray, 3 RGB), H x W pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data import cache
from polyfed.data.classes import encode_labels
from polyfed.data.column_schema import Columns, check_column, column_values, pick_columns, stored_features
from polyfed.data.dataset import DatasetSource
from polyfed.data.files import check_file, check_sides, find_split_files, owners
from polyfed.data.images import decode, from_cache, into_cache
from polyfed.data.labeled_texts import RawTexts, encode_texts
from polyfed.data.options import CLIENT, OF_FILES, OF_TEXTS, SourceOptions
from polyfed.data.samples import LabeledSamples
from polyfed.errors import ConfigError, first_line, gathered

_VERSION = "images-4"  # part of every cache key: raise it when decoding or label handling changes
_ROWS = 1000  # rows read at a time


@dataclass(frozen=True)
class Part:
    """A Parquet file, which is opened while it is read.

    Args:
        where: its path.
        schema: of Arrow. features: what `datasets` knows about the columns. rows: how many it says that it has.
        client: whose the rows are, if the part is a client's.
    """

    where: Path
    schema: Any
    features: dict[str, dict[str, Any]]
    rows: int
    client: str | None = None

    def batches(self, columns: Sequence[str]) -> Iterator[list[list[Any]]]:
        """The cells of some columns, some rows at a time."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        names = list(columns)
        try:
            for batch in pq.ParquetFile(self.where).iter_batches(batch_size=_ROWS, columns=names):
                yield [batch.column(name).to_pylist() for name in names]
        except (pa.ArrowException, OSError, OverflowError, UnicodeDecodeError) as error:
            raise ConfigError(f"expected a whole Parquet file, got {self.where}: {first_line(error)}") from error

    def filled(self, columns: Columns) -> Iterator[tuple[list[Any], list[Any]]]:
        """Images or texts, and labels; none is missing."""
        row = 0
        for contents, labels in self.batches((columns.content, columns.label)):
            for content, label in zip(contents, labels, strict=True):
                if content is None or label is None:
                    what = columns.content if content is None else columns.label
                    raise ConfigError(f"expected '{what}' in every row, got an empty one in row {row} of {self.where}")
                row += 1
            yield contents, labels


Parts = Mapping[str, Sequence[Part]]  # by side


def open_parquet(path: Path) -> Part:
    """A Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_file(path)
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"expected a whole Parquet file, got {path}: {first_line(error)}") from error
    schema = file.schema_arrow
    return Part(path, schema, stored_features(schema.metadata), file.metadata.num_rows)


def parquet_sides(places: Sequence[Path], of_clients: bool = False) -> Parts:
    """The files of some folders, directly in them or one folder down, by side.

    Files whose name (or folder) says train are the training side, those that say test the test side. Without a test
    file, validation files are the test side (Tiny-ImageNet); beside one they are not read. When no name says anything,
    all files are training files. `places` is one folder, or with `of_clients` one of each client.
    """
    files = gathered(functools.partial(find_split_files, place) for place in places)
    check_sides({place.name: "test" in sides for place, sides in zip(places, files, strict=True)})
    return {
        side: [
            replace(open_parquet(path), client=place.name if of_clients else None)
            for place, sides in zip(places, files, strict=True)
            for path in sides[side]
        ]
        for side in files[0]
    }


def read_source(
    options: SourceOptions, homes: Callable[[], Sequence[Path]], *more: str, of_clients: bool = False
) -> DatasetSource:
    """Images, or texts where their column is named.

    Args:
        homes: the folders of the files, asked for once the settings are known to fit; see `parquet_sides`.
        more: settings that may be given besides those of files.
    """
    is_text = options.text_column is not None
    options.check_used(*OF_FILES, *(OF_TEXTS if is_text else ("image_column",)), *more)
    sides = parquet_sides(homes(), of_clients)
    if is_text:
        return encode_texts(*read_texts(sides, options), options)
    return read_images(sides, options)


def read_images(sides: Parts, options: SourceOptions, label_column: str | None = None, **known: Any) -> DatasetSource:
    """Decode images, or take them from the cache where they were decoded before.

    Args:
        options: of it image_column, label_column and columns, of which one that the test side lacks is left out there.
        label_column: where the options name none. known: mean and std per channel, where they are.
    """
    found = _same_columns(sides, "image", options.image_column, options.label_column or label_column)
    places = [(side, part.where) for side, parts in sides.items() for part in parts]
    marks = cache.file_marks(path for _, path in places)
    of_sides = (f"{side} {mark}" for (side, _), mark in zip(places, marks, strict=True))
    key = cache.cache_key([_VERSION, found.content, found.label, *of_sides])
    read = from_cache(key)
    if read is None:
        images: dict[str, torch.Tensor] = {}
        raw: dict[str, NDArray[Any]] = {}
        shape: torch.Size | None = None
        for side, parts in sides.items():
            images[side], raw[side] = _read_side(parts, found, shape)
            shape = images[side].shape[1:]
        labels, names = encode_labels(raw, found.label, found.class_names)
        read = {side: LabeledSamples(images[side], torch.from_numpy(labels[side])) for side in sides}, names
        into_cache(key, *read)
    further = {side: _extra_columns(parts, options.columns, side == "train") for side, parts in sides.items()}
    return DatasetSource.of(options.dataset, *read, further, label_column=found.label, **known)


def read_texts(sides: Parts, options: SourceOptions) -> tuple[dict[str, RawTexts], Columns]:
    """The sides' texts, and the columns that were read; see `read_images`."""
    found = _same_columns(sides, "text", options.text_column, options.label_column)
    read = {}
    for side, parts in sides.items():
        batches = [batch for part in parts for batch in part.filled(found)]
        texts = [text for of_batch, _ in batches for text in of_batch]
        if not texts:
            raise ConfigError(f"expected at least one row in {parts[0].where}, got an empty file")
        labels = np.concatenate([_label_values(marks, found.label, parts[0].where) for _, marks in batches])
        more = _extra_columns(parts, options.columns, side == "train")
        read[side] = RawTexts(texts, labels, more)
    return read, found


def _same_columns(sides: Parts, kind: str, named: str | None, label_column: str | None) -> Columns:
    chosen: Columns | None = None
    for part in (part for parts in sides.values() for part in parts):
        found = pick_columns(kind, part.schema, part.features, named, label_column, part.where)
        if chosen is not None and found != chosen:
            raise ConfigError(
                f"expected the columns '{chosen.content}' and '{chosen.label}' with the same classes in every file, "
                f"got '{found.content}' and '{found.label}' with other names or classes in {part.where}"
            )
        chosen = found
    assert chosen is not None  # every side has a part
    return chosen


def _read_side(parts: Sequence[Part], columns: Columns, shape: torch.Size | None) -> tuple[torch.Tensor, NDArray[Any]]:
    """Every image (N, C, H, W) and raw label (N,) of some parts, in order.

    shape: (C, H, W) that the images must have; None for that of the first.
    """
    images: list[torch.Tensor] = []
    labels: list[NDArray[Any]] = []
    for part in parts:
        start = len(images)
        for cells, marks in part.filled(columns):
            labels.append(_label_values(marks, columns.label, part.where))
            for cell in cells:
                place = f"row {len(images) - start} of {part.where}"
                image = decode(cell["bytes"] if isinstance(cell, dict) else cell, place)
                shape = shape or image.shape
                if image.shape != shape:
                    raise ConfigError(
                        f"expected every image to have {_words(shape)}, as the first one has, got "
                        f"{_words(image.shape)} in {place}"
                    )
                images.append(image)
    if not images:
        raise ConfigError(f"expected at least one row in {parts[0].where}, got an empty file")
    return torch.stack(images), np.concatenate(labels)


def _words(shape: Sequence[int]) -> str:
    color = {1: "gray", 3: "RGB"}[shape[0]]
    return f"{color} {shape[1]}x{shape[2]} pixels"


def _label_values(labels: Sequence[Any], column: str, where: object) -> NDArray[Any]:
    """Labels (N,) as words, or as int64: whole numbers, also spelt 3.0."""
    try:
        if not isinstance(labels[0], str) and (odd := [label for label in labels if label != label // 1]):
            raise ConfigError(
                f"expected classes, whole numbers or words, in label column '{column}' of {where}, got {odd[0]}"
            )
        return np.array(labels, dtype=np.str_ if isinstance(labels[0], str) else np.int64)
    except OverflowError:
        raise ConfigError(f"expected labels below 2^63 in '{column}' of {where}, got larger ones") from None


def _extra_columns(parts: Sequence[Part], names: Sequence[str], needed: bool) -> dict[str, NDArray[Any]]:
    """Further columns of one side, row by row; one that the first part lacks is left out, unless it is needed."""
    found = {}
    for name in dict.fromkeys(names):
        if not needed and name not in parts[0].schema.names:
            continue
        values: list[NDArray[Any]] = []
        for part in parts:
            check_column("further", name, part.schema.names, part.where)
            where = f"column '{name}' of {part.where}"
            values += [column_values(cells, where) for (cells,) in part.batches([name])]
        found[name] = column_values(np.concatenate(values), f"column '{name}' of {parts[0].where}")
    clients = [part.client for part in parts if part.client is not None]
    return found | ({CLIENT: owners(clients, [part.rows for part in parts])} if clients else {})
