"""Labeled rows of numbers from CSV files; nothing is guessed, and whatever is no number is refused by its row.

Shapes: N rows, F features.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data import bounds, parquet_images
from polyfed.data.column_schema import Columns, column_values
from polyfed.data.label_encoding import Files, encode_labels
from polyfed.data.samples import LABEL_NAMES, LabeledSamples
from polyfed.data.split_files import find_split_files
from polyfed.data.table_columns import FLAG, TableColumns, category_number, has_decimal_commas, is_missing
from polyfed.errors import ConfigError, first_line
from polyfed.registry import suggest

_LEAST_SPREAD = 1e-4  # of a column's deviation to its largest value: float32 keeps 7 digits, so 3 are left


@dataclass(frozen=True)
class LabeledTable:
    """What was read: both sides as they stand in the files, (N, F) float64, and what the features are called.

    Where `columns` has flags, a missing value is 0.
    """

    sides: parquet_images.LabeledImages
    feature_names: tuple[str, ...]
    columns: TableColumns = field(default_factory=TableColumns)


@dataclass(frozen=True)
class CsvTable:
    """One file, or a table in memory: its cells by column, without blanks around them."""

    path: object
    cells: dict[str, list[str]]


def read(
    place: Path,
    label_column: str | None = None,
    feature_columns: Sequence[str] | None = None,
    train_splits: Sequence[str] = ("train",),
    columns: Sequence[str] = (),
    categories: Mapping[str, Sequence[str]] | None = None,
    may_be_missing: bool = False,
    regression: bool = False,
) -> LabeledTable:
    """Read a CSV file, or a folder with train*.csv and test*.csv.

    The first line names the columns; they are separated by commas, semicolons or tabs. Blank lines do not count. Labels
    are whole numbers or words; those that do not fill 0..C-1 are numbered in sorted order, and their spelling names the
    classes.

    Args:
        place: a file, which is the training side, or a folder; its files' names say which side they are of.
        label_column: None for the one that has a usual name (label, target, class, y, ...).
        feature_columns: None for all that hold numbers, besides the label and `columns`.
        train_splits: the words in files' names that say "training side".
        columns: further columns of whole numbers or words; one that the test side lacks is left out there.
        categories: features that hold categories, with the names of these (`find_categories`).
        may_be_missing: whether numbers may be; each then gets a feature that says where it is.
        regression: whether labels are numbers to predict; the table then has no classes.

    Raises:
        ConfigError: no such file or column, rows of another length than the first, a label that is missing,
            fractional or below 0 (or, to be predicted, no finite number), a feature that is no finite number.
    """
    sheets = read_sheets(place, train_splits)
    return encode(sheets, place, label_column, feature_columns, columns, categories, may_be_missing, regression)


def read_sheets(place: Path, train_splits: Sequence[str]) -> dict[str, list[CsvTable]]:
    """All files of the sides that there are; see `find_csv_files`."""
    return {side: [read_sheet(path) for path in paths] for side, paths in find_csv_files(place, train_splits).items()}


def find_categories(sheets: Sequence[CsvTable], columns: Sequence[str]) -> dict[str, list[str]]:
    """The different values of some columns, sorted; missing ones do not count.

    Raises:
        ConfigError: no such column.
    """
    for sheet in sheets:
        for name in columns:
            check_column("category", name, sheet)
    cells = {name: {cell for sheet in sheets for cell in sheet.cells[name]} for name in columns}
    return {name: sorted(cell for cell in found if not is_missing(cell)) for name, found in cells.items()}


def encode(
    sheets: Mapping[str, Sequence[CsvTable]],
    place: object,
    label_column: str | None = None,
    feature_columns: Sequence[str] | None = None,
    columns: Sequence[str] = (),
    categories: Mapping[str, Sequence[str]] | None = None,
    may_be_missing: bool = False,
    regression: bool = False,
) -> LabeledTable:
    """Both sides' sheets as numbers; see `read`. place: where they are from, for messages."""
    first = sheets["train"][0]
    label = find_label(first, label_column)
    known = {name: _numbered(found) for name, found in (categories or {}).items()}
    features = _features(sheets["train"], label, feature_columns, columns, known)
    numbers_only = [name for name in features if name not in known]
    flags = numbers_only if may_be_missing else []
    raw = {}
    x = {}
    for side, parts in sheets.items():
        raw[side] = [cell for sheet in parts for cell in labels_of(sheet, label)]
        x[side] = np.concatenate([_matrix(sheet, features, known, flags) for sheet in parts])
    files = {side: rows_of(parts) for side, parts in sheets.items()}
    names: tuple[str, ...] = ()
    if regression:
        numbers: Mapping[str, NDArray[Any]] = {side: _targets(cells, label, place) for side, cells in raw.items()}
    else:
        numbers, names = encode_labels(infer_types(raw, label, place), Columns("", label, None), files)
    sides = {side: LabeledSamples(torch.from_numpy(x[side]), torch.from_numpy(numbers[side])) for side in sheets}
    more = {side: extra_columns(parts, columns, needed=side == "train") for side, parts in sheets.items()}
    read = parquet_images.LabeledImages(
        sides["train"], sides.get("test"), names, more["train"], more.get("test", {}), label
    )
    kinds = TableColumns(
        tuple(tuple(known.get(name, ())) for name in (*features, *[""] * len(flags))) if known else (),
        tuple((features.index(name), len(features) + number) for number, name in enumerate(flags)),
    )
    return LabeledTable(read, (*features, *map(FLAG.format, flags)), kinds)


