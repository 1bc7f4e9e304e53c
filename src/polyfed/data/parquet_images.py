"""Labelled images from Parquet files in the layout of the Hugging Face Hub, decoded once to uint8.

The files are read with pyarrow, not with ``datasets.load_dataset``: that one first writes
a converted copy of every file, and needs no less memory. What `datasets` knows about the columns (which are images,
which are labels and what the classes are called) stands in the files' own schema and is read from there.

Shapes: N images, C channels (1 grey, 3 RGB), H x W pixels.
"""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data import bounds, cache
from polyfed.data.samples import LABEL_NAMES, Samples, of_so_many
from polyfed.errors import RequestError
from polyfed.registry import nearest
from polyfed.results.schema import parse_json

_VERSION = "images-2"  # part of every cache key: raise it when decoding or label handling changes
SPLITS = {"train": ("train", "training"), "test": ("test", "testing"), "validation": ("validation", "valid", "val")}
_IMAGE_NAMES = ("img", "image", "images", "picture", "pixels")
_ROWS = 1000  # rows decoded at a time
_SIGNS = {-1, 1}  # the usual labels of two classes, beside 0 and 1
_WHOLE = re.compile(r"-?[0-9]+")


@dataclass(frozen=True)
class LabelledImages:
    """What was read: both sides, what the classes are called, and further columns (name -> (N,) values) by side.

    label_column: where the labels stood in the files; None: in none.
    """

    train: Samples
    test: Samples | None
    class_names: tuple[str, ...]
    train_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    test_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    label_column: str | None = None


@dataclass(frozen=True)
class Columns:
    """Which columns to read. `class_names` is None when the files do not name the classes."""

    image: str
    label: str
    class_names: tuple[str, ...] | None


def has_parquet(folder: Path) -> bool:
    """Whether `folder`, or a folder right under it, holds a file named ``*.parquet``."""
    return folder.is_dir() and bool(_parquet_files(folder))


def read_folder(
    folder: Path,
    image_column: str | None = None,
    label_column: str | None = None,
    train_splits: Sequence[str] = ("train",),
    columns: Sequence[str] = (),
) -> LabelledImages:
    """Read and decode a folder of Parquet files, or take the decoded copy from the cache.

    Files whose name (or folder) says train are the training side, those that say test the test side. Without a test
    file, validation files are the test side (Tiny-ImageNet); beside one they are not read. When no name says anything,
    all files are training files.

    Labels are kept as they are when the files name the classes (a ClassLabel feature) or when they are whole numbers
    that fill 0..C-1. Otherwise (say 0 and 4, or strings) the sorted distinct values of both sides become 0..C-1 and
    their spelling the classes' names.

    Args:
        folder: holds ``*.parquet``, directly or one folder down.
        image_column: the column with encoded images; None to find it.
        label_column: the column with labels; None to find it.
        train_splits: the words in files' names that say "training side", in the order in which their rows follow.
        columns: further columns of whole numbers or strings; one that the test side lacks is left out there.

    Raises:
        RequestError: no training files, a file that is not whole Parquet, columns missing or ambiguous, an image that
            does not decode, images of several shapes, labels that are missing, negative or out of range.
    """
    files = split_files(folder, train_splits)
    every = [path for paths in files.values() for path in paths]
    found = _find_columns(every, image_column, label_column)
    try:
        sums = cache.file_checksums(every)
    except OSError as error:
        raise RequestError(f"cannot read the files in {folder}: {first_line(error)}") from error
    sides = [side for side, paths in files.items() for _ in paths]
    parts = (f"{side} {checksum}" for side, checksum in zip(sides, sums, strict=True))
    key = cache.digest([_VERSION, found.image, found.label, *parts])
    read = from_cache(key) or _decoded(files, found, key)
    more = {side: _more_columns(paths, columns, needed=side == "train") for side, paths in files.items()}
    return replace(read, train_columns=more["train"], test_columns=more.get("test", {}), label_column=found.label)


