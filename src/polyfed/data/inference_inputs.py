"""New inputs for a model that has been trained, brought into the form in which the run stored its own.

What is read: Parquet files with encoded images, PNG and JPEG files, a CSV file with the features that a run was trained
on; texts in Parquet, CSV or text files, which become ids by the run's own words; one array in a .npy file. Conversions
are those of loading (`data.image_size`), and from gray to RGB and back where nothing is guessed; anything else is
refused.

Shapes: N inputs, C channels, H x W pixels.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from polyfed.data import safe_pickle, tables
from polyfed.data.arrow_tables import Part, open_parquet
from polyfed.data.column_schema import holds_labels, label_columns, pick_column, pick_content
from polyfed.data.files import check_file, files_of
from polyfed.data.images import PICTURES, decode, images_in
from polyfed.data.labeled_texts import read_lines
from polyfed.data.samples import LabeledSamples
from polyfed.data.table_columns import TableColumns, fill_missing
from polyfed.data.text import FIRST_WORD, Vocabulary
from polyfed.data.transforms import resize
from polyfed.errors import ConfigError, first_line

T = TypeVar("T")

_TEXTS = "a .csv, .parquet or .txt file of texts, a folder of .parquet files, or a .npy file of ids"
_KINDS = "a folder of Parquet or image files (.png, .jpg), one such file, a .csv file, or a .npy file"


@dataclass(frozen=True)
class InputSpec:
    """How a run stored its inputs.

    Args:
        shape: of one input; (C, H, W) for images.
        dtype: uint8 for images.
        image_size: pixels a side, or (height, width), to which images are resized; None: they come in their size.
        class_names: one per class, in order; for reading labels. Empty: labels are numbers to predict.
        feature_names: the columns of a CSV file, in order, where the run was trained on one.
        label_column: where the labels stood in the run's files.
        vocabulary: how the run read texts, where it was trained on some.
        columns: which features are categories, and which may be missing. fill: what stands for those that are.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    image_size: int | tuple[int, int] | None
    class_names: tuple[str, ...]
    feature_names: tuple[str, ...] = ()
    label_column: str | None = None
    vocabulary: Vocabulary | None = None
    columns: TableColumns = field(default_factory=TableColumns)
    fill: tuple[float, ...] = ()

    @property
    def images(self) -> bool:
        """Whether an input is a stored image."""
        return self.dtype == torch.uint8 and len(self.shape) == 3

    def __str__(self) -> str:
        return f"{' x '.join(map(str, self.shape))} of type {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, eq=False)
class InferenceInputs:
    """names: each input's row or file; x: (N, ...) as the run stored them; y: (N,) int64 or None.

    unknown: names of the texts of which the run knew no word.
    """

    names: tuple[str, ...]
    x: Tensor
    y: Tensor | None = None
    unknown: tuple[str, ...] = ()


def read(
    path: Path,
    form: InputSpec,
    image_column: str | None = None,
    label_column: str | None = None,
    text_column: str | None = None,
) -> InferenceInputs:
    """Read inputs from files.

    Args:
        path: Parquet files (one, or all of a folder), PNG or JPEG files (likewise), a ``.csv`` or a ``.npy`` file; for
            a run on texts Parquet files, a ``.csv``, a ``.txt`` (a text in every line) or a ``.npy`` file (ids). Blank
            lines do not count.
        form: what the inputs must become.
        image_column, label_column: of Parquet files, where they cannot be told; of CSV files the latter. Labels stand
            in the run's own column, or else in the only one that is called as such columns are; without either there
            are none. Labels are the classes' names, or their numbers.
        text_column: of Parquet and CSV files, where it is not called as in the run and cannot be told.
    """
    kinds = _KINDS if form.vocabulary is None else _TEXTS
    suffix = path.suffix.lower()
    check_file(path)
    if not path.exists():
        raise ConfigError(f"expected {kinds}, got '{path}', which is not there")
    _check_columns_asked(form, suffix, image_column, text_column)
    if form.vocabulary is not None and suffix != ".npy":
        return _from_texts(path, form, form.vocabulary, text_column, label_column)
    if suffix == ".csv" and path.is_file():
        return _from_csv(path, form, image_column, label_column)
    parquet, pictures = _image_files(path)
    column = image_column or label_column or text_column
    if column and not parquet:
        raise ConfigError(f"image_column and label_column are of Parquet files, got '{column}' with '{path}'")
    if suffix == ".npy" and path.is_file():
        return from_tensor(_array(path), form, str(path))
    if not parquet and not pictures:
        raise ConfigError(f"expected {_KINDS}, got '{path}'{' without any' if path.is_dir() else ''}")
    if not form.images:
        raise ConfigError(f"expected a .npy file with inputs {form}, as the run stored them, got images in '{path}'")
    if parquet:
        return _from_images_in_tables(parquet, form, image_column, label_column)
    return _from_pictures(pictures, form)