def statistics(table: LabeledTable, where: object) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and (population) deviation of each feature over the training side; 1 for one that never varies.

    Raises:
        ConfigError: labels that are all the same, or a feature that cannot be told from a constant in float32.
    """
    if len(table.sides.class_names) < 2 and not table.sides.train.are_numbers:
        raise ConfigError(
            f"expected labels of two or more classes in {where}, got '{table.sides.class_names[0]}' alone"
        )
    x_NF = table.sides.train.x.numpy()
    mean = x_NF.mean(axis=0)
    std = x_NF.std(axis=0)
    varies = (x_NF != x_NF[0]).any(axis=0)
    for place, flag in table.columns.flags:
        present = x_NF[x_NF[:, flag] == 0, place]
        mean[place] = present.mean() if len(present) else 0.0
        std[place] = present.std() if len(present) else 1.0
        varies[place] = len(present) and bool((present != present[0]).any())
    std = np.where(varies, std, 1.0)
    flat = varies & (std < _LEAST_SPREAD * np.abs(x_NF).max(axis=0))
    if flat.any():
        raise ConfigError(
            f"column '{table.feature_names[int(flat.argmax())]}' of {where} varies too little beside its size to be "
            f"kept in float32; subtract a constant from it first"
        )
    for place in _as_they_are(table.columns):
        mean[place] = 0.0
        std[place] = 1.0
    return tuple(mean.tolist()), tuple(std.tolist())


def _as_they_are(columns: TableColumns) -> list[int]:
    """The features that are not standardized: categories, and what says whether a number is missing."""
    return [place for place, names in enumerate(columns.categories) if names] + [flag for _, flag in columns.flags]


def read_inference_csv(
    path: Path,
    features: Sequence[str],
    label_column: str | None = None,
    usual_label: str | None = None,
    columns: TableColumns | None = None,
) -> tuple[NDArray[np.float64], list[str] | None]:
    """Rows for a trained model.

    Args:
        path: a CSV file; it may hold other columns, in any order.
        features: the columns to take, in this order.
        label_column: that must be there; None for `usual_label`, or for a column of a usual name where that is one.
        usual_label: the label column of the files that the model was trained on.
        columns: which of the features are categories, or say where another is missing.

    Returns:
        (N, F) values and the N labels as they are spelt, or None.

    Raises:
        ConfigError: a column that is not there, a value that is no finite number, a label that is missing.
    """
    sheet = read_sheet(path)
    columns = columns or TableColumns()
    flagged = {flag for _, flag in columns.flags}
    stored = [name for place, name in enumerate(features) if place not in flagged]
    named = zip(features, columns.categories, strict=False)
    known = {name: _numbered(found) for name, found in named if found}
    x_NF = _matrix(sheet, stored, known, [features[place] for place, _ in columns.flags])
    return x_NF, new_labels(sheet, stored, label_column, usual_label)


def _numbered(names: Sequence[str]) -> dict[str, int]:
    """The number by which each category is stored."""
    return {name: 1 + place for place, name in enumerate(names)}


def new_labels(
    sheet: CsvTable, inputs: Sequence[str], label_column: str | None, usual_label: str | None
) -> list[str] | None:
    """The labels of new rows as they are spelt; see `read_inference_csv`. `inputs` are the columns that are none."""
    likely: Sequence[str] = ()
    if usual_label is not None and usual_label in sheet.cells:
        likely = (usual_label,)
    elif usual_label is None or usual_label in LABEL_NAMES:
        likely = LABEL_NAMES
    there = [name for name in likely if name in sheet.cells and name not in inputs]
    label = label_column or (there[0] if len(there) == 1 else None)
    return None if label is None else list(map(_plain, labels_of(sheet, label)))


# files ---------------------------------------------------------------------------------------------------------------


def find_csv_files(place: Path, train_splits: Sequence[str]) -> dict[str, list[Path]]:
    """The files of the training side and, if there are any, of the test side; a file alone is a training side.

    Raises:
        ConfigError: neither a CSV file nor a folder with a training side.
    """
    if place.is_dir():
        return find_split_files(place, train_splits, "csv")
    if not place.exists():
        raise ConfigError(f"expected a CSV file, or a folder with train*.csv and test*.csv, at {place}, got neither")
    if list(train_splits) != ["train"]:
        raise ConfigError(f"the file {place} has no splits to choose from, got train_splits {list(train_splits)}")
    return {"train": [place]}


def read_sheet(path: Path) -> CsvTable:
    """A whole file.

    Raises:
        ConfigError: it is no such file, has no rows, or rows of other lengths than its first line.
    """
    bounds.check_file(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            head = stream.readline()
            stream.seek(0)
            reader = csv.reader(stream, delimiter=max(",;\t", key=head.count), skipinitialspace=True, strict=True)
            names = [name.strip() for name in next(reader, [])]
            _check_names(names, path)
            rows = []
            for row in reader:
                is_blank = not row or (len(names) > 1 and len(row) == 1 and not row[0].strip())
                if is_blank:
                    continue
                if len(row) != len(names):
                    raise ConfigError(
                        f"expected {len(names)} values in every line of {path}, got {len(row)} in line "
                        f"{reader.line_num}"
                    )
                rows.append(row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"expected a CSV file in UTF-8, got {path}: {first_line(error)}") from error
    if not rows:
        raise ConfigError(f"expected at least one row below the columns' names in {path}, got none")
    return CsvTable(path, {name: [cell.strip() for cell in cells] for name, *cells in zip(names, *rows, strict=True)})


def _check_names(names: Sequence[str], path: Path) -> None:
    """The first line has to name the columns."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or "" in names or twice or all(_number(name) is not None for name in names):
        came = f"'{twice[0]}' twice" if twice and twice[0] else f"'{','.join(names)[:40]}'"
        raise ConfigError(f"expected a name of its own for every column in the first line of {path}, got {came}")


