"""Files of the user's own, by their kind and path."""

from __future__ import annotations

from polyfed.data import arrow_tables, files, images, tables
from polyfed.data.dataset import DatasetSource
from polyfed.data.options import SourceOptions
from polyfed.data.sources import located, source


@source("images:PATH", files=True)
def image_folders(options: SourceOptions) -> DatasetSource:
    """A folder per class."""
    return images.read_folders(options, [located(options)])


@source("csv:PATH", files=True)
def csv_files(options: SourceOptions) -> DatasetSource:
    """A table, or texts."""
    return tables.read_source(options, located(options))


@source("parquet:PATH", files=True)
def parquet_files(options: SourceOptions) -> DatasetSource:
    """A folder of images or texts in Parquet files."""
    return arrow_tables.read_source(options, lambda: [located(options)])


@source("clients:PATH", files=True, by_client=True)
def client_folders(options: SourceOptions) -> DatasetSource:
    """A folder per client, each of Parquet files, of CSV files or of images."""
    place = located(options)
    kind, homes = files.client_folders(place)
    options = options.without_client()
    if kind == "csv":
        return tables.read_source(options, place, homes)
    if kind == "parquet":
        return arrow_tables.read_source(options, lambda: homes, of_clients=True)
    return images.read_folders(options, homes, of_clients=True)