def _check_columns_asked(form: InputSpec, suffix: str, image_column: str | None, text_column: str | None) -> None:
    """Refuse a column of images where the run's inputs are texts, and the other way round."""
    if text_column is not None and form.vocabulary is None:
        raise ConfigError(f"text_column is of texts, got '{text_column}' where the run's inputs are {form}")
    if image_column is not None and form.vocabulary is not None and suffix != ".npy":
        raise ConfigError(f"image_column is of images, got '{image_column}' where the run's inputs are texts")


def _image_files(path: Path) -> tuple[list[Path], list[Path]]:
    """The Parquet files, or the image files, that a path is or that its folder holds."""
    if path.is_dir():
        parquet = files_of(path, "parquet")
        pictures = images_in(path)
        if parquet and pictures:
            raise ConfigError(f"expected Parquet files or image files in {path}, got both")
        return parquet, pictures
    suffix = path.suffix.lower()
    return [path] if suffix == ".parquet" else [], [path] if suffix in PICTURES else []


def from_tensor(x: Tensor, form: InputSpec, place: str) -> InferenceInputs:
    """Inputs (N, ...) from memory, named by their row; images also (N, H, W) where they are gray."""
    got = f"{tuple(x.shape)} of type {str(x.dtype).removeprefix('torch.')}"
    if x.dtype.is_floating_point and form.dtype.is_floating_point:
        x = x.to(form.dtype)
    if x.dim() == len(form.shape) == 3:
        x = x.unsqueeze(1)
    if x.dtype != form.dtype or x.dim() != 1 + len(form.shape):
        raise ConfigError(f"expected N inputs, each {form}, as the run stored them, got {got} in {place}")
    if len(x) == 0:
        raise ConfigError(f"expected at least one input, got none in {place}")
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        raise ConfigError(f"expected finite inputs, got NaN or infinite values in {place}")
    return InferenceInputs(tuple(map(str, range(len(x)))), _fitted(x, form, place))


def _fitted(x: Tensor, form: InputSpec, place: str) -> Tensor:
    """Inputs (N, ...) of the run's type in its shape."""
    if form.images and x.shape[1] != form.shape[0]:
        x = _recolored(x, form.shape[0], place)
    if form.images:
        x = resize(LabeledSamples(x, torch.zeros(len(x), dtype=torch.int64)), form.image_size).x
    if x.shape[1:] != form.shape:
        hint = "; ask for --resize (resize=True) to bring images to this size" if form.images else ""
        raise ConfigError(f"expected inputs {form}, as the run stored them, got {_by(x.shape[1:])} in {place}{hint}")
    return x


def _recolored(x: Tensor, channels: int, place: str) -> Tensor:
    """Gray images as RGB, or RGB images that hold nothing but gray as gray."""
    if x.shape[1] == 1 and channels == 3:
        return x.expand(-1, 3, -1, -1)
    if x.shape[1] == 3 and channels == 1 and bool((x == x[:, :1]).all()):
        return x[:, :1]
    names = {1: "gray images", 3: "RGB images"}
    expected, got = (names.get(number, f"{number} channels") for number in (channels, x.shape[1]))
    raise ConfigError(f"expected {expected}, as the run's are, got {got} in {place}; convert them as you see fit")


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


