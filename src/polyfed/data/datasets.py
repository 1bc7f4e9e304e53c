"""Where samples come from: bundled digits, Parquet folders in the Hugging Face layout, its Hub, your files or arrays.

Every source gives both sides as they are stored (uint8 images) and the channel means and deviations for `Prepare`.
Files are found through `root`, else the environment variable POLYFED_DATA; nothing is downloaded, except for a name
that begins with "hub:". A request that names what a data set has no use for is refused.

Shapes: N samples, C channels (classes where so named), H x W pixels.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyfed.data import arrow_tables, client_arrays, images, package_datasets, tables
from polyfed.data.dataset import DatasetSource, check_used, from_tensors
from polyfed.data.files import CLIENT, client_folders
from polyfed.data.labeled_texts import encode_texts
from polyfed.data.options import OF_TABLES, SourceOptions, as_settings
from polyfed.data.samples import LabeledSamples
from polyfed.data.shelves import has_parquet, parquet_folders, shelf
from polyfed.data.text import OF_PAPER
from polyfed.errors import ConfigError, PolyfedError, kind_and_line
from polyfed.places import place_of
from polyfed.registry import CLIENTS, CSV, DATASETS, HUB, IMAGES, NPZ, RDATASETS, import_object, is_own, suggest

__all__ = ["DatasetSource", "digits", "from_tensors", "load_dataset", "parquet", "sentiment140"]

Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation per channel, of the training side in 0..1

_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))  # the values usually quoted, also by FedIN's code
_CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))  # FedGH's code; FedHeNN's are these to 3 digits
_CINIC10 = ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587))  # Darlow et al. 2018, also FedIN's code
_FASHION_MNIST = ((0.2860,), (0.3530,))  # the values usually quoted
_SVHN = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # no statistics: FedIN's code maps the pixels to -1..1, so we do

_FILES = ("label_column", "columns")
_TEXTS = ("text_column", "vocab_size", "max_length", "word_vectors", "tokens")
_TABLE = ("label_column", "columns", *OF_TABLES)


def load_dataset(name: str, root: str | Path | None = None, **settings: Any) -> DatasetSource:
    """Load a data set by name.

    Args:
        name: an entry of `polyfed.registry.DATASETS`; or any folder name for which ``<root>/<name>`` holds Parquet
            files; or ``hub:owner/name`` for a data set of the Hugging Face Hub, which is downloaded; or
            ``images:PATH``, a folder per class (`polyfed.data.images`); or ``csv:PATH``, a table or texts
            (`polyfed.data.tables`); or ``clients:PATH``, a folder per client, each of Parquet files, of CSV files or of
            images, with the further column "client"; or ``npz:PATH``, a file of arrays per client, likewise
            (`polyfed.data.client_arrays`); or ``rdatasets:PACKAGE/ITEM``, a table (`polyfed.data.package_datasets`).
            PATH is looked for below `root`; without one, below the present folder, then below $POLYFED_DATA. Or
            ``package.module:function``, a function of your own that is called without arguments and returns a
            `DatasetSource`, or its sides (`from_tensors`): a training side, or a dictionary of "train" and "test".
        root: the folder that holds the data sets' folders (for ``parquet``: the folder itself); default: $POLYFED_DATA.
        settings: how it is read, ``label_column="y"``: those keys of a recipe's ``[data]`` that say so; ``columns``,
            names of further columns of whole numbers or strings; and ``beside``, folders in which ``package.module`` is
            looked for where Python does not find it by itself.

    Raises:
        ConfigError: an unknown name (with the nearest), files that are missing or wrong, or a setting that does not
            exist or that the data set has no use for.
    """
    folder = None if root is None else str(root)
    return load_source(SourceOptions(dataset=str(name), root=folder, **as_settings(settings)))


def load_source(options: SourceOptions) -> DatasetSource:
    """`load_dataset` with all that it takes as one object."""
    source = _load_any(options.dataset, options.root, options)
    if options.task is not None and not source.is_regression:
        raise ConfigError(
            f"data.task 'regression': expected a table, csv:PATH or clients:PATH, or a data set of numbers to predict, "
            f"got '{source.name}', whose labels are classes"
        )
    return source


def _load_any(name: str, root: str | None, options: SourceOptions) -> DatasetSource:
    kind, _, path = name.partition(":")
    if name.startswith(RDATASETS):
        check_used(name, options, *_TABLE)
        return _with_columns(package_datasets.read_table(name, options), options)
    if name.startswith(HUB):
        fetched = functools.partial(arrow_tables.hub_folder, path, options.config, options.revision)
        return _from_parquet(name, lambda: [fetched()], options, "config", "revision")
    if f"{kind}:" in READERS:
        return READERS[f"{kind}:"](name, _located(path, root), options)
    if name in DATASETS:
        return _with_columns(DATASETS[name](root, options), options)
    if is_own(name):
        return _from_function(name, options)
    place = shelf(root)
    if place is not None and _plain(name) and has_parquet(place_of(place / name)):
        return _from_parquet(name, lambda: [place / name], options)
    looked = f"{place / name}" if place is not None and _plain(name) else "neither root nor POLYFED_DATA is set"
    found: list[str] = []
    if place is not None:
        with contextlib.suppress(OSError):  # only to suggest a name
            found = parquet_folders(place)
    raise ConfigError(f"unknown dataset '{name}'{suggest(name, {*DATASETS, *found})} (and no Parquet files: {looked})")


def documentation(name: str) -> dict[str, str]:
    """What a data set is: about (a line), and text (all else that is to be known)."""
    if name not in DATASETS:
        return {"about": f"Parquet files in {shelf(None)}/{name}", "text": ""}
    first, _, rest = inspect.cleandoc(DATASETS[name].__doc__ or "").partition("\n\n")
    text = rest.partition("Raises:")[0].replace("`", "").strip()
    return {"about": " ".join(first.replace("`", "").split()), "text": text}


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


def digits(root: object, options: SourceOptions) -> DatasetSource:
    """The 1797 handwritten digits that come with scikit-learn, (1, 8, 8), without a test side; needs no files.

    Their values 0..16 are stored times 15 (0..240), so ``x // 15`` gives them back exactly. `root` is not used.
    """
    check_used("digits", options, "columns")
    table = _handwritten()
    x = torch.from_numpy(table[:, :-1] * np.uint8(15)).reshape(-1, 1, 8, 8)
    train = LabeledSamples(x, torch.from_numpy(table[:, -1].astype(np.int64)))
    return DatasetSource("digits", train, None, tuple(str(c) for c in range(10)))


def _published(
    name: str,
    about: str,
    statistics: Statistics,
    *,
    inner: str = "",
    label: str | None = None,
) -> Callable[..., DatasetSource]:
    """A loader of a published set in Parquet files.

    Args:
        name: in recipes. about: the loader's documentation, shown by `polyfed datasets`. statistics: mean and std.
        inner: a folder in the data set's that is read where it is there.
        label: the label column where none is asked for.
    """

    def read(root: str | None, options: SourceOptions) -> DatasetSource:
        check_used(name, options, *_FILES, "image_column")
        place = _folder_of(name, root)
        place = place / inner if has_parquet(place / inner) else place
        sides = arrow_tables.parquet_sides([place])
        return _from_images(name, arrow_tables.read_images(sides, options, label), statistics)

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

    Its 20 coarse classes with label_column "coarse_label".
    """,
    _CIFAR100,
    label="fine_label",
)


