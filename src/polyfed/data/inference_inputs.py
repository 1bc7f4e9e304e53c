"""New inputs for a model that has been trained, brought into the form in which the run stored its own.

What is read: PNG and JPEG files; a CSV file with the features that a run was trained on, or with texts, which become
ids by the run's own words; one array in a .npy file. Conversions are those of loading (`data.image_size`), and from
gray to RGB and back where nothing is guessed; anything else is refused.

Shapes: N inputs, C channels, H x W pixels.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyfed.data import tables
from polyfed.data.federation_columns import Feature
from polyfed.data.files import check_file
from polyfed.data.images import PICTURES, images_in, read_picture
from polyfed.data.samples import LabeledSamples, TableColumns, fill_missing, stored_rows
from polyfed.data.sources.client_arrays import NO_ARRAY
from polyfed.data.text import FIRST_WORD, Vocabulary
from polyfed.data.transforms import resize
from polyfed.errors import ConfigError, first_line


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
        spelling: what files may call the columns and in which units they are, where the run's recipe says so.
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
    spelling: Mapping[str, Feature] = field(default_factory=dict)

    @property
    def images(self) -> bool:
        """Whether an input is a stored image."""
        return self.dtype == torch.uint8 and len(self.shape) == 3

    @property
    def is_table(self) -> bool:
        """Whether an input is a table's row with categories, or with numbers that may be missing."""
        return self.columns.categories != () or self.columns.flags != ()

    @property
    def raw_shape(self) -> tuple[int, ...]:
        """Of one input, of a row of a table without the columns that say what is missing."""
        return (self.shape[0] - len(self.columns.flags), *self.shape[1:])

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


def read(path: Path, form: InputSpec) -> InferenceInputs:
    """Read inputs from files.

    Columns of tables are those that are called as in the run, or else the only ones of a usual name. Without a column
    of labels there are none. Labels are the classes' names, or their numbers.

    Args:
        path: a PNG or JPEG file, or a folder of them; a ``.csv`` file; or a ``.npy`` file, of texts with their ids.
        form: what the inputs must become.
    """
    check_file(path)
    if not path.exists():
        raise ConfigError(f"expected {_kinds(form)}, got '{path}', which is not there")
    suffix = path.suffix.lower() if path.is_file() else ""
    if suffix == ".npy":
        return from_tensor(_array(path), form, str(path))
    if suffix == ".csv":
        return _from_csv(path, form)
    pictures = images_in(path) if path.is_dir() else [path] if suffix in PICTURES else []
    if pictures and form.images:
        rows = [_fitted(read_picture(picture)[None], form, str(picture)) for picture in pictures]
        return InferenceInputs(tuple(picture.name for picture in pictures), torch.cat(rows))
    raise ConfigError(f"expected {_kinds(form)}, got '{path}'{' without any' if path.is_dir() else ''}")


def _kinds(form: InputSpec) -> str:
    if form.vocabulary is not None:
        return "a .csv file of texts, or a .npy file of ids"
    if form.images:
        return "a folder of image files (.png, .jpg), one such file, or a .npy file"
    return f"a .csv file, or a .npy file with inputs {form}, as the run stored them"


def from_tensor(x: Tensor, form: InputSpec, place: str) -> InferenceInputs:
    """Inputs (N, ...) from memory, named by their row; images also (N, H, W) where they are gray.

    Rows of a table may lack the columns that say what is missing, and have NaN for it.
    """
    got = f"{tuple(x.shape)} of type {str(x.dtype).removeprefix('torch.')}"
    if x.dtype.is_floating_point and form.dtype.is_floating_point:
        x = x.to(form.dtype)
    if x.dim() == len(form.shape) == 3:
        x = x.unsqueeze(1)
    if x.dtype != form.dtype or x.dim() != 1 + len(form.shape):
        raise ConfigError(f"expected N inputs, each {form}, as the run stored them, got {got} in {place}")
    if len(x) == 0:
        raise ConfigError(f"expected at least one input, got none in {place}")
    if form.is_table and x.shape[1:] == form.raw_shape:
        x = stored_rows(x, form.columns, form.fill)
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
        got = " x ".join(map(str, x.shape[1:]))
        hint = "; bring images to this size as you see fit" if form.images else ""
        raise ConfigError(f"expected inputs {form}, as the run stored them, got {got} in {place}{hint}")
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


# files ---------------------------------------------------------------------------------------------------------------


def _array(path: Path) -> Tensor:
    try:
        array = np.load(path, allow_pickle=False)
        return torch.from_numpy(np.array(array, order="C"))
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {first_line(error)}") from error
    except NO_ARRAY as error:  # NumPy's words suggest unpickling it
        raise ConfigError(f"expected an array of numbers as NumPy saves it, got something else in '{path}'") from error


def _from_csv(path: Path, form: InputSpec) -> InferenceInputs:
    if form.vocabulary is not None:
        texts, labels = tables.read_new_texts(path, form.vocabulary.column, form.label_column, form.class_names)
        return replace(_of_texts(texts, form.vocabulary), y=None if labels is None else torch.from_numpy(labels))
    if not form.feature_names:
        raise ConfigError(f"expected inputs {form}, as the run stored them, got a CSV file: {path}")
    x_NF, labels = tables.read_new_rows(
        path, form.feature_names, form.label_column, form.columns, form.spelling, form.class_names
    )
    stored = LabeledSamples(torch.from_numpy(x_NF).to(form.dtype), torch.zeros(len(x_NF), dtype=torch.int64))
    x = fill_missing(stored, form.columns, form.fill).x
    y = None if labels is None else torch.from_numpy(labels)
    return InferenceInputs(tuple(map(str, range(len(x)))), x, y)


def _of_texts(texts: Sequence[str], vocabulary: Vocabulary) -> InferenceInputs:
    """Texts as ids, by the words that the run knew; and the names of those that have no id of a word."""
    names = tuple(map(str, range(len(texts))))
    x = vocabulary.ids(texts)
    none = (x < FIRST_WORD).all(dim=1).tolist()
    return InferenceInputs(names, x, unknown=tuple(itertools.compress(names, none)))
