"""Where samples come from: bundled digits, Parquet folders in the Hugging Face layout, its Hub, or your own arrays.

Every source gives both sides as they are stored (uint8 images) and the channel means and deviations for `Prepare`.
Files are found through `root`, else the environment variable POLYFED_DATA; nothing is downloaded, except for a name
that begins with "hub:".

Shapes: N samples, C channels (classes where so named), H x W pixels.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.data import hub, images
from polyfed.data.samples import Samples
from polyfed.errors import RequestError
from polyfed.registry import DATASETS, nearest

# mean and deviation per channel, of the training side in 0..1
_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))  # the values usually quoted, also by FedIN's code
_CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))  # FedGH's code; FedHeNN's are these to 3 digits
_CINIC10 = ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587))  # Darlow et al. 2018, also FedIN's code
_FASHION_MNIST = ((0.2860,), (0.3530,))  # the values usually quoted
_SVHN = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # no statistics: FedIN's code maps the pixels to -1..1, so we do

_TRAIN = ("train",)
_HUB = "hub:"


@dataclass(frozen=True)
class Source:
    """A labelled data set before it is dealt to clients.

    Args:
        name: what it is called in recipes and results.
        train: the training side, at least one sample.
        test: the official test side, or None.
        classes: how many classes there are; labels lie in 0..classes-1.
        class_names: one name per class.
        mean: per channel in 0..1, for `Prepare`; empty for inputs without channels.
        std: likewise.
        train_columns: further values of the training rows by column, each (N,) int64 or strings: a user, a writer.
        test_columns: likewise of the test rows.

    Raises:
        RequestError: an empty side, a label out of range, sides of different shapes or types, or numbers of names,
            channels or values that do not fit.
    """

    name: str
    train: Samples
    test: Samples | None
    classes: int
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    test_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.classes < 1 or len(self.class_names) != self.classes:
            raise RequestError(
                f"expected one name for each of the classes of '{self.name}', came {len(self.class_names)} names for "
                f"{self.classes} classes"
            )
        for side, samples in self.sides():
            if len(samples) == 0:
                raise RequestError(f"expected at least one {side} sample in '{self.name}', came none")
            low, high = int(samples.y.min()), int(samples.y.max())
            if low < 0 or high >= self.classes:
                raise RequestError(
                    f"expected {side} labels in 0..{self.classes - 1} in '{self.name}', came {low if low < 0 else high}"
                )
            if samples.x.shape[1:] != self.train.x.shape[1:] or samples.x.dtype != self.train.x.dtype:
                raise RequestError(
                    f"expected test inputs like the training inputs of '{self.name}' "
                    f"({tuple(self.train.x.shape[1:])}, {self.train.x.dtype}), came {tuple(samples.x.shape[1:])}, "
                    f"{samples.x.dtype}"
                )
        channels = int(self.train.x.shape[1]) if self.train.x.dim() == 4 else 0
        if len(self.mean) != channels or len(self.std) != channels:
            raise RequestError(
                f"expected a mean and a std for each of the {channels} channels of '{self.name}', came "
                f"{len(self.mean)} and {len(self.std)}"
            )
        for what, rows, columns in (
            ("training", len(self.train), self.train_columns),
            ("test", 0 if self.test is None else len(self.test), self.test_columns),
        ):
            for column, values in columns.items():
                if values.shape != (rows,):
                    raise RequestError(
                        f"expected {rows} {what} values in column '{column}' of '{self.name}', came {values.shape}"
                    )

    def sides(self) -> list[tuple[str, Samples]]:
        """The sides there are, with their names."""
        return [("training", self.train), *([("test", self.test)] if self.test is not None else [])]

    def first(self, train: int | None, test: int | None) -> Source:
        """The first so many rows of each side (all of them for None)."""
        return replace(
            self,
            train=self.train.first(train),
            test=None if self.test is None else self.test.first(test),
            train_columns={name: values[:train] for name, values in self.train_columns.items()},
            test_columns={name: values[:test] for name, values in self.test_columns.items()},
        )


def load(
    name: str,
    root: str | Path | None = None,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    train_splits: Sequence[str] = _TRAIN,
    columns: Sequence[str] = (),
    subset: str | None = None,
    revision: str | None = None,
) -> Source:
    """Load a data set by name.

    Args:
        name: an entry of `polyfed.registry.DATASETS`; or any folder name for which ``<root>/<name>`` holds Parquet
            files; or ``hub:owner/name`` for a data set of the Hugging Face Hub, which is downloaded.
        root: the folder that holds the data sets' folders (for ``parquet``: the folder itself); default: $POLYFED_DATA.
        image_column: the column with images, when it cannot be told.
        label_column: the column with labels, when it cannot be told or is not the usual one.
        train_splits: what is stored as which split makes the training side: ``("train", "validation")``.
        columns: further columns of whole numbers or strings, for `Source.train_columns` and `test_columns`.
        subset: which configuration, of a Hub data set with several.
        revision: branch, tag or commit on the Hub; default: the newest.

    Raises:
        RequestError: an unknown name (with the nearest), files that are missing or wrong, or an option that the data
            set does not take.
    """
    name = str(name)
    if name.startswith(_HUB):
        repository = name.removeprefix(_HUB)
        read = hub.read(repository, subset, revision, image_column, label_column, train_splits, columns)
        return _from_images(name, read)
    if subset is not None or revision is not None:
        raise RequestError(f"expected subset and revision with a name 'hub:owner/name' only, came '{name}'")
    if name in DATASETS:
        return _registered(name, root, image_column, label_column, tuple(train_splits), tuple(columns))
    place = _place(root)
    if place is not None and _plain(name) and images.has_parquet(place / name):
        read = images.read_folder(place / name, image_column, label_column, train_splits, columns)
        return _from_images(name, read)
    looked = f"{place / name}" if place is not None and _plain(name) else "neither root nor POLYFED_DATA is set"
    kept: list[str] = []
    with contextlib.suppress(OSError):  # only to suggest a name
        kept = [folder.name for folder in place.iterdir() if images.has_parquet(folder)] if place is not None else []
    raise RequestError(f"unknown dataset '{name}'{nearest(name, {*DATASETS, *kept})} (and no Parquet files: {looked})")


def _registered(
    name: str,
    root: str | Path | None,
    image_column: str | None,
    label_column: str | None,
    train_splits: tuple[str, ...],
    columns: tuple[str, ...],
) -> Source:
    """An entry of the registry; a loader of your own needs to take `root`, `image_column` and `label_column` only."""
    loader = DATASETS[name]
    takes = inspect.signature(loader).parameters
    more: dict[str, Any] = {}
    if train_splits != _TRAIN:
        if "train_splits" not in takes:
            raise RequestError(f"dataset '{name}' has no splits to choose from, came train_splits {list(train_splits)}")
        more["train_splits"] = train_splits
    if columns and "columns" in takes:
        more["columns"] = columns
    source: Source = loader(root, image_column, label_column, **more)
    for column in columns:
        if column not in source.train_columns:
            raise RequestError(f"dataset '{name}' has no column '{column}'{_hint(column, source)}")
    return source


def _hint(column: str, source: Source) -> str:
    return nearest(column, source.train_columns) if source.train_columns else "; it has no further columns"


def digits(root: str | Path | None = None, image_column: str | None = None, label_column: str | None = None) -> Source:
    """The 1797 handwritten digits that come with scikit-learn, (1, 8, 8), without a test side; needs no files.

    Their values 0..16 are stored times 15 (0..240), so ``x // 15`` gives them back exactly. `root` is not used.

    Raises:
        RequestError: a column is named; there are none.
    """
    from sklearn.datasets import load_digits

    if image_column is not None or label_column is not None:
        raise RequestError("expected no image_column or label_column with dataset 'digits', which has no Parquet files")
    bunch = load_digits()
    x = torch.from_numpy((bunch.images * 15).astype(np.uint8)).unsqueeze(1)
    train = Samples(x, torch.from_numpy(bunch.target.astype(np.int64)))
    return Source("digits", train, None, 10, tuple(str(c) for c in range(10)), *channel_statistics(x))


def _published(
    name: str,
    about: str,
    statistics: tuple[tuple[float, ...], tuple[float, ...]],
    *,
    folder: str | None = None,
    inner: str = "",
    label: str | None = None,
    instead: str | None = None,
) -> Callable[..., Source]:
    """A loader of a published set in Parquet files.

    Args:
        name: in recipes. about: the loader's documentation, shown by `polyfed datasets`. statistics: mean and std.
        folder: below root; default: `name`. inner: a folder in it that is read where it is there.
        label: the label column where none is asked for.
        instead: the data set to use for another label column; None: this one takes any.
    """

    def read(
        root: str | Path | None = None,
        image_column: str | None = None,
        label_column: str | None = None,
        train_splits: Sequence[str] = _TRAIN,
        columns: Sequence[str] = (),
    ) -> Source:
        if instead is not None and label_column not in (None, label):
            raise RequestError(
                f"expected label_column '{label}' or none with dataset '{name}', came '{label_column}'; use dataset "
                f"'{instead}'"
            )
        place = _folder_of(folder or name, root)
        place = place / inner if images.has_parquet(place / inner) else place
        found = images.read_folder(place, image_column, label_column or label, train_splits, columns)
        return _from_images(name, found, statistics)

    read.__name__, read.__doc__ = name.replace("-", "_"), about
    return read


cifar10 = _published(
    "cifar10",
    "CIFAR-10 (Krizhevsky 2009) from ``<root>/cifar10/{train,test}*.parquet``: 50 000 + 10 000 of (3, 32, 32).",
    _CIFAR10,
)
cifar100 = _published(
    "cifar100",
    """CIFAR-100's 100 fine classes from ``<root>/cifar100/{train,test}*.parquet``: 50 000 + 10 000 of (3, 32, 32).

    Its 20 coarse classes with label_column "coarse_label", or as `cifar100-coarse`.
    """,
    _CIFAR100,
    label="fine_label",
)
cifar100_coarse = _published(
    "cifar100-coarse",
    "CIFAR-100's 20 coarse classes from ``<root>/cifar100/{train,test}*.parquet``.",
    _CIFAR100,
    folder="cifar100",
    label="coarse_label",
    instead="cifar100",
)
cinic10 = _published(
    "cinic10",
    """CINIC-10 (Darlow et al. 2018) from ``<root>/cinic10/{train,validation,test}*.parquet``: 90 000 (3, 32, 32) each.

    Its validation split is not read unless train_splits is ["train", "validation"].
    """,
    _CINIC10,
)
fashion_mnist = _published(
    "fashion_mnist",
    "Fashion-MNIST (Zalando) from ``<root>/fashion_mnist/{train,test}*.parquet``: 60 000 + 10 000 of (1, 28, 28).",
    _FASHION_MNIST,
)
svhn = _published(
    "svhn",
    """SVHN (Netzer et al. 2011), cropped, from ``<root>/svhn/{train,test}*.parquet``: 73 257 + 26 032 of (3, 32, 32).

    The folder may be a copy of the Hub's, of which `cropped_digits` is read. Its 531 131 rows in extra*.parquet are not
    read unless train_splits is ["train", "extra"].
    """,
    _SVHN,
    inner="cropped_digits",
)


def parquet(
    root: str | Path | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    train_splits: Sequence[str] = _TRAIN,
    columns: Sequence[str] = (),
) -> Source:
    """Any image data set in Parquet files; `root` (else $POLYFED_DATA) is the folder that holds them.

    Which files are which side and how labels are numbered: `polyfed.data.images.read_folder`.
    """
    place = _place(root)
    if place is None:
        raise RequestError(
            "dataset 'parquet' needs root: the folder with train*.parquet; came neither it nor POLYFED_DATA"
        )
    read = images.read_folder(place, image_column, label_column, train_splits, columns)
    return _from_images(place.resolve().name or "parquet", read)


def from_tensors(
    train: tuple[Any, Any] | Samples,
    test: tuple[Any, Any] | Samples | None = None,
    classes: int | None = None,
    name: str = "tensors",
    train_columns: Mapping[str, Any] | None = None,
    test_columns: Mapping[str, Any] | None = None,
) -> Source:
    """A source from your own arrays or tensors.

    Args:
        train: (x, y). x: uint8 images (N, C, H, W), or floats of any shape (N, ...), which `Prepare` passes unchanged;
            y: (N,) of any whole-number type.
        test: likewise, or None.
        classes: how many; default: the largest label plus one.
        name: for messages and results.
        train_columns: further values of the training rows, (N,) whole numbers or strings by column, that a partition
            may deal by: ``{"user": [...]}``.
        test_columns: likewise of the test rows.

    Raises:
        RequestError: shapes or types that do not fit, NaN, an empty side, a label out of range.
    """
    sides = [_samples(train, "training", name), *([_samples(test, "test", name)] if test is not None else [])]
    if classes is None:
        classes = 1 + max(int(side.y.max()) for side in sides)
    x = sides[0].x
    if x.dtype == torch.uint8:
        mean, std = channel_statistics(x)
    else:
        mean, std = ((0.0,) * x.shape[1], (1.0,) * x.shape[1]) if x.dim() == 4 else ((), ())
    names = tuple(str(c) for c in range(classes))
    further = [
        {key: images.column_values(values, f"column '{key}' of '{name}'") for key, values in (given or {}).items()}
        for given in (train_columns, test_columns)
    ]
    return Source(name, sides[0], sides[1] if len(sides) > 1 else None, classes, names, mean, std, *further)


def channel_statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and (population) standard deviation of each channel of uint8 images (N, C, H, W), in 0..1.

    From exact counts of the 256 values. A channel that never varies gets 1, so that `Prepare` can divide by it.
    """
    mean, std = [], []
    values = np.arange(256) / 255
    for channel in range(x.shape[1]):
        share = np.zeros(256)
        for start in range(0, len(x), 10_000):  # bincount widens its input to 8 bytes a pixel
            share += np.bincount(x[start : start + 10_000, channel].numpy().ravel(), minlength=256)
        share /= share.sum()
        centre = float(share @ values)
        mean.append(centre)
        std.append(float(np.sqrt(share @ (values - centre) ** 2)) if np.count_nonzero(share) > 1 else 1.0)
    return tuple(mean), tuple(std)


