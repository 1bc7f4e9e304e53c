"""Labeled samples: the one shape in which data reach a client.

Shapes: N samples; x is (N, C, H, W) for images, (N, ...) for anything else.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyfed.errors import ConfigError, described

LABEL_NAMES = ("label", "labels", "fine_label", "coarse_label", "target", "targets", "class", "y")  # the usual ones
_MOST_CLASSES = 10**6
_SHARE = 0.1  # the part of a GPU's free memory that a client's data may take
ONE_LABEL = "; an input has one label, multi-label data are not supported"  # behind what was got instead
SEVERAL = (list, tuple, set, frozenset, dict, np.ndarray)  # in the place of one label
_MISSING = ("", "na", "n/a", "nan", "?")  # how a missing value is spelt in a table, in lower case
_NO_LABEL = "rows without a label, often marked -1, have to be dropped first"


class Placed(NamedTuple):
    """Inputs and labels of samples where a network computes."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class TargetScale:
    """What numbers to predict were standardized with: stored = (value - mean) / std.

    Args:
        mean, std: in the unit of the values; by default values are stored as they are.
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and 0 < self.std < math.inf):
            raise ConfigError(f"expected a finite mean and a positive std of targets, got {self.mean} and {self.std}")

    def restored(self, stored: Tensor) -> Tensor:
        """The values, float64, in their own unit."""
        return stored.double() * self.std + self.mean


@dataclass(frozen=True)
class LabeledSamples:
    """Inputs as they are stored (uint8 images in 0..255, float32, or int64 ids of words) and their labels.

    Args:
        x: (N, ...) inputs; a model sees them only after `Prepare`.
        y: (N,) int64 class numbers, 0-based; or float32 numbers to predict (regression).
        scale: of numbers to predict, what they were standardized with.

    Raises:
        ConfigError: lengths differ, labels are neither int64 from 0 on nor finite float32, or a float input is not
            finite.
    """

    x: Tensor
    y: Tensor
    scale: TargetScale = field(default=TargetScale(), compare=False)
    _placed: dict[torch.device, Placed] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ConfigError(f"expected as many labels as inputs, got {len(self.y)} labels for {len(self.x)} inputs")
        if self.y.dtype not in (torch.int64, torch.float32) or self.y.dim() != 1:
            raise ConfigError(
                f"expected labels of shape (N,), int64 classes or float32 numbers to predict, got shape "
                f"{tuple(self.y.shape)} of type {self.y.dtype}"
            )
        wrong = ~torch.isfinite(self.y) if self.are_numbers else self.y < 0
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            expected = "finite numbers to predict" if self.are_numbers else "labels from 0 on"
            hint = "" if self.are_numbers else f"; {_NO_LABEL}"
            got = f"{self.y[row].item()} in row {row}{of_so_many(int(wrong.sum()))}"
            raise ConfigError(f"expected {expected}, got {got}{hint}")
        if self.x.is_floating_point() and not bool(torch.isfinite(self.x).all()):
            raise ConfigError("expected finite inputs, got NaN or infinite values")

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.x.shape[1:]))
        return f"Samples({len(self)} of {shape or 'a number'}, {str(self.x.dtype).removeprefix('torch.')})"

    @property
    def are_numbers(self) -> bool:
        """Whether labels are numbers to predict, no classes."""
        return self.y.is_floating_point()

    @property
    def largest_label(self) -> int:
        """The largest class number; of no samples none."""
        return int(self.y.max())

    def on_cpu(self) -> LabeledSamples:
        """The samples in main memory, wherever they lie."""
        return self if self.x.is_cpu and self.y.is_cpu else LabeledSamples(self.x.cpu(), self.y.cpu(), self.scale)

    def standardized(self, scale: TargetScale) -> LabeledSamples:
        """The samples with their numbers to predict standardized with `scale`."""
        values = self.scale.restored(self.y)
        return LabeledSamples(self.x, ((values - scale.mean) / scale.std).float(), scale)

    def at(self, device: torch.device) -> Placed:
        """The samples on a GPU, copied there once and kept; as they are where it lacks the memory for them."""
        if device.type != "cuda":
            return Placed(self.x, self.y)
        if device not in self._placed:
            free, _ = torch.cuda.mem_get_info(device)
            if self.x.nbytes + self.y.nbytes > _SHARE * free:
                return Placed(self.x, self.y)
            with torch.inference_mode(False):  # whatever the caller is in
                self._placed[device] = Placed(self.x.to(device), self.y.to(device))
        return self._placed[device]

    @functools.cached_property
    def checksum(self) -> str:
        """SHA-256 of inputs, labels and what these were standardized with, read once."""
        scale = f"{self.scale.mean:.9g} {self.scale.std:.9g}"  # the last digits depend on the machine
        hasher = hashlib.sha256(f"{self.x.dtype} {tuple(self.x.shape)} {self.y.dtype} {scale}".encode())
        for tensor in (self.x, self.y):
            hasher.update(tensor.contiguous().numpy().data)
        return hasher.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {"x": self.x, "y": self.y, "scale": self.scale, "_placed": {}}

    def counts(self) -> dict[str, int]:
        """How many samples there are of each class, by its number as JSON has it; only classes that occur.

        None where labels are numbers to predict.
        """
        if self.are_numbers:
            return {}
        labels, counts = self.y.unique(return_counts=True)
        return {str(label): count for label, count in zip(labels.tolist(), counts.tolist(), strict=True)}

    def select(self, rows: Tensor) -> LabeledSamples:
        """The samples at `rows` ((M,) int64), copied into tensors of their own."""
        return LabeledSamples(self.x[rows], self.y[rows], self.scale)

    @property
    def whole(self) -> LabeledSamples:
        """These samples, as of `SelectedSamples` those that some are selected from."""
        return self

    def chunks(self, size: int, device: torch.device) -> Iterator[Tensor]:
        """The inputs, at most `size` rows at a time, on the device if they have a place there."""
        yield from self.at(device).x.split(size)


@dataclass(frozen=True, eq=False)
class SelectedSamples:
    """Some rows of other samples, copied only while they are read, so that many selections share the memory of one.

    Args:
        whole: the samples. rows: (M,) int64, which of them.
    """

    whole: LabeledSamples
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def y(self) -> Tensor:
        """(M,) their labels."""
        return self.whole.y[self.rows]

    @property
    def scale(self) -> TargetScale:
        """See `LabeledSamples`."""
        return self.whole.scale

    def chunks(self, size: int, device: torch.device) -> Iterator[Tensor]:
        """See `LabeledSamples.chunks`."""
        x = self.whole.at(device).x
        for rows in self.rows.to(x.device).split(size):
            yield x[rows]


def checksum_of(parts: Iterable[LabeledSamples], names: Any) -> str:
    """SHA-256 of samples, in order, and of what they and their classes are called. names: as JSON has them."""
    return hashlib.sha256(json.dumps([names, [part.checksum for part in parts]]).encode()).hexdigest()


def samples_of(data: Any, what: str) -> LabeledSamples:
    """Convert `LabeledSamples`, a pair (x, y), a data set or None to `LabeledSamples`.

    Raises:
        ConfigError: the data or labels are of another kind. `what` names them in the message.
    """
    if isinstance(data, LabeledSamples):
        return data.on_cpu()
    if data is None:
        return LabeledSamples(torch.empty(0), torch.empty(0, dtype=torch.int64))
    try:
        if isinstance(data, tuple | list) and len(data) == 2:
            return _paired(*data)
        if isinstance(data, Tensor | np.ndarray):
            raise ConfigError(f"expected a pair (x, y) of inputs and labels, got {described(data)} alone")
        if isinstance(data, tuple) and all(isinstance(part, Tensor | np.ndarray) for part in data):
            raise ConfigError(f"expected a pair (x, y) of inputs and labels, got {len(data)} tensors")
        return from_dataset(data)
    except ConfigError as problem:
        raise ConfigError(f"{what}: {problem}") from None


def _paired(inputs: Any, labels: Any) -> LabeledSamples:
    x = _tensor(inputs, "inputs")
    y = _tensor(labels, "labels")
    if x.dim() == 0:
        raise ConfigError(f"expected inputs of shape (N, ...), got the single number {x.item()}")
    if y.dim() == 0:
        raise ConfigError(f"expected labels of shape (N,), got the single number {y.item()}")
    if y.is_complex():
        raise ConfigError(f"expected labels as whole numbers or floats, got complex ones, {y.dtype}")
    if y.dim() > 1:
        write = "y.squeeze(1)" if y.shape[1:] == (1,) else "y.argmax(1), if rows have a one for the class"
        raise ConfigError(f"expected labels of shape (N,), got {tuple(y.shape)}; write {write}{ONE_LABEL}")
    inputs = x.float() if x.is_floating_point() else x
    return LabeledSamples(inputs, y.float() if y.is_floating_point() else y.long()).on_cpu()


def _tensor(given: Any, what: str) -> Tensor:
    """Convert numbers to a tensor without a graph, which shares memory with an array that may be written into."""
    if isinstance(given, np.ndarray) and not given.flags.writeable:
        given = given.copy()
    try:
        return torch.as_tensor(given).detach()
    except Exception:  # a list of tensors, a table of pandas, or anything else, which may raise anything
        pass
    try:
        return torch.from_numpy(np.array(given))
    except (TypeError, ValueError, RuntimeError):
        hint = "; number the classes from 0" if what == "labels" else ""
        parts = list(given) if isinstance(given, list | tuple) else []
        if what == "labels" and any(isinstance(one, SEVERAL) for one in parts):
            hint = ONE_LABEL
        shapes = {tuple(one.shape) for one in parts if isinstance(one, np.ndarray | Tensor)}
        if len(shapes) > 1:
            hint = f"; all have to have one shape, these have {', '.join(map(str, sorted(shapes)[:3]))}"
        raise ConfigError(
            f"expected {what} as a tensor or an array of numbers, got {described(given)}, which cannot become one{hint}"
        ) from None


def from_dataset(dataset: Any) -> LabeledSamples:
    """All items of a data set in Python, read once: ``torch.utils.data.Dataset``, or one of the package `datasets`.

    Args:
        dataset: has a length; an item is a pair (input, label), or a dictionary of two entries, one of them with
            a usual name of a label. An input is a tensor, an array, numbers, or a Pillow image (gray or RGB), which
            becomes (C, H, W) uint8; all have one shape. Labels are whole numbers, or floats, numbers to predict.

    Returns:
        x of the items' type; floats become float32.

    Raises:
        ConfigError: no length or no items, items of another form, shapes or types that differ, a label that is missing
            or no number.
    """
    try:
        count = len(dataset) if hasattr(dataset, "__getitem__") and not isinstance(dataset, dict) else None
    except TypeError:  # a stream
        count = None
    if count is None:
        hint = "; give its .dataset" if hasattr(dataset, "dataset") else ""
        raise ConfigError(
            "expected (x, y), Samples, or a data set with a length and numbered items, got "
            f"{type(dataset).__name__}{hint}"
        )
    if not count:
        raise ConfigError(f"expected at least one item in a data set, got an empty {type(dataset).__name__}")
    items = [_pair(dataset[row], row) for row in range(count)]
    inputs = [_input(given, row) for row, (given, _) in enumerate(items)]
    for row, x in enumerate(inputs):
        if x.shape != inputs[0].shape or x.dtype != inputs[0].dtype:
            raise ConfigError(
                f"expected items of one shape and type, {tuple(inputs[0].shape)}, {inputs[0].dtype} as the first, got "
                f"{tuple(x.shape)}, {x.dtype} in item {row}"
            )
    arrays = (Tensor, np.generic, np.ndarray)
    return _paired(torch.stack(inputs), [y.tolist() if isinstance(y, arrays) else y for _, y in items])


def _pair(item: Any, row: int) -> tuple[Any, Any]:
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    if not isinstance(item, dict):
        raise ConfigError(f"expected (input, label) or a dictionary as item {row}, got {type(item).__name__}")
    names = [name for name in LABEL_NAMES if name in item]
    if len(item) != 2 or len(names) != 1:
        raise ConfigError(
            f"expected one input and one label (named {', '.join(LABEL_NAMES[:2])}, ...) in item {row}, got "
            f"{', '.join(map(str, item))}; keep two columns (select_columns) and rename them"
        )
    return next(value for name, value in item.items() if name != names[0]), item[names[0]]


def _input(given: Any, row: int) -> Tensor:
    """An input as a tensor; a Pillow image as (C, H, W) uint8."""
    picture = getattr(given, "mode", None) if hasattr(given, "getbands") else None
    if picture is not None:
        given = upright(given)
    if picture not in (None, "L", "RGB"):
        raise ConfigError(f"expected gray (L) or RGB images, got mode {picture} in item {row}")
    try:
        x = given.detach().cpu() if isinstance(given, Tensor) else torch.from_numpy(np.array(given))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"expected a tensor, an array or an image in item {row}, got {type(given).__name__}"
        ) from error
    return x if picture is None else x.reshape(*x.shape[:2], -1).permute(2, 0, 1)


def upright(image: Any) -> Any:
    """A Pillow image as its EXIF tag says that it is to be shown; a tag that cannot be read does not count."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # Pillow's readers raise nearly anything on foreign bytes
        return image