def rows_of(sheets: Sequence[CsvTable]) -> Files:
    """The files of a side and how many rows each has."""
    return [(sheet.path, len(next(iter(sheet.cells.values())))) for sheet in sheets]


# columns -------------------------------------------------------------------------------------------------------------


def find_label(sheet: CsvTable, named: str | None) -> str:
    """The named column, else the only one of a usual name.

    Raises:
        ConfigError: no such column, none or several.
    """
    if named is not None:
        check_column("label", named, sheet)
        return named
    usual = [name for name in LABEL_NAMES if name in sheet.cells]
    if len(usual) == 1:
        return usual[0]
    came = f"several: {', '.join(usual)}" if usual else f"none among: {', '.join(sheet.cells)[:200]}"
    raise ConfigError(f"expected one label column in {sheet.path}, got {came}; name it with label_column")


def _features(
    sheets: Sequence[CsvTable], label: str, asked: Sequence[str] | None, others: Sequence[str], known: Collection[str]
) -> tuple[str, ...]:
    """The columns to learn from: those asked for, else all with a number in them, so that a stray word is noticed.

    known: those of categories, which come last where they are not asked for.
    """
    if asked is None:
        cells = sheets[0].cells
        found = [name for name in cells if name != label and name not in others and name not in known]
        commas = [name for name in found if has_decimal_commas(cells[name])]
        if commas:
            what = f"in column '{commas[0]}' of {sheets[0].path}, or other feature_columns"
            raise ConfigError(f"expected decimal points {what}, got commas: '{cells[commas[0]][0]}'")
        asked = [name for name in found if any(_number(cell) is not None for cell in cells[name])]
    asked = [*asked, *(name for name in known if name not in asked)]
    if not asked:
        raise ConfigError(
            f"expected columns of numbers besides '{label}' in {sheets[0].path}, got none; text_column names a column "
            "of texts"
        )
    if label in asked or len(set(asked)) < len(asked):
        raise ConfigError(f"expected different feature_columns, without the label '{label}', got {list(asked)}")
    return tuple(asked)


