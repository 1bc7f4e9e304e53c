"""Texts with labels from Parquet and CSV files, and new texts for a trained model.

Shapes: N texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.data import bounds, tabular
from polyfed.data.column_schema import (
    Columns,
    holds_labels,
    label_columns,
    pick_column,
    several_labels,
)
from polyfed.data.parquet_files import open_parquet, read_extra_columns, same_columns
from polyfed.data.split_files import find_split_files
from polyfed.data.text import RawTexts
from polyfed.errors import ConfigError, first_line, gathered

TEXT_NAMES = ("text", "sentence", "tweet", "content", "review")  # the usual ones


def read_parquet(
    folder: Path,
    text_column: str | None = None,
    label_column: str | None = None,
    train_splits: Sequence[str] = ("train",),
    columns: Sequence[str] = (),
) -> tuple[dict[str, RawTexts], Columns]:
    """Read a folder of Parquet files with texts.

    Sides, labels and further columns as in `polyfed.data.parquet_images.read_folder`.

    Args:
        folder: holds ``*.parquet``, directly or one folder down.
        text_column: the column with texts; None to find it.
        label_column: the column with labels; None to find it.
        train_splits: the words in files' names that say "training side".
        columns: further columns of whole numbers or strings.

    Returns:
        The sides, "train" and, if there is one, "test"; and the columns that were read.

    Raises:
        ConfigError: as for images; a text that is missing or no string.
    """
    files = find_split_files(folder, train_splits)
    found = same_columns([path for paths in files.values() for path in paths], pick_columns, text_column, label_column)
    sides: dict[str, RawTexts] = {}
    for side, paths in files.items():
        by_file = {path: list(_rows(path, found)) for path in paths}
        rows = [row for path in paths for row in by_file[path]]
        if not rows:
            raise ConfigError(f"expected at least one row in {paths[0]}, got an empty file")
        more = read_extra_columns(paths, columns, needed=side == "train")
        texts = [text for text, _ in rows]
        labels = np.array([label for _, label in rows])
        sides[side] = RawTexts(texts, labels, more, [(path, range(len(by_file[path]))) for path in paths])
    return sides, found


def read_csv(
    place: Path,
    text_column: str | None = None,
    label_column: str | None = None,
    train_splits: Sequence[str] = ("train",),
    columns: Sequence[str] = (),
) -> tuple[dict[str, RawTexts], Columns]:
    """Read a CSV file with texts, or a folder with train*.csv and test*.csv.

    Files, labels and further columns as in `polyfed.data.tabular.read`; blanks around a text do not count, and a cell
    without anything else is a missing text.

    Args:
        place: a file, which is the training side, or a folder.
        text_column: the column with texts; None to find it.
        label_column: the column with labels; None to find it.
        train_splits: the words in files' names that say "training side".
        columns: further columns.

    Returns:
        As `read_parquet` does.

    Raises:
        ConfigError: as for tables; a text that is missing.
    """
    sheets = tabular.read_sheets(place, train_splits)
    first = sheets["train"][0]
    text = _text_column(first, text_column)
    label = tabular.find_label(first, label_column)
    every = [sheet for parts in sheets.values() for sheet in parts]
    attempts: list[Callable[[], Any]] = [
        lambda: tabular.check_columns(every, label),
        lambda: tabular.infer_types(sheets, label, place),
        lambda: tabular.each_file(sheets, lambda sheet: _texts(sheet, text)),
    ]
    _, labels, cells = gathered(attempts)
    sides = {}
    for side, parts in sheets.items():
        texts = [cell for part in cells[side] for cell in part]
        more = tabular.extra_columns(parts, columns, needed=side == "train")
        sides[side] = RawTexts(texts, labels[side], more, tabular.rows_of(parts))
    return sides, Columns(text, label, None)


def read_inference_csv(
    path: Path, text_column: str | None, usual_text: str | None, label_column: str | None, usual_label: str | None
) -> tuple[list[str], tabular.NewLabels]:
    """Texts of a CSV file for a trained model, and their labels, or None.

    Args:
        path: the file; it may hold other columns.
        text_column: that must be there; None for `usual_text`, if it is there, else a column of a usual name.
        usual_text: the text column of the files that the model was trained on.
        label_column, usual_label: see `polyfed.data.tabular.read_inference_csv`.

    Raises:
        ConfigError: a column that is not there, a text or a label that is missing.
    """
    sheet = tabular.read_sheet(path)
    column = _text_column(sheet, text_column or (usual_text if usual_text in sheet.cells else None))
    return _texts(sheet, column), tabular.new_labels(sheet, (column,), label_column, usual_label)


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, one text each; blank lines do not count.

    Raises:
        ConfigError: no text file in UTF-8, or none but blank lines.
    """
    bounds.check_file(path)
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected a text file in UTF-8, got {path}: {first_line(error)}") from error
    texts = [line for line in lines if line]
    if not texts:
        raise ConfigError(f"expected a text in every line of {path}, got none")
    return texts