def target_scale(y: Tensor) -> TargetScale:
    """Mean and (population) standard deviation of numbers to predict; 1 where they do not vary.

    Args:
        y: (N,) floats, at least one.

    >>> target_scale(torch.tensor([1.0, 5.0]))
    TargetScale(mean=3.0, std=2.0)
    """
    values = y.double()
    std = float(values.std(correction=0))
    return TargetScale(float(values.mean()), std if std > 0 else 1.0)


def of_so_many(count: int) -> str:
    """How many rows are refused, to put behind the first of them."""
    return "" if count == 1 else f", the first of {count} such rows"


@dataclass(frozen=True)
class ClientData:
    """One client's own rows; validation and test may be empty.

    class_names: of its classes, where these are its own. columns: of its table, where clients have different ones.
    """

    train: LabeledSamples
    validation: LabeledSamples
    test: LabeledSamples
    class_names: tuple[str, ...] = ()
    columns: OwnColumns | None = None


def classes_up_to(largest: int, where: object) -> int:
    """How many classes there are where this is the largest label."""
    if largest >= _MOST_CLASSES:
        raise ConfigError(f"expected labels below {_MOST_CLASSES} in {where}, got {largest}")
    return 1 + largest


# tables --------------------------------------------------------------------------------------------------------------


def is_missing(cell: str) -> bool:
    """Whether a cell of a table holds no value: empty, NA, N/A, NaN, ?, in upper or lower case."""
    return cell.strip().lower() in _MISSING