def from_cache(key: str) -> LabelledImages | None:
    """The decoded copy, or None."""
    found = cache.fetch(key)
    if found is None:
        return None
    tensors, facts = found
    try:
        names = parse_json(facts["class_names"].encode())
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("no names of classes")
        train = _side_of(tensors, "train", len(names))
        test = _side_of(tensors, "test", len(names)) if "test_x" in tensors else None
        if test is not None and test.x.shape[1:] != train.x.shape[1:]:
            raise ValueError("images of two sizes")
    except (KeyError, ValueError):  # it is another file's, or somebody wrote it anew
        return None
    return LabelledImages(train, test, tuple(names))


def _side_of(tensors: Mapping[str, torch.Tensor], side: str, classes: int) -> Samples:
    """The images (N, C, H, W) and labels (N,) of a side as `kept` stores them; ValueError where they are others."""
    images, labels = tensors[f"{side}_x"], tensors[f"{side}_y"]
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3) or not images.numel():
        raise ValueError("no images")
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise ValueError("no labels of these images")
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError("a label that is no class")
    return Samples(images, labels)


def _decoded(files: dict[str, list[Path]], columns: Columns, key: str) -> LabelledImages:
    """Decode all files and leave a copy in the cache."""
    images: dict[str, torch.Tensor] = {}
    raw: dict[str, NDArray[Any]] = {}
    shape: tuple[int, ...] | None = None
    for side, paths in files.items():
        pixels, raw[side] = _read_side(paths, columns, shape)
        shape = pixels.shape[1:]
        images[side] = torch.from_numpy(pixels)
    rows = {side: [(path, _open(path).metadata.num_rows) for path in paths] for side, paths in files.items()}
    labels, names = number_labels(raw, columns, rows)
    sides = {side: Samples(images[side], torch.from_numpy(labels[side])) for side in files}
    return kept(key, sides, names)


def kept(key: str, sides: Mapping[str, Samples], names: tuple[str, ...]) -> LabelledImages:
    """Decoded sides ("train", "test"), of which a copy is left in the cache."""
    tensors = {f"{side}_{part}": getattr(sides[side], part) for side in sides for part in ("x", "y")}
    cache.store(key, tensors, {"class_names": json.dumps(names)})
    return LabelledImages(sides["train"], sides.get("test"), names)


# files ---------------------------------------------------------------------------------------------------------------


def _parquet_files(folder: Path) -> list[Path]:
    return files_of(folder, "parquet")


def files_of(folder: Path, suffix: str) -> list[Path]:
    """The files of a folder that end so, sorted by name; those one folder down when it has none itself."""
    for pattern in (f"*.{suffix}", f"*/*.{suffix}"):
        found = sorted(p for p in folder.glob(pattern) if p.is_file() and not p.name.startswith("."))
        if found:
            return found
    return []


def _words_of(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower()))


def _split_of(path: Path, folder: Path, asked: Sequence[str]) -> str | None:
    """Which split a file is of, by a whole word in its own name, else in its folder's below `folder`.

    Args:
        path: the file.
        folder: of the data set.
        asked: words that say so, besides the usual ones.
    """
    spellings_of = {**{word: (word,) for word in asked}, **SPLITS}
    parts = [path.stem, *(() if path.parent == folder else (path.parent.name,))]
    for part in parts:
        words = _words_of(part)
        for split, spellings in spellings_of.items():
            if words & set(spellings):
                return split
    return None


def choose_sides(
    splits: Collection[str], train_splits: Sequence[str], where: object, others: Collection[str] = ()
) -> dict[str, list[str]]:
    """Which splits are the training side and, if there is one, the test side; `others` are more names to suggest.

    Raises:
        RequestError: a split of `train_splits` that is not there, is named twice, or is the test split.
    """
    named = {spelling: split for split, spellings in SPLITS.items() for spelling in spellings}
    train = [named.get(word, word) for word in train_splits]
    if not train or len(set(train)) < len(train) or "test" in train:
        raise RequestError(f"expected train_splits as different splits, none of them 'test', came {list(train_splits)}")
    for split in train:
        if split not in splits:
            raise RequestError(f"expected a split '{split}' in {where}, came none{nearest(split, {*splits, *others})}")
    test = next((split for split in ("test", "validation") if split in splits and split not in train), None)
    return {"train": train, "test": [test]} if test else {"train": train}