def check_column(what: str, name: str, sheet: CsvTable) -> None:
    """Refuse a column that is not there."""
    if name not in sheet.cells:
        raise ConfigError(
            f"expected the {what} column '{name}' in {sheet.path}, got no such{suggest(name, sheet.cells)}"
        )


def _matrix(
    sheet: CsvTable, features: Sequence[str], known: Mapping[str, Mapping[str, int]], flags: Sequence[str]
) -> NDArray[np.float64]:
    """(N, F) finite numbers. known: the numbers of categories by feature. flags: features that may be missing."""
    for name in features:
        check_column("feature", name, sheet)
    values: list[list[float | None]] = []
    for name in features:
        cells = sheet.cells[name]
        if name in known:
            values.append([category_number(cell, known[name]) for cell in cells])
        elif name in flags:
            values.append([0.0 if is_missing(cell) else _number(cell) for cell in cells])
        else:
            values.append([_number(cell) for cell in cells])
    values += [[float(is_missing(cell)) for cell in sheet.cells[name]] for name in flags]
    x_NF = np.array([[np.nan if value is None else value for value in column] for column in values]).T
    with np.errstate(over="ignore"):
        wrong = np.argwhere(~np.isfinite(x_NF.astype(np.float32)))
    if len(wrong):
        row, column = wrong[0]
        raise ConfigError(
            f"expected a finite number in row {row} of column '{features[column]}' of {sheet.path}, got "
            f"'{sheet.cells[features[column]][row][:40]}'; fill or drop such rows, name other feature_columns, or set "
            "missing_values"
        )
    return x_NF


def _number(cell: str) -> float | None:
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def extra_columns(sheets: Sequence[CsvTable], names: Sequence[str], needed: bool) -> dict[str, NDArray[Any]]:
    """Columns to deal by: whole numbers where all cells are, else words."""
    found = {}
    for name in dict.fromkeys(names):
        if not needed and name not in sheets[0].cells:
            continue
        for sheet in sheets:
            check_column("further", name, sheet)
        cells = [cell for sheet in sheets for cell in sheet.cells[name]]
        if "" in cells:
            raise ConfigError(f"expected a value in every row of column '{name}' of {sheets[0].path}, got an empty one")
        found[name] = column_values(_whole(cells) or cells, f"column '{name}' of {sheets[0].path}")
    return found


# labels --------------------------------------------------------------------------------------------------------------


def labels_of(sheet: CsvTable, label: str) -> list[str]:
    """A side's labels as they are spelt; none is empty."""
    check_column("label", label, sheet)
    cells = sheet.cells[label]
    if "" in cells:
        raise ConfigError(
            f"expected a label in every row, got an empty one in row {cells.index('')} of '{label}' of {sheet.path}"
        )
    return cells


def infer_types(raw: Mapping[str, list[str]], label: str, place: object) -> dict[str, NDArray[Any]]:
    """Labels as int64 where all of both sides are whole numbers, else as words."""
    every = [cell for cells in raw.values() for cell in cells]
    if _whole(every) is not None:
        return {side: np.array(_whole(cells), dtype=np.int64) for side, cells in raw.items()}
    if all(_number(cell) is not None for cell in every):
        wrong = next(cell for cell in every if _whole([cell]) is None)
        raise ConfigError(
            f"expected classes, whole numbers or words, in label column '{label}' of {place}, got '{wrong[:40]}'; "
            "data.task = 'regression' predicts numbers"
        )
    return {side: np.array(cells, dtype=np.str_) for side, cells in raw.items()}


def _targets(cells: Sequence[str], label: str, place: object) -> NDArray[np.float32]:
    """Labels as numbers to predict."""
    with np.errstate(over="ignore"):
        found = map(_number, cells)
        values = np.array([np.nan if value is None else value for value in found], dtype=np.float32)
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise ConfigError(
            f"expected finite numbers to predict in label column '{label}' of {place}, got '{cells[wrong[0]][:40]}' in "
            f"row {wrong[0]}"
        )
    return values


def _whole(cells: Sequence[str]) -> list[int] | None:
    """Whole numbers, also spelt 3.0; None where one cell is none."""
    values = [_number(cell) for cell in cells]
    if all(value is not None and value.is_integer() and abs(value) < 2**53 for value in values):
        return [int(value) for value in values if value is not None]
    return None


def _plain(cell: str) -> str:
    """A label's usual spelling: 3 for 3.0."""
    whole = _whole([cell])
    return cell if whole is None else str(whole[0])