cinic10 = _published(
    "cinic10",
    """CINIC-10 (Darlow et al. 2018) from ``<root>/cinic10/{train,validation,test}*.parquet``: 90 000 (3, 32, 32) each.

    Its validation split is not read; for a training side with it, call its files train-2.parquet or the like.
    """,
    _CINIC10,
)


fashion_mnist = _published(
    "fashion_mnist",
    "Fashion-MNIST (Zalando) from ``<root>/fashion_mnist/{train,test}*.parquet``: 60 000 + 10 000 of (1, 28, 28).",
    _FASHION_MNIST,
)


def sentiment140(root: str | None, options: SourceOptions) -> DatasetSource:
    """Sentiment140's tweets (Go et al. 2009) from ``<root>/sentiment140/{train,test}*.parquet``: classes 0 and 4.

    Its columns are text, date, user, sentiment and query; `text` and `sentiment` are read unless others are named.
    Texts are cut as FedRep cuts them, unless other tokens are asked for.
    """
    check_used("sentiment140", options, *_FILES, *_TEXTS)
    options = options.model_copy(
        update={"text_column": options.text_column or "text", "tokens": options.tokens or OF_PAPER}
    )
    sides = arrow_tables.parquet_sides([_folder_of("sentiment140", root)])
    return encode_texts("sentiment140", *arrow_tables.read_texts(sides, options, "sentiment"), options.words)