def as_number(cell: str) -> float | None:
    """A cell's number; None where it holds none.

    >>> [as_number(cell) for cell in ("1.5", "2", "1,5", "1_0")]
    [1.5, 2.0, None, None]
    """
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def as_whole_numbers(cells: Sequence[str]) -> list[int] | None:
    """Whole numbers, also spelt 3.0; None where one cell is none."""
    values = [as_number(cell) for cell in cells]
    if all(value is not None and value.is_integer() and abs(value) < 2**53 for value in values):
        return [int(value) for value in values if value is not None]
    return None


@dataclass(frozen=True)
class TableColumns:
    """What the features of a table are.

    A category is stored as a whole number, 0 for a value that is missing or that the training side does not have. A
    number that may be missing has a column of its own at the end of the row, 1 where it is missing, else 0.

    Args:
        categories: per feature, the names of its categories, of which the i-th is stored as i + 1; () for a number.
        flags: (F1, F2): feature F2 says where feature F1 is missing.
        own_means: whether a client's missing values become the mean of its own training rows; else of all.
    """

    categories: tuple[tuple[str, ...], ...] = ()
    flags: tuple[tuple[int, int], ...] = ()
    own_means: bool = True

    @property
    def counts(self) -> tuple[int, ...]:
        """Per feature, how many numbers stand for categories; () where no feature has any."""
        if not any(self.categories):
            return ()
        return tuple(1 + len(names) if names else 0 for names in self.categories)

    def means(self, mean: Sequence[float]) -> list[float]:
        """The means (of all features) of those that may be missing: a network reads 0 for them."""
        return [float(mean[place]) for place, _ in self.flags]


