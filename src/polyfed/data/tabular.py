"""Labeled rows of numbers from CSV files; nothing is guessed, and whatever is no number is refused by its line.

All that is wrong with any of the files is told at once.

Shapes: N rows, F features.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data import bounds, parquet_images
from polyfed.data.column_schema import Columns, column_values
from polyfed.data.label_encoding import Files, encode_labels
from polyfed.data.options import SourceOptions
from polyfed.data.samples import LABEL_NAMES, LabeledSamples, of_so_many
from polyfed.data.split_files import find_split_files
from polyfed.data.table_columns import FLAG, USUAL, CellFormat, TableColumns
from polyfed.errors import ConfigError, ConfigErrors, first_line, gathered, suggest

S = TypeVar("S")
T = TypeVar("T")
NewLabels = list[tuple[str, str]] | None  # as they are spelt, and where they stand

_NAMED = 5  # files in a message
_CORRECT = "correct or drop such rows"
_LIKE_THE_RUNS = "write such rows as those of the run, or drop them"
_ADVICE = f"{_CORRECT}, name other feature_columns, or set missing_values"
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
    """One file, or a table in memory: its cells by column, without blanks around them.

    lines: on which lines of the file its rows begin; of a table in memory, the numbers of its rows. form: how its cells
    are spelt.
    """

    path: object
    cells: dict[str, list[str]]
    lines: Sequence[int]
    form: CellFormat = USUAL

    def place(self, row: int) -> str:
        """Where a row stands, for messages."""
        return f"{'row' if isinstance(self.lines, range) else 'line'} {self.lines[row]}"

    def refusal(self, expected: str, column: str, rows: Sequence[int], hint: str) -> ConfigError:
        """What is said of wrong cells of a column. rows: theirs. hint: what to do."""
        where = f"{self.place(rows[0])} of column '{column}' of {self.path}"
        got = f"'{self.cells[column][rows[0]][:40]}'"
        return ConfigError(f"expected {expected} in {where}, got {got}{of_so_many(len(rows))}; {hint}")


def read_sheets(place: Path, train_splits: Sequence[str], form: CellFormat = USUAL) -> dict[str, list[CsvTable]]:
    """All files of the sides that there are; see `find_csv_files`.

    The first line of a file names the columns; they are separated by commas, semicolons or tabs. Blank lines do not
    count.

    Args:
        place: a file, which is the training side, or a folder with train*.csv and test*.csv.
        train_splits: the words in files' names that say "training side".
        form: how cells are spelt.

    Raises:
        ConfigError: no such file, or rows of another length than the first.
    """
    return each_file(find_csv_files(place, train_splits), functools.partial(read_sheet, form=form))


def each_file(files: Mapping[str, Sequence[S]], read: Callable[[S], T]) -> dict[str, list[T]]:
    """What `read` makes of each file of each side, or all that is wrong with any."""
    made = iter(gathered(functools.partial(read, file) for parts in files.values() for file in parts))
    return {side: [next(made) for _ in parts] for side, parts in files.items()}


def encode(sheets: Mapping[str, Sequence[CsvTable]], place: object, options: SourceOptions) -> LabeledTable:
    """Both sides' sheets as numbers.

    Labels are whole numbers or words; those that do not fill 0..C-1 are numbered in sorted order, and their spelling
    names the classes.

    Args:
        sheets: "train" and, if there is one, "test".
        place: where they are from, for messages.
        options: of it label_column, feature_columns, category_columns (numbered by the training side's values),
            columns, may_be_missing (each number then gets a feature that says where it is) and regression.

    Raises:
        ConfigError: columns that a file lacks, a label that is missing, fractional or below 0 (or, to be predicted, no
            finite number), a feature that is no finite number.
    """
    label = find_label(sheets["train"][0], options.label_column)
    found = _find_categories(sheets["train"], options.category_columns)
    known = {name: _numbered(values) for name, values in found.items()}
    features = _features(sheets["train"], label, options, known)
    flags = [name for name in features if name not in known] if options.may_be_missing else []

    def labels() -> tuple[Mapping[str, NDArray[Any]], tuple[str, ...]]:
        return _labels(sheets, label, place, options.regression)

    def inputs() -> dict[str, NDArray[np.float64]]:
        parts = each_file(sheets, lambda sheet: _matrix(sheet, features, known, flags, _ADVICE))
        return {side: np.concatenate(x) for side, x in parts.items()}

    def more() -> dict[str, dict[str, NDArray[Any]]]:
        return {side: extra_columns(parts, options.columns, side == "train") for side, parts in sheets.items()}

    every = [sheet for parts in sheets.values() for sheet in parts]
    attempts: list[Callable[[], Any]] = [lambda: check_columns(every, label, features, known), labels, inputs, more]
    _, (numbers, names), x, further = gathered(attempts)
    sides = {side: LabeledSamples(torch.from_numpy(x[side]), torch.from_numpy(numbers[side])) for side in sheets}
    read = parquet_images.LabeledImages(
        sides["train"], sides.get("test"), names, further["train"], further.get("test", {}), label
    )
    kinds = TableColumns(
        tuple(tuple(found.get(name, ())) for name in (*features, *[""] * len(flags))) if known else (),
        tuple((features.index(name), len(features) + number) for number, name in enumerate(flags)),
        options.cells,
    )
    return LabeledTable(read, (*features, *map(FLAG.format, flags)), kinds)


def _find_categories(sheets: Sequence[CsvTable], columns: Sequence[str]) -> dict[str, list[str]]:
    """The different values of some columns, sorted; missing ones do not count."""
    found = {name: {cell for sheet in sheets for cell in sheet.cells.get(name, ())} for name in columns}
    is_missing = sheets[0].form.is_missing
    return {name: sorted(cell for cell in cells if not is_missing(cell)) for name, cells in found.items()}


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
) -> tuple[NDArray[np.float64], NewLabels]:
    """Rows for a trained model.

    Args:
        path: a CSV file; it may hold other columns, in any order.
        features: the columns to take, in this order.
        label_column: that must be there; None for `usual_label`, or for a column of a usual name where that is one.
        usual_label: the label column of the files that the model was trained on.
        columns: which of the features are categories, or say where another is missing.

    Returns:
        (N, F) values and the N labels, or None.

    Raises:
        ConfigError: a column that is not there, a value that is no finite number, a label that is missing.
    """
    columns = columns or TableColumns()
    sheet = read_sheet(path, columns.cells)
    flagged = {flag for _, flag in columns.flags}
    stored = [name for place, name in enumerate(features) if place not in flagged]
    named = zip(features, columns.categories, strict=False)
    known = {name: _numbered(found) for name, found in named if found}
    flags = [features[place] for place, _ in columns.flags]
    attempts: list[Callable[[], Any]] = [
        lambda: check_columns([sheet], None, stored, known),
        lambda: _matrix(sheet, stored, known, flags, _LIKE_THE_RUNS),
        lambda: new_labels(sheet, stored, label_column, usual_label),
    ]
    _, x_NF, labels = gathered(attempts, "predict")
    return x_NF, labels


def _numbered(names: Sequence[str]) -> dict[str, int]:
    """The number by which each category is stored."""
    return {name: 1 + place for place, name in enumerate(names)}


def new_labels(sheet: CsvTable, inputs: Sequence[str], label_column: str | None, usual_label: str | None) -> NewLabels:
    """The labels of new rows; see `read_inference_csv`. `inputs` are the columns that are none."""
    likely: Sequence[str] = ()
    if usual_label is not None and usual_label in sheet.cells:
        likely = (usual_label,)
    elif usual_label is None or usual_label in LABEL_NAMES:
        likely = LABEL_NAMES
    there = [name for name in likely if name in sheet.cells and name not in inputs]
    label = label_column or (there[0] if len(there) == 1 else None)
    if label is None:
        return None
    check_columns([sheet], label)
    places = [f"{sheet.place(row)} of {sheet.path}" for row in range(len(sheet.lines))]
    return [(sheet.form.plain(cell), place) for cell, place in zip(labels_of(sheet, label), places, strict=True)]


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


def read_sheet(path: Path, form: CellFormat = USUAL) -> CsvTable:
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
            lines = []
            begin = reader.line_num + 1
            for row in reader:
                is_blank = not row or (len(names) > 1 and len(row) == 1 and not row[0].strip())
                if not is_blank:
                    rows.append(row)
                    lines.append(begin)
                begin = reader.line_num + 1
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"expected a CSV file in UTF-8, got {path}: {first_line(error)}") from error
    if not rows:
        raise ConfigError(f"expected at least one row below the columns' names in {path}, got none")
    wrong = [place for place, row in enumerate(rows) if len(row) != len(names)]
    if wrong:
        raise ConfigError(
            f"expected {len(names)} values in every line of {path}, got {len(rows[wrong[0]])} in line {lines[wrong[0]]}"
            f"{of_so_many(len(wrong))}"
        )
    cells = {name: [cell.strip() for cell in column] for name, *column in zip(names, *rows, strict=True)}
    return CsvTable(path, cells, lines, form)


def _check_names(names: Sequence[str], path: Path) -> None:
    """The first line has to name the columns."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or "" in names or twice or all(USUAL.number(name) is not None for name in names):
        came = f"'{twice[0]}' twice" if twice and twice[0] else f"'{','.join(names)[:40]}'"
        raise ConfigError(f"expected a name of its own for every column in the first line of {path}, got {came}")


def rows_of(sheets: Sequence[CsvTable]) -> Files:
    """The files of a side and where the rows of each stand."""
    return [(sheet.path, sheet.lines) for sheet in sheets]


# columns -------------------------------------------------------------------------------------------------------------


def find_label(sheet: CsvTable, named: str | None) -> str:
    """The named column, else the only one of a usual name.

    Raises:
        ConfigError: no such column, none or several.
    """
    if named is not None:
        check_columns([sheet], named)
        return named
    usual = [name for name in LABEL_NAMES if name in sheet.cells]
    if len(usual) == 1:
        return usual[0]
    came = f"several: {', '.join(usual)}" if usual else f"none among: {', '.join(sheet.cells)[:200]}"
    raise ConfigError(f"expected one label column in {sheet.path}, got {came}; name it with label_column")


def _features(
    sheets: Sequence[CsvTable], label: str, options: SourceOptions, known: Collection[str]
) -> tuple[str, ...]:
    """The columns to learn from: those asked for, else all with a number in them, so that a stray word is noticed.

    sheets: whose columns count. known: those of categories, which come last where they are not asked for.
    """
    if options.feature_columns is not None:
        asked = [*options.feature_columns]
    else:
        names = dict.fromkeys(name for sheet in sheets for name in sheet.cells)
        found = [name for name in names if name != label and name not in options.columns and name not in known]
        asked = [name for name in found if any(_holds_numbers(sheet, name) for sheet in sheets)]
    asked = [*asked, *(name for name in known if name not in asked)]
    if not asked:
        raise ConfigError(
            f"expected columns of numbers besides '{label}' in {sheets[0].path}, got none; text_column names a column "
            "of texts"
        )
    if label in asked or len(set(asked)) < len(asked):
        raise ConfigError(f"expected different feature_columns, without the label '{label}', got {list(asked)}")
    return tuple(asked)


def _holds_numbers(sheet: CsvTable, name: str) -> bool:
    """Whether a column has a number, or nothing but numbers that are spelt otherwise."""
    cells = sheet.cells.get(name, ())
    return any(sheet.form.number(cell) is not None for cell in cells) or sheet.form.is_other(cells)


def check_columns(
    sheets: Sequence[CsvTable], label: str | None, features: Sequence[str] = (), known: Collection[str] = ()
) -> None:
    """Refuse columns that some files lack. known: the features that are categories."""
    kinds = {} if label is None else {label: "label"}
    kinds |= {name: "category" if name in known else "feature" for name in features}
    gathered(functools.partial(check_column, kind, name, sheets) for name, kind in kinds.items())


def check_column(kind: str, name: str, sheets: Sequence[CsvTable]) -> None:
    """Refuse a column that some files lack."""
    lacking = [sheet for sheet in sheets if name not in sheet.cells]
    if not lacking:
        return
    having = [str(sheet.path) for sheet in sheets if name in sheet.cells]
    where = ", ".join(str(sheet.path) for sheet in lacking[:_NAMED])
    where += f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
    others = ""
    if having:
        others = f"; {having[0]} has it" if len(having) == 1 else f"; {len(having)} others have it"
        others += ", and feature_columns may name others" if kind == "feature" else ""
    raise ConfigError(
        f"expected the {kind} column '{name}' in {where}, got no such{suggest(name, lacking[0].cells)}{others}"
    )


def _matrix(
    sheet: CsvTable, features: Sequence[str], known: Mapping[str, Mapping[str, int]], flags: Sequence[str], advice: str
) -> NDArray[np.float64]:
    """(N, F) finite numbers, of the features that are there.

    known: the numbers of categories by feature. flags: features that may be missing. advice: on cells that are wrong.
    """
    form = sheet.form
    nothing = ["0"] * len(sheet.lines)  # a column that is not there, of which others tell
    values: list[Sequence[float]] = []
    problems = []
    for name in features:
        cells = sheet.cells.get(name, nothing)
        if name in known:
            values.append([form.category(cell, known[name]) for cell in cells])
            continue
        present = ["0" if name in flags and form.is_missing(cell) else cell for cell in cells]
        numbers, wrong = _numbers(present, form)
        values.append(numbers.tolist())
        if wrong:
            problems.append(str(sheet.refusal("a finite number", name, wrong, _hint(cells[wrong[0]], form, advice))))
    if problems:
        raise ConfigErrors(problems)
    values += [[float(form.is_missing(cell)) for cell in sheet.cells.get(name, nothing)] for name in flags]
    return np.array(values, dtype=np.float64).T


def _numbers(cells: Sequence[str], form: CellFormat) -> tuple[NDArray[np.float64], list[int]]:
    """Cells as numbers, and the rows of those that are none, or are not finite in float32."""
    found = (form.number(cell) for cell in cells)
    values = np.array([np.nan if value is None else value for value in found], dtype=np.float64)
    with np.errstate(over="ignore"):
        return values, np.flatnonzero(~np.isfinite(values.astype(np.float32))).tolist()


def _hint(cell: str, form: CellFormat, advice: str) -> str:
    """What to do about a cell that is no number."""
    if form.has_other_decimals(cell) and advice != _LIKE_THE_RUNS:
        return f"data.decimal = '{form.other_sign}' reads such numbers"
    grouped = form.other_sign in cell and not form.has_other_decimals(cell)
    if grouped and form.number(cell.replace(form.other_sign, "")) is not None:
        return f"write numbers without '{form.other_sign}' between thousands"
    if advice == _ADVICE and not form.is_missing(cell):
        return f"{advice} and missing_words"
    return advice


def extra_columns(sheets: Sequence[CsvTable], names: Sequence[str], needed: bool) -> dict[str, NDArray[Any]]:
    """Columns to deal by: whole numbers where all cells are, else words."""
    found = {}
    for name in dict.fromkeys(names):
        if not needed and name not in sheets[0].cells:
            continue
        check_column("further", name, sheets)
        gathered(functools.partial(_check_filled, sheet, name) for sheet in sheets)
        cells = [cell for sheet in sheets for cell in sheet.cells[name]]
        found[name] = column_values(sheets[0].form.whole(cells) or cells, f"column '{name}' of {sheets[0].path}")
    return found


def _check_filled(sheet: CsvTable, name: str) -> None:
    """Refuse empty cells of a column."""
    rows = [row for row, cell in enumerate(sheet.cells[name]) if not cell]
    if rows:
        raise sheet.refusal("a value", name, rows, _CORRECT)


# labels --------------------------------------------------------------------------------------------------------------


def labels_of(sheet: CsvTable, label: str) -> list[str]:
    """A file's labels as they are spelt; none is missing. None where it has no such column, of which others tell."""
    cells = sheet.cells.get(label, [])
    rows = [row for row, cell in enumerate(cells) if sheet.form.is_missing(cell)]
    if rows:
        cell = sheet.cells[label][rows[0]]
        named = "" if USUAL.is_missing(cell) else ", or leave this word out of data.missing_words"
        raise sheet.refusal("a label", label, rows, _CORRECT + named)
    return cells


def _labels(
    sheets: Mapping[str, Sequence[CsvTable]], label: str, place: object, regression: bool
) -> tuple[Mapping[str, NDArray[Any]], tuple[str, ...]]:
    """Both sides' labels as numbers to predict, or as classes with their names."""
    if regression:
        targets = each_file(sheets, lambda sheet: _targets(sheet, label))
        return {side: np.concatenate(parts) for side, parts in targets.items()}, ()
    files = {side: rows_of(parts) for side, parts in sheets.items()}
    return encode_labels(infer_types(sheets, label, place), Columns("", label, None), files)


def infer_types(sheets: Mapping[str, Sequence[CsvTable]], label: str, place: object) -> dict[str, NDArray[Any]]:
    """Labels as int64 where all of both sides are whole numbers, else as words."""
    spelt = each_file(sheets, lambda sheet: labels_of(sheet, label))
    raw = {side: [cell for part in parts for cell in part] for side, parts in spelt.items()}
    every = [cell for cells in raw.values() for cell in cells]
    form = sheets["train"][0].form
    if form.whole(every) is not None:
        return {side: np.array(form.whole(cells), dtype=np.int64) for side, cells in raw.items()}
    if all(form.number(cell) is not None for cell in every):
        wrong = next(cell for cell in every if form.whole([cell]) is None)
        raise ConfigError(
            f"expected classes, whole numbers or words, in label column '{label}' of {place}, got '{wrong[:40]}'; "
            "data.task = 'regression' predicts numbers"
        )
    return {side: np.array(cells, dtype=np.str_) for side, cells in raw.items()}


def _targets(sheet: CsvTable, label: str) -> NDArray[np.float32]:
    """A file's labels as numbers to predict."""
    cells = labels_of(sheet, label)
    values, wrong = _numbers(cells, sheet.form)
    if wrong:
        raise sheet.refusal("a finite number to predict", label, wrong, _hint(cells[wrong[0]], sheet.form, _CORRECT))
    return values.astype(np.float32)