svhn = _published(
    "svhn",
    """SVHN (Netzer et al. 2011), cropped, from ``<root>/svhn/{train,test}*.parquet``: 73 257 + 26 032 of (3, 32, 32).

    The folder may be a copy of the Hub's, of which `cropped_digits` is read. Its 531 131 rows in extra*.parquet are not
    read.
    """,
    _SVHN,
    inner="cropped_digits",
)


def parquet(root: str | None, options: SourceOptions) -> DatasetSource:
    """Any images or texts in Parquet files; `root` (else $POLYFED_DATA) is the folder that holds them.

    They are texts where text_column is set. Sides: `polyfed.data.arrow_tables.parquet_sides`.
    """
    place = shelf(root)
    if place is None:
        raise ConfigError(
            "dataset 'parquet' needs root: the folder with train*.parquet; got neither it nor POLYFED_DATA"
        )
    return _from_parquet(place.resolve().name or "parquet", lambda: [place], options)


# one reader each, by what stands before a path -----------------------------------------------------------------------


def _own_images(name: str, folder: Path, options: SourceOptions) -> DatasetSource:
    check_used(name, options)
    return _from_images(name, images.read_folders([folder], options.image_size))


def _own_csv(name: str, place: Path, options: SourceOptions) -> DatasetSource:
    return _from_csv(name, place, [place], options)


def _own_clients(name: str, place: Path, options: SourceOptions) -> DatasetSource:
    kind, homes = client_folders(place)
    options = _without_client(options)
    if kind == "csv":
        return _from_csv(name, place, homes, options, of_clients=True)
    if kind == "parquet":
        return _from_parquet(name, lambda: homes, options, of_clients=True)
    check_used(name, options)
    return _from_images(name, images.read_folders(homes, options.image_size, of_clients=True))


def _own_arrays(name: str, place: Path, options: SourceOptions) -> DatasetSource:
    check_used(name, _without_client(options))
    return _from_images(name, client_arrays.read(place))


READERS: dict[str, Callable[[str, Path, SourceOptions], DatasetSource]] = {
    IMAGES: _own_images,
    CSV: _own_csv,
    CLIENTS: _own_clients,
    NPZ: _own_arrays,
}


def _from_csv(
    name: str, place: Path, homes: Sequence[Path], options: SourceOptions, of_clients: bool = False
) -> DatasetSource:
    """A table, or texts where their column is named."""
    is_text = options.text_column is not None
    check_used(name, options, *((*_FILES, *_TEXTS) if is_text else _TABLE))
    sides = tables.read_sides(homes, of_clients)
    if of_clients:
        options = options.model_copy(update={"columns": [*options.columns, CLIENT]})
    if is_text:
        return encode_texts(name, *tables.read_texts(sides, place, options), options.words)
    return tables.encode(name, sides, place, options)