def _place(root: str | Path | None) -> Path | None:
    """`root`, else $POLYFED_DATA, else None."""
    chosen = root if root not in (None, "") else os.environ.get("POLYFED_DATA")
    return Path(chosen).expanduser() if chosen else None


def _plain(name: str) -> bool:
    """Whether `name` stays below the folder it is appended to."""
    parts = Path(name).parts
    return bool(parts) and not Path(name).is_absolute() and ".." not in parts


def _folder_of(name: str, root: str | Path | None) -> Path:
    """``<root>/<name>``, which must hold Parquet files."""
    place = _place(root)
    wanted = f"'{name}/train*.parquet' and '{name}/test*.parquet'"
    if place is None:
        raise RequestError(
            f"dataset '{name}' needs the files {wanted}: expected root, or POLYFED_DATA, to be the folder that holds "
            f"them, came neither"
        )
    if not images.has_parquet(place / name):
        raise RequestError(
            f"dataset '{name}' needs the files {wanted} in {place}, came no Parquet files in {place / name}"
        )
    return place / name


def _from_images(
    name: str,
    read: images.LabelledImages,
    statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> Source:
    """A source from decoded images; `statistics` are mean and std where they are published."""
    mean, std = statistics or channel_statistics(read.train.x)
    classes, names = len(read.class_names), read.class_names
    return Source(name, read.train, read.test, classes, names, mean, std, read.train_columns, read.test_columns)


def _samples(side: Any, what: str, name: str) -> Samples:
    """One side of `from_tensors`, checked and in the library's types."""
    if isinstance(side, Samples):
        x, y = side.x, side.y
    else:
        try:
            given_x, given_y = side
        except (TypeError, ValueError):
            raise RequestError(f"expected (x, y) as the {what} side of '{name}', came {type(side).__name__}") from None
        x, y = _tensor(given_x, what, name), _tensor(given_y, what, name)
    if x.dim() < 2 or len(x) == 0:
        raise RequestError(f"expected {what} inputs of shape (N, ...) with N > 0 in '{name}', came {tuple(x.shape)}")
    if x.dtype == torch.uint8:
        if x.dim() != 4 or (x.shape[1] not in (1, 3) and x.shape[3] in (1, 3)):
            raise RequestError(
                f"expected uint8 {what} images of shape (N, channels, height, width) in '{name}', came "
                f"{tuple(x.shape)}; pass anything that is no image as floats"
            )
    elif x.is_floating_point():
        x = x.to(torch.float32)
    else:
        raise RequestError(f"expected uint8 or float {what} inputs in '{name}', came {x.dtype}")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise RequestError(f"expected whole-number {what} labels in '{name}', came {y.dtype}")
    return Samples(x, y.to(torch.int64))


def _tensor(value: Any, what: str, name: str) -> Tensor:
    """A tensor or array-like as a CPU tensor (shared with the array where that is safe)."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    try:
        array = np.ascontiguousarray(value)
        array = array.reshape(np.shape(value))  # ascontiguousarray makes 0-d into 1-d
        if array.dtype.kind in "iu" and array.dtype.itemsize > 1:
            array = array.astype(np.int64)
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"expected numbers in the {what} side of '{name}', came {type(value).__name__}: {images.first_line(error)}"
        ) from error
