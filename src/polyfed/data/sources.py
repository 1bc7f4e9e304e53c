"""Where samples come from: bundled digits, Parquet folders in the Hugging Face layout, or your own arrays.

Every source gives both sides as they are stored (uint8 images) and the channel means and deviations for `Prepare`.
Files are found through `root`, else the environment variable POLYFED_DATA; nothing is downloaded.

Shapes: N samples, C channels (classes where so named), H x W pixels.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.data import images
from polyfed.data.samples import Samples
from polyfed.errors import RequestError
from polyfed.registry import DATASETS, nearest

# per channel, of the training side in 0..1 (the values usually quoted for these sets)
_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_FASHION_MNIST = ((0.2860,), (0.3530,))


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

    Raises:
        RequestError: an empty side, a label out of range, sides of different shapes or types, or numbers of names or
            channels that do not fit.
    """

    name: str
    train: Samples
    test: Samples | None
    classes: int
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

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

    def sides(self) -> list[tuple[str, Samples]]:
        """The sides there are, with their names."""
        return [("training", self.train), *([("test", self.test)] if self.test is not None else [])]


def load(
    name: str, root: str | Path | None = None, *, image_column: str | None = None, label_column: str | None = None
) -> Source:
    """Load a data set by name.

    Args:
        name: an entry of `polyfed.registry.DATASETS`, or any folder name for which ``<root>/<name>`` holds Parquet
            files (``cifar100``).
        root: the folder that holds the data sets' folders (for ``parquet``: the folder itself); default: $POLYFED_DATA.
        image_column: the Parquet column with images, when it cannot be told.
        label_column: the Parquet column with labels, when it cannot be told (CIFAR-100 has fine and coarse ones).

    Raises:
        RequestError: an unknown name (with the nearest), or files that are missing or wrong.
    """
    if name in DATASETS:
        source: Source = DATASETS[name](root, image_column, label_column)
        return source
    place = _place(root)
    if place is not None and _plain(name) and images.has_parquet(place / name):
        return _from_folder(name, place / name, image_column, label_column)
    looked = f"{place / name}" if place is not None and _plain(name) else "neither root nor POLYFED_DATA is set"
    kept: list[str] = []
    with contextlib.suppress(OSError):  # only to suggest a name
        kept = [folder.name for folder in place.iterdir() if images.has_parquet(folder)] if place is not None else []
    raise RequestError(
        f"unknown dataset '{name}'{nearest(str(name), {*DATASETS, *kept})} (and no Parquet files: {looked})"
    )


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


def cifar10(root: str | Path | None = None, image_column: str | None = None, label_column: str | None = None) -> Source:
    """CIFAR-10 (Krizhevsky 2009) from ``<root>/cifar10/{train,test}*.parquet``: 50 000 + 10 000 of (3, 32, 32)."""
    return _from_folder("cifar10", _folder_of("cifar10", root), image_column, label_column, _CIFAR10)


def fashion_mnist(
    root: str | Path | None = None, image_column: str | None = None, label_column: str | None = None
) -> Source:
    """Fashion-MNIST (Zalando) from ``<root>/fashion_mnist/{train,test}*.parquet``: 60 000 + 10 000 of (1, 28, 28)."""
    return _from_folder("fashion_mnist", _folder_of("fashion_mnist", root), image_column, label_column, _FASHION_MNIST)


def parquet(root: str | Path | None = None, image_column: str | None = None, label_column: str | None = None) -> Source:
    """Any image data set in Parquet files; `root` (else $POLYFED_DATA) is the folder that holds them.

    Which files are which side and how labels are numbered: `polyfed.data.images.read_folder`.
    """
    place = _place(root)
    if place is None:
        raise RequestError(
            "dataset 'parquet' needs root: the folder with train*.parquet; came neither it nor POLYFED_DATA"
        )
    return _from_folder(place.resolve().name or "parquet", place, image_column, label_column)


def from_tensors(
    train: tuple[Any, Any] | Samples,
    test: tuple[Any, Any] | Samples | None = None,
    classes: int | None = None,
    name: str = "tensors",
) -> Source:
    """A source from your own arrays or tensors.

    Args:
        train: (x, y). x: uint8 images (N, C, H, W), or floats of any shape (N, ...), which `Prepare` passes unchanged;
            y: (N,) of any whole-number type.
        test: likewise, or None.
        classes: how many; default: the largest label plus one.
        name: for messages and results.

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
    return Source(name, sides[0], sides[1] if len(sides) > 1 else None, classes, names, mean, std)


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


def _from_folder(
    name: str,
    folder: Path,
    image_column: str | None,
    label_column: str | None,
    statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> Source:
    """A source from a Parquet folder; `statistics` are mean and std where they are published."""
    read = images.read_folder(folder, image_column, label_column)
    mean, std = statistics or channel_statistics(read.train.x)
    return Source(name, read.train, read.test, len(read.class_names), read.class_names, mean, std)


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
