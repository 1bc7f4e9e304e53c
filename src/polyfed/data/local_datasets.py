"""Data sets of one's own: Parquet, CSV and arrays, image folders, a folder or file per client, a function.

`polyfed.data.datasets.load_dataset` finds the reader by what stands before the path. Here is also what a request may
not ask of a data set that has no use for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from polyfed.data import image_folders, leaf_json, parquet_images, per_client_folders, pflib_npz, tabular, text_files
from polyfed.data.dataset import DatasetSource, as_samples, channel_statistics, from_tensors, statistics
from polyfed.data.options import TRAIN, SourceOptions
from polyfed.data.samples import LabeledSamples
from polyfed.data.table_columns import fill_missing
from polyfed.data.text import LabeledTexts, TextConfig, encode_dataset
from polyfed.errors import ConfigError, PolyfedError, gathered, kind_and_line
from polyfed.registry import import_object, suggest


def _own_images(name: str, folder: Path, options: SourceOptions) -> DatasetSource:
    _refuse_columns(name, options)
    reject_text_options(name, options.words)
    return from_images(name, image_folders.read(folder, options.train_splits, options.image_size))


def _own_table(name: str, place: Path, options: SourceOptions) -> DatasetSource:
    if is_text_dataset(name, options.words, options.image_column):
        reject_options(f"{name} with text_column", **options.of_tables)
        read = text_files.read_csv(
            place, options.words.column, options.label_column, options.train_splits, options.columns
        )
        return from_texts(name, encode_dataset(*read, options.words), options.words)
    reject_options(name, image_column=options.image_column)
    sheets = tabular.read_sheets(place, options.train_splits, options.cells)
    return encode_table(name, sheets, place, options)


def _own_clients(name: str, place: Path, options: SourceOptions) -> DatasetSource:
    """All clients' rows, with the further column that says whose they are."""
    kind, homes = per_client_folders.client_directories(place)
    options = replace(
        options, columns=tuple(column for column in options.columns if column != per_client_folders.COLUMN)
    )
    if kind != "images" and is_text_dataset(name, options.words, options.image_column):
        return _texts_of_clients(name, homes, kind, options)
    reject_text_options(name, options.words)
    if kind == "csv":
        reject_options(name, image_column=options.image_column)
        return _table_of_clients(name, place, homes, options)
    if kind == "images":
        _refuse_columns(name, options)
        return from_images(
            name,
            per_client_folders.read(
                homes, lambda home: image_folders.read(home, options.train_splits, options.image_size, whole=False)
            ),
        )
    reject_options(name, feature_columns=options.feature_columns)
    columns = (options.image_column, options.label_column, options.train_splits, options.columns)
    return from_images(name, per_client_folders.read(homes, lambda home: parquet_images.read_folder(home, *columns)))


def _table_of_clients(name: str, place: Path, homes: Sequence[Path], options: SourceOptions) -> DatasetSource:
    """One table of all clients' files."""
    read = gathered(partial(tabular.read_sheets, home, options.train_splits, options.cells) for home in homes)
    parts = {home.name: sheets for home, sheets in zip(homes, read, strict=True)}
    per_client_folders.check_sides({client: "test" in sheets for client, sheets in parts.items()})
    sides = {side: [sheet for sheets in read for sheet in sheets[side]] for side in read[0]}
    table = tabular.encode(sides, place, options)
    rows = {
        side: {client: sum(len(sheet.lines) for sheet in sheets[side]) for client, sheets in parts.items()}
        for side in sides
    }
    owners = {side: {per_client_folders.COLUMN: per_client_folders.owners(counts)} for side, counts in rows.items()}
    joined = replace(
        table.sides,
        train_columns={**table.sides.train_columns, **owners["train"]},
        test_columns={**table.sides.test_columns, **owners.get("test", {})},
    )
    return from_table(name, replace(table, sides=joined), place)


def _columns_of_files(options: SourceOptions) -> tuple[str, ...]:
    """The further columns that are looked for in files; whose rows they are, their place says."""
    return tuple(column for column in options.columns if column != per_client_folders.COLUMN)


def _texts_of_clients(name: str, homes: Sequence[Path], kind: str, options: SourceOptions) -> DatasetSource:
    reject_options(f"{name} with text_column", **options.of_tables)
    one = text_files.read_csv if kind == "csv" else text_files.read_parquet
    asked = (options.words.column, options.label_column, options.train_splits, options.columns)
    sides, columns = per_client_folders.read_texts(homes, lambda home: one(home, *asked))
    return from_texts(name, encode_dataset(sides, columns, options.words), options.words)


def _own_arrays(name: str, place: Path, options: SourceOptions) -> DatasetSource:
    """All clients' arrays, with the further column that says whose they are."""
    _refuse_columns(name, replace(options, columns=_columns_of_files(options)))
    reject_text_options(name, options.words)
    reject_splits(name, options.train_splits)
    read = pflib_npz.read(place, as_samples)
    return from_images(name, read, statistics(read.train.x))


def _own_leaf(name: str, place: Path, options: SourceOptions) -> DatasetSource:
    """The rows of LEAF's JSON files, with the further column that says whose they are."""
    _refuse_columns(name, replace(options, columns=tuple(c for c in options.columns if c != leaf_json.COLUMN)))
    reject_splits(name, options.train_splits)
    return leaf_json.read(name, place, options.words)


# what stands before a path -> function of (name, path, what was asked for)
READERS: dict[str, Callable[[str, Path, SourceOptions], DatasetSource]] = {
    "images:": _own_images,
    "csv:": _own_table,
    "clients:": _own_clients,
    "npz:": _own_arrays,
    "leaf:": _own_leaf,
}


