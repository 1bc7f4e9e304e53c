"""Where samples come from: bundled digits, Parquet folders in the Hugging Face layout, its Hub, your files or arrays.

Every source gives both sides as they are stored (uint8 images) and the channel means and deviations for `Prepare`.
Files are found through `root`, else the environment variable POLYFED_DATA; nothing is downloaded, except for a name
that begins with "hub:".

Shapes: N samples, C channels (classes where so named), H x W pixels.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.data import client_arrays, client_folders, hub, images, picture_folders, tables, text_files
from polyfed.data.samples import Samples, classes_up_to, from_dataset
from polyfed.data.text import LabelledTexts, Vocabulary, Words, labelled
from polyfed.data.transforms import Prepare
from polyfed.errors import PolyfedError, RequestError
from polyfed.registry import DATASETS, imported, nearest

# mean and deviation per channel, of the training side in 0..1
_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))  # the values usually quoted, also by FedIN's code
_CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))  # FedGH's code; FedHeNN's are these to 3 digits
_CINIC10 = ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587))  # Darlow et al. 2018, also FedIN's code
_FASHION_MNIST = ((0.2860,), (0.3530,))  # the values usually quoted
_SVHN = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # no statistics: FedIN's code maps the pixels to -1..1, so we do

_TRAIN = ("train",)
_HUB, _IMAGES, _CSV, _CLIENTS, _ARRAYS = "hub:", "images:", "csv:", "clients:", "npz:"
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Source:
    """A labelled data set before it is dealt to clients.

    Args:
        name: what it is called in recipes and results.
        train: the training side, at least one sample.
        test: the official test side, or None.
        classes: how many classes there are; labels lie in 0..classes-1.
        class_names: one name per class.
        mean: per channel in 0..1, for `Prepare`; per feature of a table; empty for other inputs.
        std: likewise.
        train_columns: further values of the training rows by column, each (N,) int64 or strings: a user, a writer.
        test_columns: likewise of the test rows.
        words: of texts: how many ids there are, or the fixed vectors of all ids, (V, E) float32; None: no texts.
        feature_names: of a table, x (N, F): what its columns are called; empty for other inputs.
        vocabulary: of texts: how they became ids; None: other inputs, or not known.

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
    words: int | Tensor | None = None
    feature_names: tuple[str, ...] = ()
    vocabulary: Vocabulary | None = None

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
        channels = int(self.train.x.shape[1]) if self.train.x.dim() == 4 or self.feature_names else 0
        if len(self.mean) != channels or len(self.std) != channels:
            what = "features" if self.feature_names else "channels"
            raise RequestError(
                f"expected a mean and a std for each of the {channels} {what} of '{self.name}', came "
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

    @property
    def prepare(self) -> Prepare:
        """From inputs as they are stored to what a network takes."""
        return Prepare(self.mean, self.std, table=bool(self.feature_names))

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
    words: Words | None = None,
    feature_columns: Sequence[str] | None = None,
    image_size: int | None = None,
) -> Source:
    """Load a data set by name.

    Args:
        name: an entry of `polyfed.registry.DATASETS`; or any folder name for which ``<root>/<name>`` holds Parquet
            files; or ``hub:owner/name`` for a data set of the Hugging Face Hub, which is downloaded; or
            ``images:PATH``, a folder per class (`polyfed.data.picture_folders.read`); or ``csv:PATH``, a table
            (`polyfed.data.tables.read`) or texts; or ``clients:PATH``, a folder per client, each of Parquet files, of
            CSV files or of images, with the further column "client" (`polyfed.data.client_folders`); or ``npz:PATH``,
            a file of arrays per client, likewise (`polyfed.data.client_arrays`). PATH is looked for below `root`;
            without one, below the present folder, then below $POLYFED_DATA. Or ``package.module:function``, a function
            of your own that is called without arguments and returns a `Source`, or its sides (`from_tensors`): a
            training side alone, or a dictionary of "train" and "test".
        root: the folder that holds the data sets' folders (for ``parquet``: the folder itself); default: $POLYFED_DATA.
        image_column: the column with images, when it cannot be told.
        label_column: the column with labels, when it cannot be told or is not the usual one.
        train_splits: what is stored as which split makes the training side: ``("train", "validation")``.
        columns: further columns of whole numbers or strings, for `Source.train_columns` and `test_columns`.
        subset: which configuration, of a Hub data set with several.
        revision: branch, tag or commit on the Hub; default: the newest.
        words: how texts are read; with a column, Parquet files, CSV files and data sets of the Hub hold texts.
        feature_columns: of a table, which columns to learn from; default: all that hold numbers.
        image_size: of image folders, pixels a side; needed where images differ in size. Others are not resized here.

    Raises:
        RequestError: an unknown name (with the nearest), files that are missing or wrong, or an option that the data
            set does not take.
    """
    name, words = str(name), words or Words()
    if not name.startswith((_CSV, _CLIENTS)):
        _refuse(name, feature_columns=feature_columns)
    if name.startswith(_HUB):
        repository = name.removeprefix(_HUB)
        if _are_texts(name, words, image_column):
            texts = hub.read_texts(repository, words, subset, revision, label_column, train_splits, columns)
            return _from_texts(name, texts, words)
        read = hub.read(repository, subset, revision, image_column, label_column, train_splits, columns)
        return _from_images(name, read)
    if subset is not None or revision is not None:
        raise RequestError(f"expected subset and revision with a name 'hub:owner/name' only, came '{name}'")
    asked = _Asked(image_column, label_column, feature_columns, train_splits, tuple(columns), words, image_size)
    kind, _, path = name.partition(":")
    if f"{kind}:" in _READERS:
        return _READERS[f"{kind}:"](name, _located(path, root), asked)
    if name not in DATASETS and _FUNCTION.fullmatch(name):
        return _from_function(name, asked)
    if name in DATASETS:
        return _registered(name, root, image_column, label_column, tuple(train_splits), tuple(columns), words)
    place = _place(root)
    if place is not None and _plain(name) and images.has_parquet(place / name):
        return _from_folder(name, place / name, image_column, label_column, train_splits, columns, words)
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
    words: Words,
) -> Source:
    """An entry of the registry; a loader of your own needs to take `root`, `image_column` and `label_column` only."""
    loader = DATASETS[name]
    takes = inspect.signature(loader).parameters
    more: dict[str, Any] = {}
    if train_splits != _TRAIN:
        if "train_splits" not in takes:
            _refuse_splits(name, train_splits)
        more["train_splits"] = train_splits
    if columns and "columns" in takes:
        more["columns"] = columns
    if "words" in takes:
        more["words"] = words
    else:
        _refuse_words(name, words)
    return _with_columns(loader(root, image_column, label_column, **more), name, columns)