def _text_column(sheet: tabular.CsvTable, named: str | None) -> str:
    """The named column, else the only one of a usual name."""
    return pick_column("text", named, [name for name in sheet.cells if name in TEXT_NAMES], [*sheet.cells], sheet.path)


def _texts(sheet: tabular.CsvTable, column: str) -> list[str]:
    """A column of a CSV file; no cell is empty."""
    tabular.check_column("text", column, [sheet])
    cells = sheet.cells[column]
    rows = [row for row, cell in enumerate(cells) if not cell]
    if rows:
        raise sheet.refusal("a text", column, rows, "drop such rows")
    return cells


# Parquet -------------------------------------------------------------------------------------------------------------


def pick_columns(
    schema: Any,
    features: dict[str, dict[str, Any]],
    text_column: str | None,
    label_column: str | None,
    where: object,
) -> Columns:
    """The text and the label column of one Arrow schema; `features` is what `datasets` knows about the columns.

    Raises:
        ConfigError: none, several, one that is named but absent, or a type that cannot hold them.
    """
    text = find_text_column(schema, text_column, where)
    label = pick_column("label", label_column, label_columns(schema, features), schema.names, where)
    if not holds_labels(schema.field(label).type):
        raise ConfigError(
            f"expected whole numbers or strings in label column '{label}' of {where}, got type "
            f"{schema.field(label).type}{several_labels(schema.field(label).type)}"
        )
    names = features.get(label, {}).get("names")
    return Columns(text, label, tuple(map(str, names)) if isinstance(names, list) else None)


def find_text_column(schema: Any, named: str | None, where: object) -> str:
    """The named column of an Arrow schema, else the only one with texts that has a usual name.

    Raises:
        ConfigError: no such column, none or several, or one without texts.
    """
    usual = [name for name in schema.names if name in TEXT_NAMES and _holds_text(schema.field(name).type)]
    text = pick_column("text", named, usual, schema.names, where)
    if not _holds_text(schema.field(text).type):
        raise ConfigError(f"expected texts in column '{text}' of {where}, got type {schema.field(text).type}")
    return text


def _holds_text(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _rows(path: Path, columns: Columns) -> Iterator[tuple[str, Any]]:
    """Texts and raw labels of one file."""
    import pyarrow as pa

    row = 0
    try:
        for batch in open_parquet(path).iter_batches(columns=[columns.image, columns.label]):
            cells = batch.column(columns.image).to_pylist()
            marks = batch.column(columns.label).to_pylist()
            for text, label in zip(cells, marks, strict=True):
                if text is None or label is None:
                    what = columns.image if text is None else columns.label
                    raise ConfigError(f"expected '{what}' in every row, got an empty one in row {row} of {path}")
                row += 1
                yield text, label if isinstance(label, str) else int(label)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected a whole Parquet file, got {path}: {first_line(error)}") from error
