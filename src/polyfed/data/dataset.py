"""A labeled data set before it is assigned to clients, and how one is made of arrays.

Shapes: N samples, C channels (classes where so named), H x W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.data.column_schema import column_values
from polyfed.data.partition import Generators, draw_rows
from polyfed.data.samples import (
    LabeledSamples,
    TableColumns,
    classes_up_to,
    fill_missing,
    samples_of,
)
from polyfed.data.text import Vocabulary
from polyfed.data.transforms import Prepare, convert_channels, resize
from polyfed.errors import ConfigError


@dataclass(frozen=True)
class DatasetSource:
    """A labeled data set before it is assigned to clients.

    Args:
        name: what it is called in recipes and results.
        train: the training side, at least one sample.
        test: the official test side, or None.
        class_names: one per class, of labels 0..classes-1; none where labels are numbers to predict (regression).
        mean: per channel in 0..1, for `Prepare`, by default of the training side; per feature of a table; empty for
            other inputs.
        std: likewise.
        train_columns: further values of the training rows by column, each (N,) int64 or strings: a user, a writer.
        test_columns: likewise of the test rows.
        words: of texts: how many ids there are, or the fixed vectors of all ids, (V, E) float32; None: no texts.
        feature_names: of a table, x (N, F): what its columns are called; empty for other inputs.
        vocabulary: of texts: how they became ids; None: other inputs, or not known.
        label_column: of files: where the labels stood; None: in no column.
        columns: of a table: which features are categories, and which may be missing.
        remarks: what is odd about it, for people.
        client_column: of `train_columns`, the one by which `polyfed.federate` deals where it is not asked otherwise.
        columns_differ: of a table, whether a client has only those columns in which its rows have values.

    Raises:
        ConfigError: an empty side, a label out of range, sides of different shapes or types, or numbers of names,
            channels or values that do not fit.
    """

    name: str
    train: LabeledSamples
    test: LabeledSamples | None
    class_names: tuple[str, ...]
    mean: tuple[float, ...] = None  # type: ignore[assignment]
    std: tuple[float, ...] = None  # type: ignore[assignment]
    train_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    test_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    words: int | Tensor | None = None
    feature_names: tuple[str, ...] = ()
    vocabulary: Vocabulary | None = None
    label_column: str | None = None
    columns: TableColumns = field(default_factory=TableColumns)
    remarks: tuple[str, ...] = ()
    client_column: str | None = None
    columns_differ: bool = False

    def __post_init__(self) -> None:
        if bool(self.class_names) == self.is_regression:
            raise ConfigError(f"expected classes with names in '{self.name}', or numbers to predict, got both or none")
        if self.mean is None:
            mean, std = statistics(self.train.x)
            object.__setattr__(self, "mean", mean)
            object.__setattr__(self, "std", std)
        for side, samples in self.splits():
            if len(samples) == 0:
                raise ConfigError(f"expected at least one {side} sample in '{self.name}', got none")
            self._check_labels(side, samples)
            if samples.x.shape[1:] != self.train.x.shape[1:] or samples.x.dtype != self.train.x.dtype:
                raise ConfigError(
                    f"expected test inputs like the training inputs of '{self.name}' "
                    f"({tuple(self.train.x.shape[1:])}, {self.train.x.dtype}), got {tuple(samples.x.shape[1:])}, "
                    f"{samples.x.dtype}"
                )
        channels = int(self.train.x.shape[1]) if self.train.x.dim() == 4 or self.feature_names else 0
        if len(self.mean) != channels or len(self.std) != channels:
            what = "features" if self.feature_names else "channels"
            raise ConfigError(
                f"expected a mean and a std for each of the {channels} {what} of '{self.name}', got "
                f"{len(self.mean)} and {len(self.std)}"
            )
        self._check_columns("training", len(self.train), self.train_columns)
        self._check_columns("test", 0 if self.test is None else len(self.test), self.test_columns)

    def _check_columns(self, side: str, rows: int, columns: Mapping[str, NDArray[Any]]) -> None:
        for column, values in columns.items():
            if values.shape != (rows,):
                raise ConfigError(
                    f"expected {rows} {side} values in column '{column}' of '{self.name}', got {values.shape}"
                )

    @classmethod
    def of(
        cls,
        name: str,
        sides: Mapping[str, LabeledSamples],
        class_names: tuple[str, ...],
        further: Mapping[str, Mapping[str, NDArray[Any]]] | None = None,
        **more: Any,
    ) -> DatasetSource:
        """A source of sides and their further columns by name: "train" and, if there is one, "test"."""
        columns: dict[str, Any] = {f"{side}_columns": values for side, values in (further or {}).items()}
        return cls(name, sides["train"], sides.get("test"), class_names, **columns, **more)

    @property
    def classes(self) -> int:
        """How many classes there are; 0: labels are numbers to predict."""
        return len(self.class_names)

    def _check_labels(self, side: str, samples: LabeledSamples) -> None:
        if samples.are_numbers != self.is_regression:
            raise ConfigError(
                f"expected labels of both sides of '{self.name}' to be classes, or numbers to predict, got both"
            )
        if not self.is_regression and samples.largest_label >= self.classes:
            raise ConfigError(
                f"expected {side} labels in 0..{self.classes - 1} in '{self.name}', got {samples.largest_label}"
            )

    def __repr__(self) -> str:
        sides = ", ".join(f"{what} {samples!r}" for what, samples in self.splits())
        what = "numbers to predict" if self.is_regression else f"{self.classes} classes"
        return f"Source({self.name}, {what}, {sides})"

    @property
    def is_regression(self) -> bool:
        """Whether labels are numbers to predict."""
        return self.train.are_numbers

    @property
    def prepare(self) -> Prepare:
        """From inputs as they are stored to what a network takes."""
        return Prepare(self.mean, self.std, table=bool(self.feature_names))

    def splits(self) -> list[tuple[str, LabeledSamples]]:
        """The sides there are, with their names."""
        sides = [("training", self.train)]
        if self.test is not None:
            sides.append(("test", self.test))
        return sides

    def limited(self, train: int | None, test: int | None, generators: Generators) -> DatasetSource:
        """At most this many rows of each side (None: all), drawn, classes in proportion; few are among more."""
        cut: dict[str, Any] = {}
        for name, samples, most in (("train", self.train, train), ("test", self.test, test)):
            if samples is not None and most is not None:
                labels = np.zeros(len(samples), dtype=np.int64) if self.is_regression else samples.y.numpy()
                rows = draw_rows(np.arange(len(samples)), labels, most, generators(f"limit {name}"))
                columns: Mapping[str, NDArray[Any]] = getattr(self, f"{name}_columns")
                cut[name] = samples.select(torch.from_numpy(rows))
                cut[f"{name}_columns"] = {column: values[rows] for column, values in columns.items()}
        return replace(self, **cut)


def with_declared(
    source: DatasetSource,
    class_names: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> DatasetSource:
    """A source with what has been settled in place of its own: all classes of a task, how inputs are normalized.

    Args:
        class_names: in order, with all of the source's own among them. mean, std: see `DatasetSource`. None: its own.
    """
    if mean is not None and std is not None:
        if len(mean) != len(source.mean):
            features = "; one for each feature that 'polyfed check' lists, of categories and what 'is missing' 0 and 1"
            raise ConfigError(
                f"data.mean: expected {len(source.mean)} numbers for the inputs of '{source.name}', got {len(mean)}"
                + (features if source.feature_names else "")
            )
        values = source.columns.means(mean)
        source = replace(
            source,
            mean=tuple(mean),
            std=tuple(std),
            train=fill_missing(source.train, source.columns, values),
            test=None if source.test is None else fill_missing(source.test, source.columns, values),
        )
    if class_names is not None and source.is_regression:
        raise ConfigError(f"data.class_names: expected none, as '{source.name}' has numbers to predict, no classes")
    if class_names is None or list(class_names) == list(source.class_names):
        return source
    place = {name: number for number, name in enumerate(class_names)}
    if foreign := [name for name in source.class_names if name not in place]:
        raise ConfigError(f"data.class_names: expected '{foreign[0]}' of '{source.name}' among them, which is missing")
    number = torch.tensor([place[name] for name in source.class_names])
    train = LabeledSamples(source.train.x, number[source.train.y])
    test = None if source.test is None else LabeledSamples(source.test.x, number[source.test.y])
    return replace(source, train=train, test=test, class_names=tuple(class_names))


_USUAL_PUBLIC = 5000  # rows; FedHeNN's number of alignment inputs


def from_tensors(
    train: Any,
    test: Any = None,
    classes: int | None = None,
    name: str = "tensors",
    train_columns: Mapping[str, Any] | None = None,
    test_columns: Mapping[str, Any] | None = None,
) -> DatasetSource:
    """A source from your own arrays, tensors or data sets.

    Args:
        train: (x, y), `LabeledSamples`, or a data set of PyTorch or of the package `datasets`
            (`polyfed.data.samples.from_dataset`). x: uint8 images (N, C, H, W), or floats of any shape (N, ...), which
            `Prepare` passes unchanged; y: (N,) of any whole-number type, or floats, numbers to predict (regression).
        test: likewise, or None.
        classes: how many; default: the largest label plus one. None where numbers are predicted.
        name: for messages and results.
        train_columns: further values of the training rows, (N,) whole numbers or strings by column, that a partition
            may deal by: ``{"user": [...]}``.
        test_columns: likewise of the test rows.

    Raises:
        ConfigError: shapes or types that do not fit, NaN, an empty side, a label out of range.
    """
    sides = [as_samples(train, "training", name)]
    if test is not None:
        sides.append(as_samples(test, "test", name))
    if sides[0].are_numbers:
        if classes is not None:
            raise ConfigError(
                f"expected no classes, as labels of '{name}' are floats, numbers to predict, got {classes}"
            )
        classes = 0
    elif classes is None:
        classes = classes_up_to(max(side.largest_label for side in sides), f"'{name}'")
    further = {
        side: {key: column_values(values, f"column '{key}' of '{name}'") for key, values in (given or {}).items()}
        for side, given in (("train", train_columns), ("test", test_columns))
    }
    named = dict(zip(("train", "test"), sides, strict=False))
    return DatasetSource.of(name, named, tuple(map(str, range(classes))), further)


def statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the channels of stored images; floats (N, C, H, W) are ready, others have no channels."""
    if x.dtype == torch.uint8:
        return channel_statistics(x)
    return ((0.0,) * x.shape[1], (1.0,) * x.shape[1]) if x.dim() == 4 else ((), ())