def _with_columns(source: Source, name: str, columns: Sequence[str]) -> Source:
    """The source, if it has the columns that are asked for."""
    for column in columns:
        if column not in source.train_columns:
            known = nearest(column, source.train_columns) if source.train_columns else "; it has no further columns"
            raise RequestError(f"dataset '{name}' has no column '{column}'{known}")
    return source


def _are_texts(name: str, words: Words, image_column: str | None) -> bool:
    """Whether a column of texts is named; other settings of texts, or of images, do not go with that."""
    if words.column is None:
        _refuse_words(name, words)
    elif image_column is not None:
        raise RequestError(f"expected image_column or text_column with dataset '{name}', came both")
    return words.column is not None


def _refuse_words(name: str, words: Words) -> None:
    """Settings of texts where there are none."""
    if given := words.given():
        more = "" if given == "text_column" else "; text_column names the column of texts"
        raise RequestError(
            f"expected {given} with texts in Parquet or CSV files, or of the Hub, came dataset '{name}'{more}"
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


def sentiment140(
    root: str | Path | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    train_splits: Sequence[str] = _TRAIN,
    columns: Sequence[str] = (),
    words: Words | None = None,
) -> Source:
    """Sentiment140's tweets (Go et al. 2009) from ``<root>/sentiment140/{train,test}*.parquet``: classes 0 and 4.

    Its columns are text, date, user, sentiment and query; `text` and `sentiment` are read unless others are named.
    """
    if image_column is not None:
        raise RequestError("expected no image_column with dataset 'sentiment140', whose column of texts is text_column")
    how = words or Words()
    how = replace(how, column=how.column or "text")
    place = _folder_of("sentiment140", root)
    read = text_files.read_parquet(place, how.column, label_column or "sentiment", train_splits, columns)
    return _from_texts("sentiment140", labelled(*read, how), how)


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
    words: Words | None = None,
) -> Source:
    """Any images or texts in Parquet files; `root` (else $POLYFED_DATA) is the folder that holds them.

    They are texts where text_column is set. Sides and numbers of labels: `polyfed.data.images.read_folder`.
    """
    place = _place(root)
    if place is None:
        raise RequestError(
            "dataset 'parquet' needs root: the folder with train*.parquet; came neither it nor POLYFED_DATA"
        )
    name = place.resolve().name or "parquet"
    return _from_folder(name, place, image_column, label_column, train_splits, columns, words or Words())