@dataclass(frozen=True)
class OwnColumns:
    """Which of the federation's columns a client's rows have.

    Args:
        places: per feature of the client's rows, without those that say what is missing, its column's place among the
            federation's.
        widths: per column of the federation, how many categories it has; 0 for a number.
        names: of all features of the client's rows. table: what these are. features: their places in a row that has all
            columns. mean, std: by which they are standardized.
    """

    places: tuple[int, ...]
    widths: tuple[int, ...]
    names: tuple[str, ...]
    table: TableColumns
    features: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def own_means(x: Tensor, columns: TableColumns, mean: Sequence[float]) -> list[float]:
    """What stands for the missing values of a client, in the order of `columns.flags`.

    Args:
        x: (N, F) the client's training rows.
        mean: per feature, by which all clients' inputs are centered. It stands for a feature of which the client has
            no value at all, and a network then reads 0; or for all, see `TableColumns.own_means`.
    """
    if not columns.own_means:
        return columns.means(mean)
    values = []
    for place, flag in columns.flags:
        present = x[x[:, flag] == 0, place]
        values.append(float(present.double().mean()) if len(present) else float(mean[place]))
    return values


def stored_rows(x: Tensor, columns: TableColumns, fill: Sequence[float]) -> Tensor:
    """Rows of a table as a run stores them, of rows with NaN for what is missing.

    Args:
        x: (N, F - flags) floats, without the columns that say what is missing; categories by their numbers.
        fill: in the order of `columns.flags`, whose second features are the last ones, in order.
    """
    instead = [0.0 if names else math.nan for names in columns.categories] or [math.nan] * x.shape[1]
    for (place, _), value in zip(columns.flags, fill, strict=True):
        instead[place] = value
    is_missing = x.isnan()
    filled = torch.where(is_missing, torch.tensor(instead[: x.shape[1]], dtype=x.dtype, device=x.device), x)
    flags = is_missing[:, [place for place, _ in columns.flags]].to(x.dtype)
    return torch.cat([filled, flags], dim=1)


def fill_missing(samples: LabeledSamples, columns: TableColumns, values: Sequence[float]) -> LabeledSamples:
    """The samples with these values, in the order of `columns.flags`, where one is missing."""
    if not columns.flags:
        return samples
    x = samples.x.clone()
    for (place, flag), value in zip(columns.flags, values, strict=True):
        x[x[:, flag] == 1, place] = value
    return LabeledSamples(x, samples.y, samples.scale)