# files ---------------------------------------------------------------------------------------------------------------


def _array(path: Path) -> Tensor:
    try:
        array = np.load(path, allow_pickle=False)
        return torch.from_numpy(np.array(array, order="C"))
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {first_line(error)}") from error
    except safe_pickle.NO_ARRAY as error:  # NumPy's words suggest unpickling it
        raise ConfigError(f"expected an array of numbers as NumPy saves it, got something else in '{path}'") from error


def _from_pictures(paths: Sequence[Path], form: InputSpec) -> InferenceInputs:
    rows = []
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read '{path}': {first_line(error)}") from error
        rows.append(_fitted(decode(data, str(path))[0][None], form, str(path)))
    return InferenceInputs(tuple(path.name for path in paths), torch.cat(rows))


def _from_csv(path: Path, form: InputSpec, image_column: str | None, label_column: str | None) -> InferenceInputs:
    if image_column is not None:
        raise ConfigError(f"image_column is of Parquet files, got '{image_column}' with '{path}'")
    if not form.feature_names:
        raise ConfigError(f"expected inputs {form}, as the run stored them, got a CSV file: {path}")
    x_NF, labels = tables.read_new_rows(path, form.feature_names, label_column, form.label_column, form.columns)
    stored = LabeledSamples(torch.from_numpy(x_NF).to(form.dtype), torch.zeros(len(x_NF), dtype=torch.int64))
    x = fill_missing(stored, form.columns, form.fill).x
    return InferenceInputs(tuple(map(str, range(len(x)))), x, _numbered_labels(labels, form))


def _numbered_labels(labels: tables.NewLabels, form: InputSpec) -> Tensor | None:
    """The labels of a CSV file, (N,): int64, or float64 where numbers are predicted."""
    if labels is None:
        return None
    return torch.tensor([_numbered_label(_parsed(label), form, place) for label, place in labels])


def _parsed(label: str) -> str | int:
    """A label as a number, where it is one of digits."""
    return int(label) if label.isascii() and label.isdigit() else label


def _from_texts(
    path: Path, form: InputSpec, vocabulary: Vocabulary, text_column: str | None, label_column: str | None
) -> InferenceInputs:
    """Texts as ids, by the words that the run knew."""
    suffix = path.suffix.lower()
    if suffix == ".txt" and path.is_file():
        if given := text_column or label_column:
            raise ConfigError(f"text_column and label_column are of Parquet or CSV files, got '{given}' with '{path}'")
        x = vocabulary.ids(read_lines(path))
        return _with_unknown(InferenceInputs(tuple(map(str, range(len(x)))), x))
    if suffix == ".csv" and path.is_file():
        texts, labels = tables.read_new_texts(path, text_column, vocabulary.column, label_column, form.label_column)
        names = tuple(map(str, range(len(texts))))
        return _with_unknown(InferenceInputs(names, vocabulary.ids(texts), _numbered_labels(labels, form)))
    paths = [path] if suffix == ".parquet" else []
    if path.is_dir():
        paths = files_of(path, "parquet")
    if not paths:
        raise ConfigError(f"expected {_TEXTS}, got '{path}'{' without any' if path.is_dir() else ''}")

    def column(part: Part) -> str:
        usual = vocabulary.column if vocabulary.column in part.schema.names else None
        return pick_content("text", part.schema, part.features, text_column or usual, part.where)

    names, cells, y = _from_tables(paths, form, column, label_column, _text)
    return _with_unknown(InferenceInputs(names, vocabulary.ids(cells), y))


def _with_unknown(texts: InferenceInputs) -> InferenceInputs:
    """The texts, with the names of those that have no id of a word."""
    none = (texts.x < FIRST_WORD).all(dim=1).tolist()
    return replace(texts, unknown=tuple(name for name, is_one in zip(texts.names, none, strict=True) if is_one))