def from_tensors(
    train: Any,
    test: Any = None,
    classes: int | None = None,
    name: str = "tensors",
    train_columns: Mapping[str, Any] | None = None,
    test_columns: Mapping[str, Any] | None = None,
) -> Source:
    """A source from your own arrays, tensors or data sets.

    Args:
        train: (x, y), `Samples`, or a data set of PyTorch or of the package `datasets`
            (`polyfed.data.samples.from_dataset`). x: uint8 images (N, C, H, W), or floats of any shape (N, ...), which
            `Prepare` passes unchanged; y: (N,) of any whole-number type.
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
        classes = classes_up_to(max(int(side.y.max()) for side in sides), f"'{name}'")
    mean, std = _statistics(sides[0].x)
    names = tuple(str(c) for c in range(classes))
    further = [
        {key: images.column_values(values, f"column '{key}' of '{name}'") for key, values in (given or {}).items()}
        for given in (train_columns, test_columns)
    ]
    test_side = sides[1] if len(sides) > 1 else None
    return Source(name, sides[0], test_side, classes, names, mean, std, further[0], further[1])


def _statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the channels of stored images; floats (N, C, H, W) are ready, others have no channels."""
    if x.dtype == torch.uint8:
        return channel_statistics(x)
    return ((0.0,) * x.shape[1], (1.0,) * x.shape[1]) if x.dim() == 4 else ((), ())


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


def _located(path: str, root: str | Path | None) -> Path:
    """The file or folder of a name with PATH; where it should be, if it is nowhere."""
    if not path:
        raise RequestError(f"expected a path behind {_listed(_READERS)}, came none")
    shelves = [Path(root)] if root not in (None, "") else [Path(), _place(None) or Path()]
    found = [shelf.expanduser() / Path(path).expanduser() for shelf in shelves]
    return next((place for place in found if place.exists()), found[0])


def _refuse(name: str, **options: object) -> None:
    """Options that a data set has no use for."""
    for option, value in options.items():
        if value is not None:
            raise RequestError(f"dataset '{name}' has no use for {option}, came '{value}'")


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


def _from_folder(
    name: str,
    folder: Path,
    image_column: str | None,
    label_column: str | None,
    train_splits: Sequence[str],
    columns: Sequence[str],
    words: Words,
) -> Source:
    """A source from a folder of Parquet files: texts where their column is named, else images."""
    if _are_texts(name, words, image_column):
        read = text_files.read_parquet(folder, words.column, label_column, train_splits, columns)
        return _from_texts(name, labelled(*read, words), words)
    return _from_images(name, images.read_folder(folder, image_column, label_column, train_splits, columns))


def _from_texts(name: str, read: LabelledTexts, how: Words) -> Source:
    """A source from numbered texts."""
    return Source(
        name,
        read.train,
        read.test,
        len(read.class_names),
        read.class_names,
        (),
        (),
        read.train_columns,
        read.test_columns,
        how.ids if read.vectors is None else read.vectors,
        vocabulary=read.vocabulary,
    )


@dataclass(frozen=True)
class _Asked:
    """What `load` was asked for of a user's own files."""

    image_column: str | None
    label_column: str | None
    feature_columns: Sequence[str] | None
    train_splits: Sequence[str]
    columns: tuple[str, ...]
    words: Words
    image_size: int | None


def _own_images(name: str, folder: Path, asked: _Asked) -> Source:
    _refuse_columns(name, asked)
    _refuse_words(name, asked.words)
    return _from_images(name, picture_folders.read(folder, asked.train_splits, asked.image_size))


def _own_table(name: str, place: Path, asked: _Asked) -> Source:
    if _are_texts(name, asked.words, asked.image_column):
        _refuse(f"{name} with text_column", feature_columns=asked.feature_columns)
        read = text_files.read_csv(place, asked.words.column, asked.label_column, asked.train_splits, asked.columns)
        return _from_texts(name, labelled(*read, asked.words), asked.words)
    _refuse(name, image_column=asked.image_column)
    return _from_table(name, _table(place, asked), place)


def _own_clients(name: str, place: Path, asked: _Asked) -> Source:
    """All clients' rows, with the further column that says whose they are."""
    kind, homes = client_folders.folders(place)
    asked = replace(asked, columns=tuple(column for column in asked.columns if column != client_folders.COLUMN))
    if kind != "images" and _are_texts(name, asked.words, asked.image_column):
        return _texts_of_clients(name, homes, kind, asked)
    _refuse_words(name, asked.words)
    if kind == "csv":
        _refuse(name, image_column=asked.image_column)
        read = {home: _table(home, asked) for home in homes}
        features = read[homes[0]].feature_names
        for home, table in read.items():
            if table.feature_names != features:
                raise RequestError(
                    f"expected the columns of client '{homes[0].name}' ({', '.join(features)}) of every client, came "
                    f"{', '.join(table.feature_names)} of '{home.name}'; name those to use in feature_columns"
                )
        joined = client_folders.read(homes, lambda home: read[home].sides)
        return _from_table(name, tables.LabelledTable(joined, features), place)
    if kind == "images":
        _refuse_columns(name, asked)
        return _from_images(
            name,
            client_folders.read(
                homes, lambda home: picture_folders.read(home, asked.train_splits, asked.image_size, whole=False)
            ),
        )
    _refuse(name, feature_columns=asked.feature_columns)
    options = (asked.image_column, asked.label_column, asked.train_splits, asked.columns)
    return _from_images(name, client_folders.read(homes, lambda home: images.read_folder(home, *options)))