def split_files(
    folder: Path, train_splits: Sequence[str] = ("train",), suffix: str = "parquet"
) -> dict[str, list[Path]]:
    """The files of the training side and, if there are any, of the test side; `suffix` is parquet or csv.

    Raises:
        RequestError: no such file, no training file, or several data sets in one folder.
    """
    kind = {"parquet": "Parquet", "csv": "CSV"}[suffix]
    if not folder.is_dir():
        raise RequestError(f"expected a folder with {kind} files at {folder}, came no such folder")
    found = files_of(folder, suffix)
    if not found:
        raise RequestError(f"expected {kind} files (train*.{suffix}, test*.{suffix}) in {folder}, came none")
    splits: dict[str, list[Path]] = {}  # "" for files whose names say nothing
    for path in found:
        splits.setdefault(_split_of(path, folder, train_splits) or "", []).append(path)
    if set(splits) == {""}:
        splits = {"train": splits[""]}
    if "train" in train_splits and "train" not in splits:
        raise RequestError(
            f"expected a training file (train*.{suffix}) in {folder}, came only {', '.join(p.name for p in found[:4])}"
        )
    unread = {word for path in splits.pop("", []) for word in _words_of(path.stem) if len(word) > 2}
    sides = choose_sides(splits, train_splits, folder, unread)
    for split in sides["train"]:
        homes = sorted({path.parent.name for path in splits[split]})
        if len(homes) > 1:
            raise RequestError(
                f"expected one data set in {folder}, came several: {', '.join(homes)}; name one as the root"
            )
    return {side: [path for split in chosen for path in splits[split]] for side, chosen in sides.items()}