# one reader each --------------------------------------------------------------------------------------------------


def from_function(name: str, options: SourceOptions) -> DatasetSource:
    """What a function of the user's returns: a source, a training side, or a dictionary of both sides."""
    _refuse_columns(name, replace(options, columns=()))
    reject_text_options(name, options.words)
    reject_splits(name, options.train_splits)
    try:
        function = import_object("data set", name, options.beside)
    except ConfigError as error:
        raise ConfigError(f"{error}; before a path: {join_names(READERS)}") from error.__cause__
    if not callable(function):
        raise ConfigError(f"data set '{name}' should be a function without arguments, got a {type(function).__name__}")
    try:
        made = function()
    except PolyfedError:
        raise
    except Exception as error:  # the function is the user's
        raise ConfigError(f"data set '{name}' failed: {kind_and_line(error)}") from error
    if isinstance(made, DatasetSource):
        return with_columns(made, name, options.columns)
    sides = made if isinstance(made, Mapping) else {"train": made}
    if "train" not in sides or set(sides) - {"train", "test"}:
        raise ConfigError(f"expected a dictionary of 'train' and 'test' from '{name}', got {sorted(map(str, sides))}")
    return with_columns(from_tensors(sides["train"], sides.get("test"), name=name), name, options.columns)


def from_images(
    name: str,
    read: parquet_images.LabeledImages,
    statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> DatasetSource:
    """A source from decoded images; `statistics` are mean and std where they are published."""
    mean, std = statistics or channel_statistics(read.train.x)
    classes = len(read.class_names)
    names = read.class_names
    return DatasetSource(
        name,
        read.train,
        read.test,
        classes,
        names,
        mean,
        std,
        read.train_columns,
        read.test_columns,
        label_column=read.label_column,
        remarks=(f"images turned as their EXIF tags say: {read.turned}",) if read.turned else (),
    )


def from_folder(name: str, folder: Path, options: SourceOptions) -> DatasetSource:
    """A source from a folder of Parquet files: texts where their column is named, else images."""
    columns = (options.label_column, options.train_splits, options.columns)
    if is_text_dataset(name, options.words, options.image_column):
        read = text_files.read_parquet(folder, options.words.column, *columns)
        return from_texts(name, encode_dataset(*read, options.words), options.words)
    return from_images(name, parquet_images.read_folder(folder, options.image_column, *columns))


def from_texts(name: str, read: LabeledTexts, how: TextConfig) -> DatasetSource:
    """A source from numbered texts."""
    return DatasetSource(
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
        label_column=read.label_column,
        remarks=read.remarks,
    )


def encode_table(
    name: str, sheets: Mapping[str, Sequence[tabular.CsvTable]], where: object, options: SourceOptions
) -> DatasetSource:
    """A source from the sheets of a table."""
    return from_table(name, tabular.encode(sheets, where, options), where)


def from_table(name: str, read: tabular.LabeledTable, where: object) -> DatasetSource:
    """A source from a table's numbers."""
    mean, std = tabular.statistics(read, where)
    sides = read.sides

    def stored(side: LabeledSamples) -> LabeledSamples:
        return fill_missing(LabeledSamples(side.x.float(), side.y), read.columns, read.columns.means(mean))

    return DatasetSource(
        name,
        stored(sides.train),
        None if sides.test is None else stored(sides.test),
        len(sides.class_names),
        sides.class_names,
        mean,
        std,
        sides.train_columns,
        sides.test_columns,
        feature_names=read.feature_names,
        columns=read.columns,
        label_column=sides.label_column,
    )


# what cannot be asked --------------------------------------------------------------------------------------------


def with_columns(source: DatasetSource, name: str, columns: Sequence[str]) -> DatasetSource:
    """The source, if it has the columns that are asked for."""
    for column in columns:
        if column not in source.train_columns:
            known = suggest(column, source.train_columns) if source.train_columns else "; it has no further columns"
            raise ConfigError(f"dataset '{name}' has no column '{column}'{known}")
    return source


def is_text_dataset(name: str, words: TextConfig, image_column: str | None) -> bool:
    """Whether a column of texts is named; other settings of texts, or of images, do not go with that."""
    if words.column is None:
        reject_text_options(name, words)
    elif image_column is not None:
        raise ConfigError(f"expected image_column or text_column with dataset '{name}', got both")
    return words.column is not None


def reject_text_options(name: str, words: TextConfig) -> None:
    """Settings of texts where there are none."""
    if given := words.given_vocabulary():
        more = "" if given == "text_column" else "; text_column names the column of texts"
        raise ConfigError(
            f"expected {given} with texts in Parquet or CSV files, or of the Hub, got dataset '{name}'{more}"
        )


def _refuse_columns(name: str, options: SourceOptions) -> None:
    """Where there are none: folders of images, arrays."""
    columns = ", ".join(options.columns) or None
    reject_options(
        name,
        image_column=options.image_column,
        label_column=options.label_column,
        feature_columns=options.feature_columns,
        columns=columns,
    )


def reject_splits(name: str, train_splits: Sequence[str]) -> None:
    if list(train_splits) != list(TRAIN):
        raise ConfigError(f"dataset '{name}' has no splits to choose from, got train_splits {list(train_splits)}")


def reject_options(name: str, **options: object) -> None:
    """Options that a data set has no use for."""
    for option, value in options.items():
        if value is not None:
            raise ConfigError(f"dataset '{name}' has no use for {option}, got '{value}'")


def join_names(names: Iterable[object]) -> str:
    """'a', 'b' or 'c'."""
    *most, last = (f"'{name}'" for name in names)
    return f"{', '.join(most)} or {last}" if most else last