def _texts_of_clients(name: str, homes: Sequence[Path], kind: str, asked: _Asked) -> Source:
    _refuse(f"{name} with text_column", feature_columns=asked.feature_columns)
    one = text_files.read_csv if kind == "csv" else text_files.read_parquet
    options = (asked.words.column, asked.label_column, asked.train_splits, asked.columns)
    sides, columns = client_folders.read_texts(homes, lambda home: one(home, *options))
    return _from_texts(name, labelled(sides, columns, asked.words), asked.words)


def _own_arrays(name: str, place: Path, asked: _Asked) -> Source:
    """All clients' arrays, with the further column that says whose they are."""
    others = tuple(column for column in asked.columns if column != client_folders.COLUMN)
    _refuse_columns(name, replace(asked, columns=others))
    _refuse_words(name, asked.words)
    _refuse_splits(name, asked.train_splits)
    read = client_arrays.read(place, _samples)
    return _from_images(name, read, _statistics(read.train.x))


_READERS = {_IMAGES: _own_images, _CSV: _own_table, _CLIENTS: _own_clients, _ARRAYS: _own_arrays}


def _from_function(name: str, asked: _Asked) -> Source:
    """What a function of the user's returns: a source, a training side, or a dictionary of both sides."""
    _refuse_columns(name, replace(asked, columns=()))
    _refuse_words(name, asked.words)
    _refuse_splits(name, asked.train_splits)
    try:
        function = imported("data set", name)
    except RequestError as error:
        raise RequestError(f"{error}; before a path: {_listed(_READERS)}") from error.__cause__
    if not callable(function):
        raise RequestError(
            f"data set '{name}' should be a function without arguments; a {type(function).__name__} came"
        )
    try:
        made = function()
    except PolyfedError:
        raise
    except Exception as error:  # the function is the user's
        raise RequestError(f"data set '{name}' failed: {type(error).__name__}: {images.first_line(error)}") from error
    if isinstance(made, Source):
        return _with_columns(made, name, asked.columns)
    sides = made if isinstance(made, Mapping) else {"train": made}
    if "train" not in sides or set(sides) - {"train", "test"}:
        raise RequestError(f"expected a dictionary of 'train' and 'test' from '{name}', came {sorted(map(str, sides))}")
    return _with_columns(from_tensors(sides["train"], sides.get("test"), name=name), name, asked.columns)


def _refuse_splits(name: str, train_splits: Sequence[str]) -> None:
    if list(train_splits) != list(_TRAIN):
        raise RequestError(f"dataset '{name}' has no splits to choose from, came train_splits {list(train_splits)}")


def _listed(names: Iterable[object]) -> str:
    """'a', 'b' or 'c'."""
    *most, last = (f"'{name}'" for name in names)
    return f"{', '.join(most)} or {last}" if most else last


def _refuse_columns(name: str, asked: _Asked) -> None:
    """Where there are none: folders of images, arrays."""
    columns = ", ".join(asked.columns) or None
    options = {"label_column": asked.label_column, "feature_columns": asked.feature_columns, "columns": columns}
    _refuse(name, image_column=asked.image_column, **options)


def _table(place: Path, asked: _Asked) -> tables.LabelledTable:
    return tables.read(place, asked.label_column, asked.feature_columns, asked.train_splits, asked.columns)


def _from_table(name: str, read: tables.LabelledTable, where: Path) -> Source:
    mean, std = tables.statistics(read, where)
    sides = read.sides
    return Source(
        name,
        Samples(sides.train.x.float(), sides.train.y),
        None if sides.test is None else Samples(sides.test.x.float(), sides.test.y),
        len(sides.class_names),
        sides.class_names,
        mean,
        std,
        sides.train_columns,
        sides.test_columns,
        feature_names=read.feature_names,
    )


def _samples(side: Any, what: str, name: str) -> Samples:
    """One side of `from_tensors`, checked and in the library's types."""
    if not isinstance(side, tuple | list) or len(side) != 2:
        side = side if isinstance(side, Samples) else from_dataset(side)
        x, y = side.x, side.y
    else:
        given_x, given_y = side
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
    if y.shape != (len(x),):
        raise RequestError(
            f"expected as many labels as {what} inputs in '{name}', {len(x)}, of shape (N,), came {tuple(y.shape)}"
        )
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        raise RequestError(f"expected finite {what} inputs in '{name}', came NaN or infinite values")
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
