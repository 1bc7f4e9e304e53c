"""Parquet files: found, opened, and further columns of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.data import bounds
from polyfed.data.column_schema import Columns, check_column, column_values, stored_features
from polyfed.data.split_files import files_of
from polyfed.errors import ConfigError, first_line

_ROWS = 50_000  # of a column at a time


def has_parquet(folder: Path) -> bool:
    """Whether `folder`, or a folder right under it, holds a file named ``*.parquet``."""
    return folder.is_dir() and bool(parquet_files(folder))


def parquet_files(folder: Path) -> list[Path]:
    return files_of(folder, "parquet")


def open_parquet(path: Path) -> Any:
    """A ``pyarrow.parquet.ParquetFile``.

    Raises:
        ConfigError: not a whole Parquet file, or no file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    bounds.check_file(path)
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"expected a whole Parquet file, got {path}: {first_line(error)}") from error


def same_columns(
    paths: Sequence[Path], pick: Callable[..., Columns], named: str | None, label_column: str | None
) -> Columns:
    """What `pick` finds in the schema of each file, the same in all.

    Raises:
        ConfigError: what `pick` raises; or files that differ.
    """
    chosen: Columns | None = None
    for path in paths:
        schema = open_parquet(path).schema_arrow
        came = pick(schema, stored_features(schema.metadata), named, label_column, path)
        if chosen is not None and came != chosen:
            raise ConfigError(
                f"expected the columns '{chosen.image}' and '{chosen.label}' with the same classes in every file, "
                f"got '{came.image}' and '{came.label}' with other names or classes in {path}"
            )
        chosen = came
    assert chosen is not None  # split_files gave at least one path
    return chosen


def read_extra_columns(paths: Sequence[Path], names: Sequence[str], needed: bool) -> dict[str, NDArray[Any]]:
    """Further columns of one side, row by row in file order.

    Args:
        paths: the files of the side.
        names: of the columns.
        needed: whether each must be there; otherwise one that the first file lacks is left out.

    Raises:
        ConfigError: a column that is needed and absent, or absent in some files only; values that are no whole numbers
            or strings, or missing.
    """
    found: dict[str, NDArray[Any]] = {}
    for name in dict.fromkeys(names):
        if not needed and name not in open_parquet(paths[0]).schema_arrow.names:
            continue
        parts = []
        for path in paths:
            check_column("further", name, open_parquet(path).schema_arrow.names, path)
            for cells in column_batches(path, name):
                parts.append(column_values(cells.to_pylist(), f"column '{name}' of {path}"))
        found[name] = column_values(np.concatenate(parts), f"column '{name}' of {paths[0].parent}")
    return found


def column_batches(path: Path, name: str) -> Iterator[Any]:
    """One column of a file, some rows at a time."""
    import pyarrow as pa

    try:
        for batch in open_parquet(path).iter_batches(batch_size=_ROWS, columns=[name]):
            yield batch.column(0)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"expected a whole Parquet file, got {path}: {first_line(error)}") from error