def channel_statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and (population) standard deviation of each channel of uint8 images (N, C, H, W), in 0..1.

    From exact counts of the 256 values. A channel that never varies gets 1, so that `Prepare` can divide by it.
    """
    mean = []
    std = []
    values = np.arange(256) / 255
    for channel in range(x.shape[1]):
        share = np.zeros(256)
        for start in range(0, len(x), 10_000):  # bincount widens its input to 8 bytes a pixel
            share += np.bincount(x[start : start + 10_000, channel].numpy().ravel(), minlength=256)
        share /= share.sum()
        center = float(share @ values)
        mean.append(center)
        std.append(float(np.sqrt(share @ (values - center) ** 2)) if np.count_nonzero(share) > 1 else 1.0)
    return tuple(mean), tuple(std)


def as_samples(side: Any, what: str, name: str) -> LabeledSamples:
    """One side of `from_tensors`, checked and in the library's types."""
    if side is None:
        raise ConfigError(f"expected a {what} side of '{name}', got None")
    samples = samples_of(side, f"{what} side of '{name}'")
    x = samples.x
    if x.dim() < 2 or len(x) == 0:
        raise ConfigError(f"expected {what} inputs of shape (N, ...) with N > 0 in '{name}', got {tuple(x.shape)}")
    if x.dtype != torch.uint8 and not x.is_floating_point():
        raise ConfigError(f"expected uint8 or float {what} inputs in '{name}', got {x.dtype}")
    if x.dtype == torch.uint8 and (x.dim() != 4 or (x.shape[1] not in (1, 3) and x.shape[3] in (1, 3))):
        raise ConfigError(
            f"expected uint8 {what} images of shape (N, channels, height, width) in '{name}', got {tuple(x.shape)}; "
            "pass anything that is no image as floats"
        )
    return samples