def _text(cell: Any, place: str) -> str:
    if cell is None:
        raise ConfigError(f"expected a text, got none in {place}")
    return str(cell)


# Parquet -------------------------------------------------------------------------------------------------------------


def _from_images_in_tables(
    paths: Sequence[Path], form: InputSpec, image_column: str | None, label_column: str | None
) -> InferenceInputs:
    def column(part: Part) -> str:
        return pick_content("image", part.schema, part.features, image_column, part.where)

    def made(cell: Any, place: str) -> Tensor:
        pixels, _ = decode(cell["bytes"] if isinstance(cell, dict) else cell, place)
        return _fitted(pixels[None], form, place)

    names, rows, labels = _from_tables(paths, form, column, label_column, made)
    return InferenceInputs(names, torch.cat(rows), labels)


def _from_tables(
    paths: Sequence[Path],
    form: InputSpec,
    column: Callable[[Part], str],
    label_column: str | None,
    made: Callable[[Any, str], T],
) -> tuple[tuple[str, ...], list[T], Tensor | None]:
    """Names, inputs and labels of some files; `column` picks the column, `made` makes an input of a cell."""
    names: list[str] = []
    rows: list[T] = []
    labels: list[int | float] = []
    for path in paths:
        for number, (cell, label) in enumerate(_cells(open_parquet(path), column, label_column, form.label_column)):
            place = f"row {number} of {path}"
            names.append(str(number) if len(paths) == 1 else f"{path.name}:{number}")
            rows.append(made(cell, place))
            labels += [] if label is None else [_numbered_label(label, form, place)]
    if not rows:
        raise ConfigError(f"expected at least one row in {paths[0]}, got an empty file")
    if labels and len(labels) < len(rows):
        raise ConfigError(f"expected a label in every row below {paths[0].parent}, or in none, got some without")
    return tuple(names), rows, torch.tensor(labels) if labels else None


def _cells(
    part: Part, column: Callable[[Part], str], label_column: str | None, usual_label: str | None
) -> Iterator[tuple[Any, Any]]:
    """The cells of one column of a file with their labels: a class's name, a number, or None."""
    content = column(part)
    names = part.schema.names
    candidates = label_columns(part.schema, part.features)
    label = pick_column("label", label_column, [], names, part.where) if label_column else None
    if label is None and usual_label in names and usual_label != content:
        label = usual_label
    elif label is None and len(candidates) == 1:
        label = candidates[0]
    if label is None:
        for (cells,) in part.batches([content]):
            yield from ((cell, None) for cell in cells)
        return
    if not holds_labels(part.schema.field(label).type):
        kind = part.schema.field(label).type
        raise ConfigError(f"expected numbers or names in column '{label}' of {part.where}, got {kind}")
    spelling: Any = part.features.get(label, {}).get("names")
    for cells, marks in part.batches([content, label]):
        for cell, mark in zip(cells, marks, strict=True):
            named = isinstance(spelling, list) and isinstance(mark, int) and 0 <= mark < len(spelling)
            yield cell, spelling[mark] if named else mark


def _numbered_label(label: Any, form: InputSpec, place: str) -> int | float:
    """The number of a class, from its name or its number; where numbers are predicted, the label as one."""
    if not form.class_names:
        return _number_to_predict(label, place)
    name = str(int(label)) if isinstance(label, bool) else str(label)
    if name in form.class_names:
        return form.class_names.index(name)
    if isinstance(label, int) and 0 <= label < len(form.class_names):
        return int(label)
    known = ", ".join(form.class_names[:10]) + (", ..." if len(form.class_names) > 10 else "")
    raise ConfigError(f"expected labels among the run's classes ({known}), got '{name}' in {place}")


def _number_to_predict(label: Any, place: str) -> float:
    with contextlib.suppress(TypeError, ValueError):
        value = float(label)
        if math.isfinite(value):
            return value
    raise ConfigError(f"expected a finite number as label, got '{label}' in {place}")