def _open(path: Path) -> Any:
    """A ``pyarrow.parquet.ParquetFile``.

    Raises:
        RequestError: not a whole Parquet file, or no file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    bounds.check_file(path)
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RequestError(f"expected a whole Parquet file, came {path}: {first_line(error)}") from error


# columns -------------------------------------------------------------------------------------------------------------


def _find_columns(paths: Sequence[Path], image_column: str | None, label_column: str | None) -> Columns:
    """The image and the label column, the same in every file.

    Raises:
        RequestError: none, several, one that is named but absent, or files that differ.
    """
    chosen: Columns | None = None
    for path in paths:
        schema = _open(path).schema_arrow
        came = pick_columns(schema, _features(schema.metadata), image_column, label_column, path)
        if chosen is not None and came != chosen:
            raise RequestError(
                f"expected the columns '{chosen.image}' and '{chosen.label}' with the same classes in every file, "
                f"came '{came.image}' and '{came.label}' with other names or classes in {path}"
            )
        chosen = came
    assert chosen is not None  # split_files gave at least one path
    return chosen


def pick_columns(
    schema: Any, features: dict[str, dict[str, Any]], image_column: str | None, label_column: str | None, where: object
) -> Columns:
    """The image and the label column of one Arrow schema; `features` is what `datasets` knows about the columns.

    Raises:
        RequestError: none, several, one that is named but absent, or a type that cannot hold them.
    """
    found, texts = _image_columns(schema, features), ", or a column of texts with text_column"
    image = _pick("image", image_column, found, schema.names, where, "" if found else texts)
    label = _pick("label", label_column, _label_columns(schema, features), schema.names, where)
    _check_types(schema, image, label, where)
    names = features.get(label, {}).get("names") if features.get(label, {}).get("_type") == "ClassLabel" else None
    return Columns(image, label, tuple(str(name) for name in names) if isinstance(names, list) else None)


def _features(metadata: dict[bytes, bytes] | None) -> dict[str, dict[str, Any]]:
    """What `datasets` wrote about the columns; empty for a file from elsewhere."""
    try:
        features = parse_json((metadata or {})[b"huggingface"])["info"]["features"]
        return {name: kind for name, kind in features.items() if isinstance(kind, dict)}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _image_columns(schema: Any, features: dict[str, dict[str, Any]]) -> list[str]:
    """Columns of feature type Image, else those with a usual name that can hold encoded images."""
    said = [name for name in schema.names if features.get(name, {}).get("_type") == "Image"]
    return said or [name for name in schema.names if name in _IMAGE_NAMES and _holds_bytes(schema.field(name).type)]


def _label_columns(schema: Any, features: dict[str, dict[str, Any]]) -> list[str]:
    """Columns of feature type ClassLabel, else those with a usual name that can hold labels."""
    said = [name for name in schema.names if features.get(name, {}).get("_type") == "ClassLabel"]
    return said or [name for name in schema.names if name in LABEL_NAMES and _holds_labels(schema.field(name).type)]


def _holds_bytes(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _holds_labels(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(
        types.is_integer(kind) or types.is_boolean(kind) or types.is_string(kind) or types.is_large_string(kind)
    )


def _pick(
    what: str, named: str | None, candidates: list[str], names: list[str], where: object, others: str = ""
) -> str:
    """The named column, else the only candidate; `others` ends the message that there is none or several."""
    if named is not None:
        _check_name(what, named, names, where)
        return named
    if len(candidates) == 1:
        return candidates[0]
    came = f"several: {', '.join(candidates)}" if candidates else f"none among: {', '.join(names)}"
    raise RequestError(f"expected one {what} column in {where}, came {came}; name it with {what}_column{others}")


def _check_name(what: str, named: str, names: list[str], where: object) -> None:
    if named not in names:
        raise RequestError(f"expected the {what} column '{named}' in {where}, came no such{nearest(named, names)}")


def _check_types(schema: Any, image: str, label: str, where: object) -> None:
    """Refuse columns that cannot hold what they should."""
    for name in (image, label):
        if schema.names.count(name) > 1:
            raise RequestError(f"expected one column '{name}' in {where}, came {schema.names.count(name)}")
    if not _holds_bytes(schema.field(image).type):
        raise RequestError(
            f"expected encoded images (bytes) in column '{image}' of {where}, came type {schema.field(image).type}"
        )
    if not _holds_labels(schema.field(label).type):
        raise RequestError(
            f"expected whole numbers or strings in label column '{label}' of {where}, "
            f"came type {schema.field(label).type}"
        )


def _more_columns(paths: Sequence[Path], names: Sequence[str], needed: bool) -> dict[str, NDArray[Any]]:
    """Further columns of one side, row by row in file order.

    Args:
        paths: the files of the side.
        names: of the columns.
        needed: whether each must be there; otherwise one that the first file lacks is left out.

    Raises:
        RequestError: a column that is needed and absent, or absent in some files only; values that are no whole numbers
            or strings, or missing.
    """
    found: dict[str, NDArray[Any]] = {}
    for name in dict.fromkeys(names):
        if not needed and name not in _open(paths[0]).schema_arrow.names:
            continue
        parts = []
        for path in paths:
            _check_name("further", name, _open(path).schema_arrow.names, path)
            for cells in _column_batches(path, name):
                parts.append(column_values(cells.to_pylist(), f"column '{name}' of {path}"))
        found[name] = column_values(np.concatenate(parts), f"column '{name}' of {paths[0].parent}")
    return found


def _column_batches(path: Path, name: str) -> Iterator[Any]:
    """One column of a file, some rows at a time."""
    import pyarrow as pa

    try:
        for batch in _open(path).iter_batches(batch_size=50 * _ROWS, columns=[name]):
            yield batch.column(0)
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"expected a whole Parquet file, came {path}: {first_line(error)}") from error


def column_values(values: Any, where: str) -> NDArray[Any]:
    """Values of a further column as (N,) int64 or strings.

    Args:
        values: array-like of whole numbers, booleans or strings.
        where: what they are, for the message.

    Raises:
        RequestError: other values, missing ones, or numbers and strings mixed.
    """
    given = values.tolist() if isinstance(values, np.ndarray | torch.Tensor) else list(values)
    if all(isinstance(value, str) for value in given):
        return np.array(given, dtype=np.str_)
    if all(isinstance(value, numbers.Integral | np.bool_) for value in given):
        with contextlib.suppress(OverflowError):
            return np.array(given, dtype=np.int64)
    wrong = next((v for v in given if not isinstance(v, type(given[0]))), given[0])
    raise RequestError(
        f"expected whole numbers or strings, all of one kind and none missing, in {where}, came {str(wrong)[:40]!r}"
    )


# rows ----------------------------------------------------------------------------------------------------------------


def _read_side(
    paths: Sequence[Path], columns: Columns, shape: tuple[int, ...] | None
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Every image and raw label of some files, in file order.

    Args:
        paths: the files of one side.
        columns: what to read.
        shape: (C, H, W) that the images must have; None for that of the first.

    Returns:
        (N, C, H, W) uint8 and (N,) labels, int64 or strings.
    """
    total = sum(_open(path).metadata.num_rows for path in paths)
    if total < 1:
        raise RequestError(f"expected at least one row in {paths[0]}, came an empty file")
    pixels: NDArray[np.uint8] | None = None
    labels: list[NDArray[Any]] = []
    row = 0
    for path in paths:
        start = row
        for cells, marks in _batches(path, columns):
            labels.append(marks)
            for cell in cells:
                image = _decode(cell, path, row - start)
                shape = shape or image.shape
                if pixels is None:
                    pixels = _room((total, *shape), path)
                check_shape(image.shape, shape, row - start, path)
                if row == total:
                    raise RequestError(f"expected {total} rows, as the files say, came more from {paths[0].parent}")
                pixels[row] = image
                row += 1
    if pixels is None or row != total:
        raise RequestError(f"expected {total} rows, as the files say, came {row} from {paths[0].parent}")
    return pixels, np.concatenate(labels)