def public_inputs(
    other: DatasetSource, task: DatasetSource, rows: int | None, rng: np.random.Generator
) -> LabeledSamples:
    """Training inputs of `other` as images like the task's, in the order of their file.

    Args:
        other: whose inputs. Its labels mean other classes and are not handed out: all are 0.
        task: whose channels, height and width the images get, bilinear.
        rows: how many, drawn without replacement; None for 5000, or all where there are fewer.
        rng: of the draw.

    Returns:
        `LabeledSamples` of uint8 images (rows, C, H, W).

    Raises:
        ConfigError: either set has no uint8 images, or fewer rows than were asked for.
    """
    for source in (task, other):
        x = source.train.x
        if x.dtype != torch.uint8 or x.dim() != 4:
            raise ConfigError(
                f"data.public_dataset expects images stored as uint8, '{source.name}' has {tuple(x.shape[1:])} of "
                f"{x.dtype}"
            )
    count = min(_USUAL_PUBLIC, len(other.train)) if rows is None else rows
    if count > len(other.train):
        raise ConfigError(
            f"expected public_samples of at most the {len(other.train)} training rows of '{other.name}', got {count}"
        )
    drawn = np.sort(rng.choice(len(other.train), count, replace=False))
    channels, height, width = task.train.x.shape[1:]
    chosen = other.train.select(torch.from_numpy(drawn))
    return resize(LabeledSamples(convert_channels(chosen.x, channels), torch.zeros_like(chosen.y)), (height, width))