def _from_parquet(
    name: str, homes: Callable[[], Sequence[Path]], options: SourceOptions, *more: str, of_clients: bool = False
) -> DatasetSource:
    """Texts where their column is named, else images.

    Args:
        homes: the folders of the files, asked for once the settings are known to fit.
        more: settings that may be given besides those of files.
    """
    is_text = options.text_column is not None
    check_used(name, options, *_FILES, *(_TEXTS if is_text else ("image_column",)), *more)
    sides = arrow_tables.parquet_sides(homes(), of_clients)
    if is_text:
        return encode_texts(name, *arrow_tables.read_texts(sides, options), options.words)
    return _from_images(name, arrow_tables.read_images(sides, options))


def _from_images(name: str, read: images.LabeledImages, published: Statistics | None = None) -> DatasetSource:
    """A source from decoded images, or arrays; `published` are mean and std where they are known."""
    more: dict[str, Any] = dict(zip(("mean", "std"), published or (), strict=False))
    return DatasetSource.of(name, read.sides, read.class_names, read.columns, label_column=read.label_column, **more)


def _from_function(name: str, options: SourceOptions) -> DatasetSource:
    """What a function of the user's returns: a source, a training side, or a dictionary of both sides."""
    check_used(name, options, "columns")
    try:
        function = import_object("data set", name, options.beside)
    except ConfigError as error:
        raise ConfigError(f"{error}; before a path: {_joined(READERS)}") from error.__cause__
    if not callable(function):
        raise ConfigError(f"data set '{name}' should be a function without arguments, got a {type(function).__name__}")
    try:
        made = function()
    except PolyfedError:
        raise
    except Exception as error:  # the function is the user's
        raise ConfigError(f"data set '{name}' failed: {kind_and_line(error)}") from error
    if not isinstance(made, DatasetSource):
        sides = made if isinstance(made, Mapping) else {"train": made}
        if "train" not in sides or set(sides) - {"train", "test"}:
            raise ConfigError(
                f"expected a dictionary of 'train' and 'test' from '{name}', got {sorted(map(str, sides))}"
            )
        if hasattr(sides["train"], "iloc"):
            raise ConfigError(
                f"expected a data set from '{name}', got a frame: return polyfed.from_frame(frame, 'label')"
            )
        made = from_tensors(sides["train"], sides.get("test"), name=name)
    return _with_columns(made, options)


def _with_columns(source: DatasetSource, options: SourceOptions) -> DatasetSource:
    for column in options.columns:
        if column not in source.train_columns:
            known = suggest(column, source.train_columns) if source.train_columns else "; it has no further columns"
            raise ConfigError(f"dataset '{source.name}' has no column '{column}'{known}")
    return source


def _without_client(options: SourceOptions) -> SourceOptions:
    """The options without the further column that says whose rows are, which is not looked for in files."""
    return options.model_copy(update={"columns": [column for column in options.columns if column != CLIENT]})


def _joined(names: Iterable[str]) -> str:
    """'a', 'b' or 'c'."""
    *most, last = (f"'{name}'" for name in names)
    return f"{', '.join(most)} or {last}"


# places --------------------------------------------------------------------------------------------------------------


def _located(path: str, root: str | Path | None) -> Path:
    """The file or folder of a name with PATH; where it should be, if it is nowhere."""
    if not path:
        raise ConfigError(f"expected a path behind {_joined(READERS)}, got none")
    shelves = [Path(root)] if root not in (None, "") else [Path(), shelf(None) or Path()]
    found = [place_of(place_of(shelf) / place_of(path)) for shelf in shelves]
    return next((place for place in found if place.exists()), found[0])


def _plain(name: str) -> bool:
    """Whether `name` stays below the folder it is appended to."""
    parts = Path(name).parts
    return bool(parts) and not Path(name).is_absolute() and ".." not in parts


def _folder_of(name: str, root: str | Path | None) -> Path:
    """``<root>/<name>``, which must hold Parquet files."""
    place = shelf(root)
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