def _room(shape: tuple[int, ...], path: Path) -> NDArray[np.uint8]:
    """Memory for images (N, C, H, W); N is what the files say."""
    bounds.check_room(math.prod(shape), "images", path)
    try:
        return np.empty(shape, dtype=np.uint8)
    except (MemoryError, ValueError):
        raise RequestError(f"expected images for which there is memory, came {shape[0]} rows, as {path} says") from None


def _batches(path: Path, columns: Columns) -> Iterator[tuple[list[bytes | None], NDArray[Any]]]:
    """Encoded images and labels of one file, some rows at a time."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as types

    try:
        for batch in _open(path).iter_batches(batch_size=_ROWS, columns=[columns.image, columns.label]):
            cells, marks = batch.column(columns.image), batch.column(columns.label)
            if types.is_struct(cells.type):
                cells = pc.struct_field(cells, "bytes")
            if marks.null_count:
                raise RequestError(f"expected a label in every row, came an empty one in '{columns.label}' of {path}")
            whole = types.is_integer(marks.type) or types.is_boolean(marks.type)
            yield cells.to_pylist(), np.array(marks.to_pylist(), dtype=np.int64 if whole else None)
    except (pa.ArrowException, OSError, OverflowError, UnicodeDecodeError) as error:
        raise RequestError(f"expected a whole Parquet file, came {path}: {first_line(error)}") from error


def _decode(cell: bytes | None, path: Path, row: int) -> NDArray[np.uint8]:
    """One image as (C, H, W) uint8: grey stays one channel; black-and-white becomes grey, a palette RGB."""
    if not cell:
        raise RequestError(
            f"expected an encoded image in row {row} of {path}, came none (paths alone are not followed)"
        )
    return to_pixels(lambda: bounds.open_image(cell), row, path)


def to_pixels(opened: Callable[[], Any], row: int, where: object) -> NDArray[np.uint8]:
    """What `opened` gives, a Pillow image, as (C, H, W) uint8 (see `_decode`).

    Raises:
        RequestError: it does not decode, or is neither grey nor RGB.
    """
    try:
        with opened() as image:
            mode = {"1": "L", "P": "RGB"}.get(image.mode, image.mode)
            pixels = np.asarray(image if mode == image.mode else image.convert(mode))
    except Exception as error:  # Pillow's decoders raise nearly anything on foreign bytes
        raise RequestError(
            f"expected an image in row {row} of {where}, came bytes that do not decode: {first_line(error)}"
        ) from error
    if mode == "L":
        return pixels[None]
    if mode == "RGB":
        return pixels.transpose(2, 0, 1)
    raise RequestError(f"expected grey (L) or RGB images, came mode {mode} in row {row} of {where}")


def check_shape(came: tuple[int, ...], shape: tuple[int, ...], row: int, where: object) -> None:
    """Refuse an image (C, H, W) that is unlike the first one."""
    if came != shape:
        raise RequestError(
            f"expected every image to have {_words(shape)}, as the first one has, "
            f"came {_words(came)} in row {row} of {where}"
        )


def _words(shape: tuple[int, ...]) -> str:
    colour = {1: "grey", 3: "RGB"}[shape[0]]
    return f"{colour} {shape[1]}x{shape[2]} pixels"


# labels --------------------------------------------------------------------------------------------------------------


Files = Sequence[tuple[object, int]]  # what a side was read from, and how many rows of each


def number_labels(
    raw: Mapping[str, NDArray[Any]], columns: Columns, files: Mapping[str, Files] | None = None
) -> tuple[dict[str, NDArray[np.int64]], tuple[str, ...]]:
    """Labels as 0..C-1 and the classes' names (see `read_folder`).

    Args:
        raw: side -> (N,) labels, int64 or strings.
        columns: where they stood, and the classes' names, if the files name them.
        files: side -> what it was read from, to name the row of a label that is refused.

    Raises:
        RequestError: a number that is none of the named classes, or is below 0, unless all labels are -1 and 1.
    """
    values = np.unique(np.concatenate(list(raw.values())))
    names = columns.class_names
    if values.dtype == np.int64:
        if names is None and np.array_equal(values, np.arange(len(values))):
            names = tuple(str(value) for value in values)
        if names is not None:
            _check_labels(raw, set(range(len(names))), columns, files or {})
            return {side: marks.astype(np.int64) for side, marks in raw.items()}, names
    spelt = tuple(str(value) for value in values)
    if negative_name(spelt) is not None:
        _check_labels(raw, {value for value in values.tolist() if int(value) >= 0}, columns, files or {})
    return {side: np.searchsorted(values, marks).astype(np.int64) for side, marks in raw.items()}, spelt


def _check_labels(
    raw: Mapping[str, NDArray[Any]], known: Collection[Any], columns: Columns, files: Mapping[str, Files]
) -> None:
    """Refuse labels that are not known, by the first such row."""
    named = columns.class_names
    expected = f"from 0 on in column '{columns.label}'"
    if named is not None:
        expected = f"0..{len(named) - 1} in column '{columns.label}', which names {len(named)} classes"
    for side, labels in raw.items():
        rows = np.flatnonzero(~np.isin(labels, list(known)))
        if len(rows):
            first = labels[rows[0]]
            hint = "; -1 often means that there is none" if str(first) == "-1" else ""
            raise RequestError(
                f"expected labels {expected}, came {first} in {_row_of(side, int(rows[0]), files.get(side, ()))}"
                f"{of_so_many(len(rows))}{hint}; drop such rows, or name the column of the labels in label_column"
            )


def _row_of(side: str, row: int, files: Files) -> str:
    """Where a side's row stands."""
    for file, rows in files:
        if row < rows:
            return f"row {row} of {file}"
        row -= rows
    return f"row {row} of the {'training' if side == 'train' else side} side"


def negative_name(names: Iterable[str]) -> str | None:
    """A class called by a number below 0, where all are called by numbers; None for the classes -1 and 1 alone."""
    different = set(names)
    if different <= {str(sign) for sign in _SIGNS} or not all(_WHOLE.fullmatch(name) for name in different):
        return None
    return next((name for name in sorted(different) if name.startswith("-")), None)


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Names without repetition, sorted; by value where all are whole numbers."""
    different = set(names)
    numbers = all(name.isascii() and name.isdigit() for name in different)
    return tuple(sorted(different, key=lambda name: (int(name) if numbers else 0, name)))


def first_line(error: BaseException) -> str:
    """An error's first line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
